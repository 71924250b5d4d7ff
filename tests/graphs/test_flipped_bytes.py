"""One flipped byte in each kind of file of a real cache. tests/kernels/test_kernel_folder.py has the kernels, and
tests/graphs/test_kept_prediction.py the predictions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cache_cases import Builder, load
from checkpoints import make_checkpoint

from compiled_engine.graphs.cache.lookup import find_or_build
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

# Below an entry; the first file of each kind is damaged.
OF_AN_ENTRY = (
    *("factors.json", "manifest.json", "record.json", "trace/*", "logits/trace/*"),
    *("*/range.json", "*/plan.json", "*/forward.py", "*/graph.txt", "*/passes.json", "*/passes/*.diff"),
    *(
        f"logits/*/{name}"
        for name in ("range.json", "plan.json", "forward.py", "graph.txt", "passes.json", "passes/*.diff")
    ),
    *("pieces/*.json", "pieces/*.py", "cpp/*/*.so", "cpp/*/*.py"),
)
# Below the root, for models of transformers.
OF_A_MODEL = ("models/*[!s].json", "models/*.weights.json")
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "progress": False,
    "model_impl": "transformers",
    "skip_tokenizer_init": True,
    "max_model_len": 32,
    "max_num_batched_tokens": 32,
    "num_blocks": 8,
}


def tokens(checkpoint: Path, **options: Any) -> list[int]:
    with LLM(checkpoint, **ENGINE, **options) as llm:
        (output,) = llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=3, temperature=0))
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "qwen3", num_hidden_layers=1)
    return path


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cache") / "root"
    tokens(checkpoint, mode="compiled", cache_dir=root)
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "root")
    return tmp_path / "root"


def entry_in(root: Path) -> Path:
    (factors,) = (root / "compiled").glob("*/factors.json")
    return factors.parent


def flip_a_byte(below: Path, kind: str) -> None:
    file = next(path for path in sorted(below.glob(kind)) if path.is_file() and path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_no_kind_of_file_is_left_out(whole: Path) -> None:
    entry = entry_in(whole)
    found = {path for path in whole.rglob("*") if path.is_file() and path.suffix != ".lock" and path.stat().st_size}
    known = {path for kind in OF_AN_ENTRY for path in entry.glob(kind)}
    known |= {path for kind in OF_A_MODEL for path in whole.glob(kind)}
    assert not found - known


@pytest.mark.parametrize("kind", OF_AN_ENTRY)
def test_in_an_entry(kind: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is set aside and built again."""
    factors = json.loads((entry_in(root) / "factors.json").read_text())
    flip_a_byte(entry_in(root), kind)
    build = Builder()
    assert find_or_build(root, factors, build, load).status == "miss"
    assert build.builds == 1
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("kind", OF_A_MODEL)
def test_in_what_was_found_out_about_a_model(
    kind: str, checkpoint: Path, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is found out again."""
    (file,) = root.glob(kind)
    before = file.read_bytes()
    flip_a_byte(root, kind)
    monkeypatch.setenv("COMPILED_ENGINE_CACHE_DIR", str(root))
    tokens(checkpoint, mode="eager")
    assert "is damaged and made anew: its digest does not match" in caplog.text
    assert file.read_bytes() == before
