"""Adapters over HTTP: names as models, cards, loading and unloading while the server runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from adapter_folders import BASE, OPTIONS, make_adapter
from checkpoints import make_checkpoint
from running_server import MODEL, RunningServer
from torch import nn

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.models.checkpoint.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from compiled_engine.server.adapter_names import AdapterNames
from compiled_engine.server.errors import ApiError
from compiled_engine.server.lora_modules import adapters_of
from compiled_engine.server.options import ServerOptions


class Served(NamedTuple):
    """A server, the folder that clients may load from, and the base model."""

    url: str
    folder: Path
    model: nn.Module

    def post(self, path: str, *, key: str = "admin", **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120)

    def tokens(self, model: str) -> list[int]:
        fields = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        answer = self.post("/v1/completions", model=model, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("served")
    model = make_checkpoint(path / "base", "qwen3", **BASE)
    first = make_adapter(path / "first", model, 4, seed=1)
    options = ServerOptions(
        port=0,
        lora_modules=(f"first={first}",),
        allowed_lora_folder=(str(path / "allowed"),),
        web_page=False,
        admin_api_key=("admin",),
    )
    engine = AsyncLLM(path / "base", mode="eager", core="in_process", skip_tokenizer_init=True, **OPTIONS)
    server = RunningServer(engine, options)
    server.start()
    try:
        yield Served(server.url, path / "allowed", model)
    finally:
        server.stop()


def test_adapters_are_changed_by_administrators(served: Served) -> None:
    """Other requests need no key here."""
    assert served.post("/v1/completions", key="other", prompt=[5], max_tokens=1).status_code == 200
    for path, body in (
        ("load", {"lora_name": "x", "lora_path": str(served.folder)}),
        ("unload", {"lora_name": "first"}),
    ):
        response = served.post(f"/v1/{path}_lora_adapter", key="other", **body)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_key_required")
    assert served.tokens("first")


def test_an_adapter_is_a_model(served: Served) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"]}
    assert list(cards) == [MODEL, "first"]
    assert cards["first"]["parent"] == MODEL
    assert cards["first"]["root"].endswith("/first")
    assert cards[MODEL]["parent"] is None
    assert httpx.get(f"{served.url}/v1/models/first", timeout=60).json() == cards["first"]
    assert served.tokens(MODEL) != served.tokens("first")
    unknown = served.post("/v1/completions", model="fist", prompt=[1])
    assert unknown.status_code == 404
    assert "this server has small, first; the nearest is first" in unknown.json()["error"]["message"]


def test_adapters_are_loaded_and_unloaded_while_it_serves(served: Served) -> None:
    folder = make_adapter(served.folder / "second", served.model, 8, seed=2)
    loaded = served.post("/v1/load_lora_adapter", lora_name="second", lora_path=str(folder))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    before = served.tokens("second")
    again = served.post("/v1/load_lora_adapter", lora_name="second", lora_path=str(folder))
    assert again.status_code == 400
    assert "load_inplace replaces it" in again.json()["error"]["message"]
    make_adapter(folder, served.model, 8, seed=3)
    replaced = served.post("/v1/load_lora_adapter", lora_name="second", lora_path=str(folder), load_inplace=True)
    assert replaced.status_code == 200
    assert (after := served.tokens("second")) != before
    other = make_adapter(served.folder / "other", served.model, 8, seed=4)
    replaced = served.post("/v1/load_lora_adapter", lora_name="second", lora_path=str(other), load_inplace=True)
    assert replaced.status_code == 200
    assert served.tokens("second") != after
    unloaded = served.post("/v1/unload_lora_adapter", lora_name="second")
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
    assert served.post("/v1/completions", model="second", prompt=[1]).status_code == 404
    assert served.post("/v1/unload_lora_adapter", lora_name="second").status_code == 404


class Engine:
    """Says what it is to drop. Its adapters are their paths."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    async def load_adapter(self, request: LoRARequest) -> str:
        await asyncio.sleep(0)
        return f"content of {request.lora_path}"

    async def unload_adapter(self, digest: str) -> None:
        self.dropped.append(digest)


