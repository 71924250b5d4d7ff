"""Weights that change in place give the bits of a fresh load, in every form that weights have on a device."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from old_and_new_weights import ENGINE, Bits, bits, folders, fresh, stored, tensors_in
from packed_checkpoints import PACKINGS, write_packed
from quantised_checkpoints import LAYOUTS, write_quantised
from safetensors.torch import save_file

from compiled_engine.engine.control import ControlError
from compiled_engine.llm import LLM

__all__ = ["folders"]


def _plain(family: str, **fields: Any) -> Any:
    return lambda folder, seed: make_checkpoint(folder, family, seed=seed, **fields)


def _written(write: Any, layout: Any) -> Any:
    def make(folder: Path, seed: int) -> None:
        make_checkpoint(folder / "plain", "llama", seed=seed, **WIDE)
        write(folder / "plain", folder, layout, ["lm_head"])
        shutil.rmtree(folder / "plain")

    return make


WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, **WIDE}
# Name -> how a checkpoint is made, and options of its engine. Compiled engines pack, fold and derive parameters.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "merged and packed": (_plain("llama"), {"mode": "compiled"}),
    "tied, and folded into norms": (_plain("gemma3", tie_word_embeddings=True), {"mode": "compiled"}),
    "experts": (_plain("qwen3_moe", **EXPERTS), {"mode": "compiled"}),
    "code of transformers": (_plain("qwen2"), {"model_impl": "transformers"}),
    "quantised while loaded": (_plain("llama", **WIDE), {"quantization": "int4", "mode": "compiled"}),
    "experts quantised while loaded": (_plain("qwen3_moe", **EXPERTS), {"quantization": "fp8", "mode": "compiled"}),
    "stored in FP8": (_written(write_quantised, LAYOUTS["compressed-tensors, block"]), {"mode": "compiled"}),
    "stored in four bits": (_written(write_packed, PACKINGS["awq"]), {"mode": "compiled"}),
    "two ranks": (_plain("llama", num_attention_heads=4, num_key_value_heads=2), {"tensor_parallel_size": 2}),
    "two stages": (_plain("llama", num_hidden_layers=4), {"pipeline_parallel_size": 2, "mode": "compiled"}),
    "two replicas": (_plain("llama"), {"data_parallel_size": 2}),
    "random at the start": (_plain("llama"), {"load_format": "dummy"}),
}


@pytest.mark.product(one_in=8)
@pytest.mark.parametrize("case", CASES)
def test_updated_weights_have_the_bits_of_a_fresh_load(case: str, tmp_path: Path) -> None:
    check_updates(*CASES[case], tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["merged and packed", "experts", "quantised while loaded", "experts quantised while loaded"]
)
def test_updated_weights_on_a_gpu(case: str, tmp_path: Path) -> None:
    """Graphs stay valid."""
    make, options = CASES[case]
    on_a_gpu = {"device": "cuda", "mode": "graphed", "dtype": "bfloat16", "compile_workers": 0}
    check_updates(make, options | on_a_gpu, tmp_path)


def check_updates(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Compare the bits of engines whose weights were updated with those of fresh loads."""
    old, new = tmp_path / "old", tmp_path / "new"
    for seed, folder in enumerate((old, new)):
        folder.mkdir()
        make(folder, seed)
    expected = fresh(new, {**options, "load_format": "auto"})
    with LLM(old, **ENGINE | options) as llm:
        before, counts = bits(llm), llm.metrics()
        llm.update_weights(new)
        assert bits(llm) == expected
        llm.update_weights(tensors_in(old))
        again = bits(llm)
        assert (again == before) == ("load_format" not in options)
        assert again != expected
        llm.update_weights(tensors_in(new).items(), version="third")
        assert bits(llm) == expected
        metrics = llm.metrics()
    assert (metrics["weight_version"], metrics["weight_updates"]) == ("third", 3)
    for name in ("traces", "compiles", "captures", "recordings"):
        assert metrics[name] == counts[name]


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> tuple[Bits, Bits]:
    """The bits of the old weights, and of the new ones."""
    return fresh(folders[0], {}), fresh(folders[1], {})


@pytest.fixture
def llm(folders: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(folders[0], **ENGINE) as llm:
        yield llm


NAME = "model.layers.1.mlp.down_proj.weight"
WRONG: dict[str, tuple[Any, str]] = {
    "missing": (lambda tensors: tensors.pop(NAME), f"1 missing: {NAME}"),
    "unexpected": (lambda tensors: tensors.update(other=torch.zeros(2)), "1 unexpected: other"),
    "shape": (lambda tensors: tensors.update({NAME: torch.zeros(3, 5)}), rf"{NAME} \(\[3, 5\] instead of \[56, 80\]\)"),
    "dtype": (lambda tensors: tensors.update({NAME: tensors[NAME].int()}), rf"{NAME} \(torch.int32\)"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_update_that_does_not_fit_changes_nothing(
    kind: str, llm: LLM, folders: tuple[Path, Path], expected: tuple[Bits, Bits], tmp_path: Path
) -> None:
    spoil, message = WRONG[kind]
    tensors = tensors_in(folders[1])
    spoil(tensors)
    with pytest.raises(ControlError, match=f"the tensors in the update do not fit LlamaForCausalLM: .*{message}"):
        llm.update_weights(tensors)
    assert bits(llm) == expected[0]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ControlError, match=f"the tensors in {tmp_path} do not fit .*{message}"):
        llm.update_weights(tmp_path)
    assert bits(llm) == expected[0]
    assert llm.metrics()["weight_version"] is None
    llm.update_weights(folders[1])
    assert bits(llm) == expected[1]


def test_an_update_in_parts_is_served_once_it_is_whole(
    llm: LLM, folders: tuple[Path, Path], expected: tuple[Bits, Bits]
) -> None:
    """A second start drops what the first one was sent; a sender that fails may begin again."""
    tensors = [*tensors_in(folders[1]).items()]
    llm.start_weight_update()
    llm.update_weights(tensors[:7])
    assert bits(llm) == expected[0]
    with pytest.raises(ControlError, match="come twice in one update"):
        llm.update_weights(tensors[6:8])
    with pytest.raises(ControlError, match="missing"):
        llm.finish_weight_update()
    with pytest.raises(ControlError, match="no weight update is under way; start one first"):
        llm.finish_weight_update()
    llm.start_weight_update()
    llm.update_weights(tensors[:5])
    llm.start_weight_update()
    for pair in tensors:
        llm.update_weights([pair])
        assert bits(llm) == expected[0]
    assert llm.finish_weight_update("a name") == "a name"
    assert bits(llm) == expected[1]


def test_a_sender_that_fails_in_the_middle_leaves_no_update_behind(
    llm: LLM, folders: tuple[Path, Path], expected: tuple[Bits, Bits]
) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from [*tensors_in(folders[1]).items()][:4]
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        llm.update_weights(tensors())
    assert bits(llm) == expected[0]
    with pytest.raises(ControlError, match="no weight update is under way"):
        llm.finish_weight_update()
    llm.update_weights(folders[1])
    assert bits(llm) == expected[1]


@pytest.mark.parametrize("given", [3, [("a", 1)], ["abc"], {"a": [1.0]}])
def test_anything_but_weights_is_refused(given: Any, llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"allowed: a folder, a dict of tensors by name, or \(name, tensor\) pairs"):
        llm.update_weights(given)


def test_tensors_stay_at_their_addresses(llm: LLM, folders: tuple[Path, Path]) -> None:
    tensors = stored(llm)
    before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    llm.update_weights(folders[1])
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == before
