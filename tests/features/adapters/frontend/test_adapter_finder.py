"""The adapter that a request names resolves to a digest of its files, which are read once until they change."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import make_adapter
from torch import nn

from compiled_engine.config import AdapterConfig
from compiled_engine.engine.messages import RequestLimits, prefix_root
from compiled_engine.features.adapters.extras import AdapterRef, adapter_of
from compiled_engine.features.adapters.frontend import finder as finder_module
from compiled_engine.features.adapters.frontend.finder import AdapterFinder
from compiled_engine.features.adapters.frontend.requests import AdapterRequests
from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.frontend.input_processor import InputProcessor
from compiled_engine.frontend.prompts import parse_prompts
from compiled_engine.models.checkpoint import adapter_folder
from compiled_engine.sampling.params import SamplingParams

MODEL = nn.ModuleDict({"q_proj": nn.Linear(8, 8)}).requires_grad_(False)
CONFIG = AdapterConfig(2, 8, 2)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [make_adapter(tmp_path / f"adapter{i}", MODEL, 4, targets=("q_proj",), seed=i) for i in range(2)]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the folders whose files are read, in order."""
    found: list[Path] = []
    read_adapter = adapter_folder.read_adapter

    def noting(folder: Path, **how: Any) -> Any:
        found.append(folder)
        return read_adapter(folder, **how)

    monkeypatch.setattr(adapter_folder, "read_adapter", noting)
    return found


def test_files_are_read_once_and_again_when_they_are_replaced(folders: list[Path], read: list[Path]) -> None:
    finder = AdapterFinder(CONFIG)
    requests = [LoRARequest(f"name{i}", i + 1, folder) for i, folder in enumerate(folders)]
    assert [finder.has_read(each) for each in requests] == [False, False]
    refs = [finder.find(each) for each in requests]
    assert refs == [
        AdapterRef(adapter_folder.read_adapter(f).digest, str(f), f"name{i}") for i, f in enumerate(folders)
    ]
    read.clear()
    assert [finder.has_read(each) for each in requests] == [True, True]
    assert [finder.find(each) for each in requests] == refs
    assert finder.find(LoRARequest("another name", 9, str(folders[0]))).digest == refs[0].digest
    assert read == []
    make_adapter(folders[0], MODEL, 4, targets=("q_proj",), seed=7)
    assert [finder.has_read(each) for each in requests] == [False, True]
    assert finder.find(requests[0]).digest not in {ref.digest for ref in refs}
    assert (finder.find(requests[1]), read) == (refs[1], [folders[0]])
    (folders[1] / "adapter_config.json").unlink()
    assert not finder.has_read(requests[1])
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        finder.find(requests[1])


def test_a_relative_folder_is_found_from_elsewhere(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folders[0].parent)
    finder = AdapterFinder(CONFIG)
    found = finder.find(LoRARequest("a", 1, folders[0].name))
    assert found.path == str(folders[0])
    assert os.path.isabs(found.path)