def test_an_adapter_that_is_replaced_is_dropped_with_its_last_name() -> None:
    async def serve() -> None:
        engine: Any = Engine()
        names = AdapterNames()
        for name, path in (("one", "a"), ("same", "a")):
            await names.load(engine, name, path)
        for name in ("one", "same"):
            assert engine.dropped == []
            with pytest.raises(ApiError, match=rf"^lora_name '{name}' is loaded already; load_inplace replaces it$"):
                await names.load(engine, name, "b")
            await names.load(engine, name, "b", in_place=True)
        assert engine.dropped == ["content of a"]
        await names.load(engine, "one", "b", in_place=True)  # the same content
        assert engine.dropped == ["content of a"]

    asyncio.run(serve())


def test_adapters_of_the_start_are_dropped_with_their_last_names() -> None:
    async def serve() -> None:
        engine: Any = Engine()
        names = AdapterNames([LoRARequest("first", 1, "a")])
        await names.load_given(engine)
        await names.load(engine, "same", "a")
        await names.unload(engine, "same")
        assert engine.dropped == []
        await names.unload(engine, "first")
        assert engine.dropped == ["content of a"]

    asyncio.run(serve())


def test_of_two_that_load_a_name_at_once_one_is_refused() -> None:
    async def serve() -> None:
        engine: Any = Engine()
        names = AdapterNames()
        loads = (names.load(engine, "one", path) for path in "ab")
        first, second = await asyncio.gather(*loads, return_exceptions=True)
        assert first is None
        assert str(second) == "lora_name 'one' is loaded already; load_inplace replaces it"
        request = names.get("one")
        assert request is not None
        assert request.lora_path == "a"

    asyncio.run(serve())


def test_an_adapter_with_two_names_is_dropped_with_the_second() -> None:
    async def serve() -> None:
        engine: Any = Engine()
        dropped = engine.dropped
        names = AdapterNames()
        for name, path in (("one", "a"), ("same", "a"), ("other", "b")):
            await names.load(engine, name, path)
        await names.unload(engine, "one")
        assert (list(names), dropped) == (["same", "other"], [])
        await names.unload(engine, "same")
        assert (list(names), dropped) == (["other"], ["content of a"])

    asyncio.run(serve())


def test_what_is_no_adapter_is_refused_and_the_server_stays(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = make_adapter(tmp_path / "outside", served.model, 4)
    served.folder.mkdir(exist_ok=True)
    monkeypatch.chdir(served.folder)
    (served.folder / "link").symlink_to(outside)
    (served.folder / "circle").symlink_to(served.folder / "circle")
    wide = make_adapter(served.folder / "wide", served.model, 65)
    for path, message in (
        (str(outside), "lora_path must be a folder within"),
        (str(served.folder / "link"), "lora_path must be a folder within"),
        (str(served.folder / ".." / "first"), "lora_path must be a folder within"),
        (f"{served.folder}/first\0", "lora_path must have no null character"),
        (f"{served.folder}/{'first' * 1000}", "lora_path must have at most 4,096 characters, got "),
        (str(served.folder / "circle"), "circle"),
        (str(served.folder / "missing"), "is no folder"),
        ("missing/one", f"{served.folder / 'missing' / 'one'} is no folder"),  # nor a name on the hub
        (str(wide), "rank 65; allowed: up to max_lora_rank, 64"),
    ):
        refused = served.post("/v1/load_lora_adapter", lora_name="bad", lora_path=path)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
    for name in ("x" * 257, "a\nb", ""):
        refused = served.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(wide))
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("lora_name must ")
    taken = served.post("/v1/load_lora_adapter", lora_name=MODEL, lora_path=str(wide))
    assert "lora_name must be a name that the model does not have" in taken.json()["error"]["message"]
    assert len(served.tokens("first")) == 5


SECRET = "value-of-another-file"


def _linked(name: str, target: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, outside: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target.format(outside=outside))

    return change


