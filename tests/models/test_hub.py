"""Models and tokenizers by their names on the Hugging Face Hub: downloaded, found in the cache, or a clear error.

huggingface_hub reads its environment when it is imported, so each environment is a process, which is given a list of
calls and answers with what came of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import make_adapter
from checkpoints import make_checkpoint
from hub_server import TOKEN, PlayedHub, PlayedRepository, played_hub
from mtp_layers import FILE, MIMO, write_mtp_checkpoint
from safetensors.torch import load_file, save_file
from tiny_tokenizers import byte_level

from compiled_engine.models.checkpoint import hub as hub_files
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve

COMMIT, OLD = "1" * 40, "0" * 40
NOBODY = "http://127.0.0.1:9"
INDEX = "model.safetensors.index.json"
# The same weights in other formats, and what else lies in a repository.
UNWANTED = dict.fromkeys(
    (
        *("pytorch_model.bin", "model.pt", "model.gguf", "onnx/model.onnx", "README.md", "LICENSE"),
        *("original/consolidated.safetensors", "consolidated.safetensors", "training_args.json"),
    ),
    b"never asked for",
)
PROGRAM = """
import json, sys
from dataclasses import asdict
from typer.testing import CliRunner
from compiled_engine.cli.app import app
from compiled_engine.options import EngineOptions
from compiled_engine.config import AdapterConfig
from compiled_engine.features.adapters.frontend.finder import AdapterFinder
from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.resolve.engine import resolve

def answer(call):
    if "adapter" in call:
        try:
            found = AdapterFinder(AdapterConfig(1, 8, 1)).find(LoRARequest("sql", 1, call["adapter"]))
        except Exception as error:
            return {"error": type(error).__name__, "message": str(error)}
        return found._asdict()
    if isinstance(call, list):
        result = CliRunner().invoke(app, call)
        return {"code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr}
    try:
        config = resolve(EngineOptions(device="cpu", mode="eager", **call))
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    found = {"path": config.model.path, "name": config.model.hub_name, "tokenizer": config.tokenizer}
    return {key: value and str(value) for key, value in found.items()} | {
        "revision": config.model.revision, "reasons": config.reasons
    }

print(json.dumps([answer(call) for call in json.load(sys.stdin)]))
"""


def ask(calls: list[Any], **environment: str) -> list[Any]:
    """Make each call in a process with these variables, and return the results. A call is a command line, or options
    for `resolve`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(calls),
        env=inherited | {"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill_cache(cache: Path, name: str, files: dict[str, bytes], commit: str = COMMIT) -> Path:
    """Write a snapshot with these files for revision main, in huggingface_hub's layout."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for number, (file, content) in enumerate(files.items()):
        (repository / "blobs" / str(number)).write_bytes(content)
        (snapshot / file).symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny model in several shards, with a tokenizer."""
    folder = tmp_path_factory.mktemp("sharded")
    make_checkpoint(folder, "qwen3", vocab_size=512, max_shard_size="100KB")
    byte_level().hf.save_pretrained(folder)
    return files_of(folder)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The files of two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    model = make_checkpoint(folder / "base", "qwen3", num_hidden_layers=1)
    return [files_of(make_adapter(folder / str(seed), model, 4, seed=seed)) for seed in range(2)]


@pytest.fixture(scope="module")
def with_mtp_layer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny model with an MTP layer in a shard of its own."""
    folder = tmp_path_factory.mktemp("mtp")
    write_mtp_checkpoint(folder, MIMO)
    tensors = load_file(folder / FILE)
    layer = {name for name in tensors if name.startswith(MIMO.prefix)}
    shards = {"model-1.safetensors": tensors.keys() - layer, "model-2.safetensors": layer}
    file_of = {name: shard for shard, names in shards.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / shard, metadata={"format": "pt"})
    return {name: content for name, content in files_of(folder).items() if name != FILE and "/" not in name}


@pytest.fixture(scope="module")
def hub(
    sharded: dict[str, bytes], adapters: list[dict[str, bytes]], with_mtp_layer: dict[str, bytes]
) -> Iterator[PlayedHub]:
    shards = {name for name in sharded if name.endswith(".safetensors")}
    without_weights = {name: content for name, content in sharded.items() if name not in {*shards, INDEX}}
    everything = UNWANTED | sharded
    with played_hub() as hub:
        for name, files, gated in (
            ("org/model", everything, False),
            ("org/small", everything, False),
            ("org/bench", everything, False),
            ("org/half", everything, False),
            ("org/gated", everything, True),
            ("org/pickles", without_weights | {"pytorch_model.bin": b""}, False),
            ("org/empty", {"README.md": b""}, False),
        ):
            old = {name: content for name, content in files.items() if name != "README.md"}
            hub.repositories[name] = PlayedRepository({"main": COMMIT, "v1": OLD}, {COMMIT: files, OLD: old}, gated)
        hub.repositories["org/mtp"] = PlayedRepository({"main": COMMIT}, {COMMIT: with_mtp_layer})
        new, old = adapters
        hub.repositories["org/sql"] = PlayedRepository({"main": COMMIT, "v1": OLD}, {COMMIT: UNWANTED | new, OLD: old})
        hub.repositories["org/pickled"] = PlayedRepository({"main": COMMIT}, {COMMIT: {"adapter_config.json": b"{}"}})
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF_HOME of all processes of this module."""
    return tmp_path_factory.mktemp("home")


GENERATE = [
    *("generate", "--mode", "eager", "--device", "cpu", "--max-model-len", "64", "--num-blocks", "32", "--temperature"),
    *("0", "--prompt", "hello", "--max-tokens", "3", "--ignore-eos", "--json"),
]
CONFIG = ["config", "--device", "cpu", "--mode", "eager"]
MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 2})
ONLINE: dict[str, Any] = {
    "generate": [*GENERATE, "--model", "org/model@v1"],
    "again": {"model": "org/model", "revision": "v1"},
    "commit": {"model": f"org/model@{OLD}"},
    "no weights yet": [*CONFIG, "--model", "org/bench", "--json"],
    "MTP layer": [*CONFIG, "--model", "org/mtp", "--speculative-config", MTP, "--json"],
    "dummy": {"model": "org/small", "load_format": "dummy"},
    "tokenizer": {"tokenizer": "org/model", "tokenizer_revision": "main"},
    "own tokenizer": {"model": "org/model@v1", "tokenizer_revision": "main"},
    "unknown": {"model": "org/unknown"},
    "unknown tokenizer": {"tokenizer": "org/unknown"},
    "invalid": {"model": "org/a..b"},
    "no revision": {"model": "org/model", "revision": "v9"},
    "gated": {"model": "org/gated"},
    "pickles": {"model": "org/pickles"},
    "empty": {"model": "org/empty"},
    "empty tokenizer": {"tokenizer": "org/empty"},
    "command": ["config", "--model", "org/unknown"],
    "adapter": {"adapter": "org/sql"},
    "old adapter": {"adapter": "org/sql@v1"},
    "adapter without such a revision": {"adapter": "org/sql@v9"},
    "pickled adapter": {"adapter": "org/pickled"},
    "unknown adapter": {"adapter": "org/none"},
}
# What a cache without a network is asked for: models and adapters that were put there, or downloaded before.
OFFLINE: dict[str, Any] = {
    **{name: {"model": f"org/{name}"} for name in ("whole", "halved", "torn", "bare", "absent")},
    "generate": [*GENERATE, "--model", "org/whole"],
    "adapter": {"adapter": "org/sql"},
    "old adapter": {"adapter": "org/sql@v1"},
    "prepared adapter": {"adapter": "org/prepared"},
    "half an adapter": {"adapter": "org/half-adapter"},
}