def test_each_prompt_has_its_adapter_or_none(folders: list[Path]) -> None:
    finder = AdapterFinder(CONFIG)
    one, other = (LoRARequest(f"name{i}", i + 1, folder) for i, folder in enumerate(folders))
    refs = finder.find(one), finder.find(other)
    assert finder.find_each(None, 2) == [None, None]
    assert finder.find_each(one, 3) == [refs[0]] * 3
    assert finder.find_each([one, None, other], 3) == [refs[0], None, refs[1]]
    with pytest.raises(ValueError, match="lora_request must have one entry for each prompt, got 3 for 2 prompts"):
        finder.find_each([one, None, other], 2)
    with pytest.raises(TypeError, match="lora_request must be a LoRARequest, or a list with one or None a prompt"):
        finder.find_each("name0", 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lora_request is 'name0', but enable_lora is False; allowed: None"):
        AdapterFinder(None).find(one)
    assert AdapterFinder(None).find_each(None, 1) == [None]


@pytest.mark.parametrize(("rank", "message"), [(8, None), (9, "has rank 9; allowed: up to max_lora_rank, 8")])
def test_ranks_up_to_the_largest_are_taken(rank: int, message: str | None, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", MODEL, rank, targets=("q_proj",))
    if message is None:
        assert AdapterFinder(CONFIG).find(LoRARequest("a", 1, folder)).path == str(folder)
    else:
        with pytest.raises(ValueError, match=message):
            AdapterFinder(CONFIG).find(LoRARequest("a", 1, folder))


def test_what_can_only_be_merged_is_refused_and_not_remembered(tmp_path: Path, read: list[Path]) -> None:
    folder = make_adapter(tmp_path / "a", MODEL, 4, targets=("q_proj",), use_dora=True)
    finder, request = AdapterFinder(CONFIG), LoRARequest("a", 1, folder)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"it uses DoRA .*; allowed: merge_adapter"):
            finder.find(request)
        assert not finder.has_read(request)
    assert read == [folder, folder]


def test_requests_of_a_prompt_have_its_adapter_and_share_no_prefix_with_others(folders: list[Path]) -> None:
    feature = AdapterRequests(CONFIG)
    processor = InputProcessor(None, RequestLimits(100, 50, 50), frozenset(), features=[feature])
    named = [LoRARequest("a", 1, folders[0]), None, LoRARequest("b", 2, folders[1])]
    prompts: list[Any] = [{"prompt_token_ids": [3], "cache_salt": "s"}, [3], [3]]
    requests = processor.process(
        parse_prompts(prompts), SamplingParams(n=2, detokenize=False), None, lora_request=named
    )
    refs = feature.finder.find_each(named, 3)
    for request, given, ref, salt in zip(requests, named, refs, ("s", None, None), strict=True):
        assert request.output.get("lora_request") is given
        assert [adapter_of(child) for child in request.engine_requests] == [ref, ref]
        root = prefix_root(salt=salt, adapter=ref and ref.digest)
        assert {child.prefix_root for child in request.engine_requests} == {root}
    assert len({request.engine_requests[0].prefix_root for request in requests}) == 3


def test_a_path_that_names_nothing_is_refused() -> None:
    """An empty path would be the working folder."""
    with pytest.raises(ValueError, match=r"^lora_path must not be empty$"):
        LoRARequest("name", 1, "")
    with pytest.raises(ValueError, match=r"lora_path must have no null character, got 'a\\x00b'"):
        LoRARequest("name", 1, "a\0b")


def test_paths_that_were_refused_leave_nothing_behind(tmp_path: Path, folders: list[Path]) -> None:
    finder = AdapterFinder(CONFIG)
    tracemalloc.start()
    try:
        for i in range(2000):
            path = tmp_path / f"{i}" / ("x" * 200) / ("y" * 200)
            with pytest.raises(ValueError, match="is no folder"):
                finder.find(LoRARequest("name", 1, path))
            if i == 0:
                before = tracemalloc.get_traced_memory()[0]
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()


def test_a_bounded_number_of_adapters_is_remembered(
    folders: list[Path], read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder_module, "MOST_KNOWN", 1)
    finder = AdapterFinder(CONFIG)
    one, other = (LoRARequest(f"name{i}", i + 1, folder) for i, folder in enumerate(folders))
    for request in (one, one, other, other, one):
        finder.find(request)
    assert read == [folders[0], folders[1], folders[0]]
    assert [finder.has_read(each) for each in (one, other)] == [True, False]


def test_the_folders_of_an_adapter_are_looked_at_whenever_its_files_are_replaced(
    folders: list[Path], tmp_path: Path
) -> None:
    allowed, outside = folders
    finder, request = AdapterFinder(CONFIG), LoRARequest("name", 1, allowed, (allowed.resolve(),))
    finder.find(request)
    (allowed / "adapter_config.json").unlink()
    (allowed / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    with pytest.raises(ValueError, match=r"adapter_config\.json is a link to another folder; allowed: files within"):
        finder.find(request)
    assert finder.find(LoRARequest("name", 1, allowed)).path == str(allowed)
    with pytest.raises(ValueError, match="is a link to another folder"):
        finder.find(request)