def _fifo(name: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, outside: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _config(text: str) -> Callable[[Path, Path], None]:
    return lambda folder, outside: (folder / CONFIG_FILE).write_text(text) and None


def _header(header: bytes, length: int | None = None) -> Callable[[Path, Path], None]:
    size = (len(header) if length is None else length).to_bytes(8, "little")
    return lambda folder, outside: (folder / WEIGHTS_FILE).write_bytes(size + header) and None


OUTSIDE = f"{{outside}}/{CONFIG_FILE}"
BAD: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a link to a config elsewhere": (_linked(CONFIG_FILE, OUTSIDE), "is a link to another folder"),
    "a link to weights elsewhere": (
        _linked(WEIGHTS_FILE, f"{{outside}}/{WEIGHTS_FILE}"),
        "is a link to another folder",
    ),
    "a device": (_linked(CONFIG_FILE, "/dev/zero"), "is a link to another folder"),
    "weights from a device": (_linked(WEIGHTS_FILE, "/dev/zero"), "is a link to another folder"),
    "a FIFO": (_fifo(CONFIG_FILE), "must be a regular file"),
    "weights from a FIFO": (_fifo(WEIGHTS_FILE), "must be a regular file"),
    "a large config": (_config("{" + " " * (1 << 20)), "must have at most 1,048,576 bytes"),
    "a deep config": (_config('{"a":' + "[" * 500_000), "is damaged, it is not JSON"),
    "a huge number": (_config('{"lora_alpha": 1' + "0" * 400 + "}"), "lora_alpha must be a number above 0"),
    "half a character": (_config('{"peft_type": "\\ud800"}'), "peft_type must be LORA"),
    "a long value": (_config('{"peft_type": "' + "x" * 500_000 + '"}'), "peft_type must be LORA"),
    "backtracking": (_config('{"alpha_pattern": {"(a+)+\\\\1": 1}}'), "alpha_pattern must have regular expressions"),
    "a large header": (_header(b"{" + b" " * (16 << 20)), "must have a header of at most 16,777,216 bytes"),
    "a header beyond the file": (_header(b"{}", 1 << 60), "it ends within its header"),
    "many names": (_header(b"{" + b'"a":{},' * 200_000 + b'"b":{}}'), "must have at most 65,536 tensors"),
    "half a character in a name": (_header(b'{"\\ud800":{}}'), "is damaged"),
    "a large file": (lambda folder, outside: os.truncate(folder / WEIGHTS_FILE, 1 << 40), "17,179,869,184 bytes, got"),
}


@pytest.mark.parametrize("way", BAD)
def test_hostile_files_are_refused_in_a_line_and_nothing_of_others_is_told(
    way: str, served: Served, tmp_path: Path
) -> None:
    folder = make_adapter(served.folder / f"bad {way}", served.model, 4)
    outside = make_adapter(tmp_path / "outside", served.model, 4, peft_type=SECRET)
    change, message = BAD[way]
    change(folder, outside)
    refused = served.post("/v1/load_lora_adapter", lora_name="bad", lora_path=str(folder))
    assert refused.status_code == 400, refused.text
    assert message in refused.json()["error"]["message"]
    assert SECRET not in refused.text
    assert len(refused.content) < 4096
    assert len(served.tokens("first")) == 5


def test_links_within_the_folder_are_followed(served: Served) -> None:
    """As a cache of the hub has them."""
    blobs = make_adapter(served.folder / "blobs", served.model, 4)
    folder = served.folder / "snapshot"
    folder.mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (folder / name).symlink_to(Path("..") / "blobs" / name)
    assert blobs.is_dir()
    loaded = served.post("/v1/load_lora_adapter", lora_name="linked", lora_path=str(folder))
    assert loaded.status_code == 200, loaded.text


def test_names_have_a_bound() -> None:
    async def serve() -> None:
        names, engine = AdapterNames(LoRARequest(str(i), 1 + i, "/x") for i in range(1000)), Engine()
        with pytest.raises(ApiError, match="at most 1000 adapters may have names; unload one first"):
            await names.load(engine, "one more", "a")  # type: ignore[arg-type]
        await names.load(engine, "7", "a", in_place=True)  # type: ignore[arg-type]
        await names.unload(engine, "8")  # type: ignore[arg-type]
        await names.load(engine, "one more", "a")  # type: ignore[arg-type]

    asyncio.run(serve())


def test_options_of_adapters_are_checked() -> None:
    named = adapters_of(ServerOptions(lora_modules=("a=/x=y", '{"name": "b", "path": "/z"}')))
    assert [(each.lora_name, each.lora_int_id, each.lora_path) for each in named] == [("a", 1, "/x=y"), ("b", 2, "/z")]
    for entry in ("a", "=x", '{"name": "b"}', "{"):
        with pytest.raises(ValueError, match=r"lora_modules has .*allowed: name=path"):
            adapters_of(ServerOptions(lora_modules=(entry,)))
    with pytest.raises(ValueError, match="names 'a' twice"):
        adapters_of(ServerOptions(lora_modules=("a=/x", "a=/y")))
    with pytest.raises(ValueError, match="api_server_count is 2"):
        ServerOptions(allowed_lora_folder=("/x",), api_server_count=2)