@pytest.fixture(scope="module")
def online(hub: PlayedHub, home: Path) -> dict[str, Any]:
    return dict(zip(ONLINE, ask(list(ONLINE.values()), HF_ENDPOINT=hub.endpoint, HF_HOME=str(home)), strict=True))


@pytest.fixture(scope="module")
def offline(
    online: dict[str, Any], home: Path, sharded: dict[str, bytes], adapters: list[dict[str, bytes]]
) -> dict[str, Any]:
    cache, first = home / "hub", min(name for name in sharded if name.endswith(".safetensors"))
    fill_cache(cache, "org/whole", sharded)
    fill_cache(cache, "org/halved", {name: content for name, content in sharded.items() if name != first})
    fill_cache(cache, "org/torn", {name: content for name, content in sharded.items() if name not in (INDEX, first)})
    fill_cache(cache, "org/bare", {name: content for name, content in sharded.items() if not name.startswith("token")})
    fill_cache(cache, "org/prepared", adapters[0])
    half = {name: content for name, content in adapters[0].items() if name.endswith("json")}
    fill_cache(cache, "org/half-adapter", half)
    environment = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": NOBODY, "HF_HOME": str(home)}
    return dict(zip(OFFLINE, ask(list(OFFLINE.values()), **environment), strict=True))


def test_a_model_is_downloaded_and_generates(online: dict[str, Any], hub: PlayedHub, sharded: dict[str, bytes]) -> None:
    result = online["generate"]
    assert result["code"] == 0, result["stderr"]
    (output,) = json.loads(result["stdout"])["outputs"]
    assert len(output["token_ids"]) == 3
    assert "download org/model" in result["stderr"]
    assert hub.files_sent("org/model") == sharded.keys()


def test_what_was_downloaded_is_found_in_the_cache(online: dict[str, Any], home: Path) -> None:
    again = online["again"]
    assert again["path"] == str(home / "hub" / "models--org--model" / "snapshots" / OLD)
    assert (again["name"], again["revision"]) == ("org/model", OLD)
    assert again["reasons"]["model.path"] == "org/model, from the cache of huggingface_hub"
    assert again["reasons"]["model.revision"] == "the commit of v1"
    assert online["commit"]["path"] == again["path"]


def test_the_configuration_needs_no_weights(online: dict[str, Any], hub: PlayedHub) -> None:
    config = json.loads(online["no weights yet"]["stdout"])
    assert config["reasons"]["model.path"] == f"org/bench, from {hub.endpoint}"
    assert not [name for name in hub.files_sent("org/bench") if name.endswith(".safetensors")]


def test_the_configuration_of_an_mtp_layer_needs_the_header_of_its_file(online: dict[str, Any], hub: PlayedHub) -> None:
    assert online["MTP layer"]["code"] == 0, online["MTP layer"]["stderr"]
    speculation = json.loads(online["MTP layer"]["stdout"])["speculation"]
    assert speculation["draft"]["model"]["hub_name"] == "org/mtp"
    assert not [name for name in hub.files_sent("org/mtp") if name.endswith(".safetensors")]
    parts = [line for line in hub.requested if "/org/mtp/" in line and "bytes=" in line]
    assert {line.split()[1].rpartition("/")[2] for line in parts} == {"model-2.safetensors"}


def test_random_weights_need_no_download(online: dict[str, Any], hub: PlayedHub) -> None:
    assert online["dummy"]["revision"] == COMMIT
    assert not [name for name in hub.files_sent("org/small") if name.endswith(".safetensors")]


def test_a_tokenizer_has_a_repository_of_its_own(online: dict[str, Any], home: Path) -> None:
    snapshot = home / "hub" / "models--org--model" / "snapshots" / COMMIT
    assert online["tokenizer"]["tokenizer"] == online["own tokenizer"]["tokenizer"] == str(snapshot)
    assert (snapshot / "tokenizer.json").is_file()
    assert online["tokenizer"]["name"] is None
    assert "org/model, the commit of main" in online["tokenizer"]["reasons"]["tokenizer"]
    assert online["own tokenizer"]["revision"] == OLD


ERRORS = [
    ("unknown", "ValueError", "model is 'org/unknown', which is no local folder and was not found on {hub}; if it is"),
    ("unknown tokenizer", "ValueError", "tokenizer is 'org/unknown', which is no local folder and was not found on"),
    ("invalid", "ValueError", "model is 'org/a..b', which is no local folder and no name of a repository: "),
    ("no revision", "ValueError", "revision of model is 'v9', which 'org/model' does not have on {hub}"),
    ("gated", "PermissionError", "is gated, and no token was found: accept its terms at {hub}/org/gated, then set HF"),
    ("pickles", "ValueError", "'org/pickles' on {hub}, which has no *.safetensors files, only pytorch_model.bin"),
    ("empty", "ValueError", "model is 'org/empty' on {hub}, which has no config.json"),
    ("empty tokenizer", "ValueError", "tokenizer is 'org/empty' on {hub}, which has none of tokenizer_config.json"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_what_the_hub_does_not_have(call: str, kind: str, message: str, online: dict[str, Any], hub: PlayedHub) -> None:
    assert online[call]["error"] == kind
    assert message.format(hub=hub.endpoint) in online[call]["message"]
    assert "\n" not in online[call]["message"]


def test_an_error_of_the_command_is_one_line(online: dict[str, Any]) -> None:
    assert (online["command"]["code"], online["command"]["stdout"]) == (2, "")
    (line,) = online["command"]["stderr"].splitlines()
    assert "model is 'org/unknown'" in line


def test_a_token_opens_a_gated_model_and_a_half_download_goes_on(
    hub: PlayedHub, tmp_path: Path, sharded: dict[str, bytes]
) -> None:
    """Uses its own cache, named by HF_HUB_CACHE."""
    last = max(name for name in sharded if name.endswith(".safetensors"))
    half = {name: content for name, content in sharded.items() if name != last}
    snapshot = fill_cache(tmp_path, "org/half", half)
    gated, generated = ask(
        [{"model": "org/gated"}, [*GENERATE, "--model", "org/half"]],
        HF_ENDPOINT=hub.endpoint,
        HF_HUB_CACHE=str(tmp_path),
        HF_TOKEN=TOKEN,
    )
    assert gated["path"] == str(tmp_path / "models--org--gated" / "snapshots" / COMMIT)
    assert generated["code"] == 0, generated["stderr"]
    assert hub.files_sent("org/half") == {last}
    assert (snapshot / last).read_bytes() == sharded[last]


def test_offline_a_prepared_cache_is_enough(offline: dict[str, Any], home: Path, sharded: dict[str, bytes]) -> None:
    """A file that the cache lacks is an error that names it."""
    assert offline["whole"]["revision"] == offline["bare"]["revision"] == COMMIT
    assert offline["generate"]["code"] == 0, offline["generate"]["stderr"]
    first = min(name for name in sharded if name.endswith(".safetensors"))
    for name, lacking in (("halved", first), ("torn", INDEX), ("absent", "revision main")):
        assert offline[name]["error"] == "FileNotFoundError"
        said = f"the cache {home / 'hub'} lacks {lacking}, and HF_HUB_OFFLINE forbids downloads"
        assert said in offline[name]["message"]


def test_without_a_network_the_cache_is_enough(tmp_path: Path, sharded: dict[str, bytes]) -> None:
    fill_cache(tmp_path, "org/whole", sharded)
    elsewhere = {"download_dir": str(tmp_path)}
    calls = [{"model": "org/whole"} | elsewhere, {"model": "org/absent"} | elsewhere]
    whole, absent = ask(calls, HF_ENDPOINT=NOBODY, HF_HOME=str(tmp_path))
    assert whole["revision"] == COMMIT
    assert absent["error"] == "ConnectionError"
    assert f"lacks revision main, and the download from {NOBODY} failed: " in absent["message"]


def test_an_adapter_is_downloaded_by_its_name_and_revision(
    online: dict[str, Any], offline: dict[str, Any], home: Path, hub: PlayedHub, adapters: list[dict[str, bytes]]
) -> None:
    """Other files of the repository are not downloaded. A second process finds the adapter in the cache, even
    offline."""
    new, old = adapters
    found, tagged = online["adapter"], online["old adapter"]
    assert hub.files_sent("org/sql") == new.keys()
    assert found["digest"] != tagged["digest"]
    for answer, commit, files in ((found, COMMIT, new), (tagged, OLD, old)):
        assert answer["path"] == str(home / "hub" / "models--org--sql" / "snapshots" / commit)
        assert {name: (Path(answer["path"]) / name).read_bytes() for name in files} == files
    for name, part in (
        ("adapter without such a revision", "v9"),
        ("pickled adapter", "has no adapter_model.safetensors; allowed"),
        ("unknown adapter", "org/none"),
    ):
        assert online[name]["error"] == "ValueError"
        assert part in online[name]["message"]
        assert "\n" not in online[name]["message"]
    assert [offline[name] for name in ("adapter", "old adapter")] == [found, tagged]


def test_offline_an_adapter_in_a_prepared_cache_is_enough(offline: dict[str, Any], home: Path) -> None:
    snapshot = home / "hub" / "models--org--prepared" / "snapshots" / COMMIT
    assert offline["prepared adapter"]["path"] == str(snapshot)
    assert offline["half an adapter"]["error"] == "FileNotFoundError"
    assert "HF_HUB_OFFLINE forbids downloads" in offline["half an adapter"]["message"]


def test_a_folder_comes_before_the_hub_and_needs_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "org" / "model", "qwen3")
    monkeypatch.chdir(tmp_path)
    program = (
        "import sys; from compiled_engine.options import EngineOptions\n"
        "from compiled_engine.resolve.engine import resolve\n"
        "config = resolve(EngineOptions(model='org/model', device='cpu'))\n"
        "assert (str(config.model.path), config.model.hub_name) == ('org/model', None)\n"
        "assert not {'huggingface_hub', 'compiled_engine.models.checkpoint.hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revision": "v1"}, "revision is 'v1', but model is None; allowed with org/name of the Hugging Face Hub"),
        ({"model": "org/a@v1", "revision": "v2"}, "revision is 'v2', but model is 'org/a@v1', which names one"),
        ({"model": "nowhere"}, "model must be a folder that holds a checkpoint, or org/name of the Hugging Face Hub"),
        ({"model": "a/b/c"}, "model must be a folder"),
        ({"model": "./org/a"}, "model must be a folder"),
        ({"model": Path("org/a")}, "model must be a folder"),
        ({"tokenizer_revision": "v1"}, "tokenizer_revision is 'v1', but tokenizer is None"),
        ({"model": ".", "revision": "v1"}, "revision is 'v1', but model is '.'"),
        ({"revision": ""}, "revision is ''; allowed: a branch, tag or commit, or None"),
    ],
)
def test_what_names_no_repository(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        resolve(EngineOptions(device="cpu", **options))


def test_an_adapter_that_is_too_large_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {"adapter_config.json": 9, "adapter_model.safetensors": 20 << 30}
    monkeypatch.setattr(hub_files, "_list_files", lambda repository: listed)
    repository = hub_files.Repository("lora_path", "org/large", "main", tmp_path)
    with pytest.raises(ValueError, match=r"org/large.*, whose adapter_model.safetensors has 21,474,836,480 bytes"):
        hub_files.find_adapter(repository, SilentProgress())
