"""Quantised checkpoints through the whole engine: each layout beside an oracle, and contradictory folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from quantised_checkpoints import LAYOUTS, compressed, write_quantised
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from compiled_engine import LLM, SamplingParams
from compiled_engine.cli.app import app

OPTIONS: dict[str, Any] = {"device": "cpu", "mode": "compiled", "progress": False, "strict_passes": True}
PROMPTS = ["def ", "import os\n\n\ndef read(path):\n    ", "class Node:\n    def __init__(self, ", "for i in range("]
LENGTH = 12
# One code that is rounded the other way moves logits by so much: sums in another order decide where two are as near.
ONE_CODE = 0.15


def compare(folder: Path, oracle: Any, prompts: list[list[int]], exact: bool = False, **options: Any) -> dict[str, Any]:
    """Greedy tokens are the oracle's, up to where its two best logits differ by less than one code explains.

    exact: inputs are not rounded, so log-probabilities are the oracle's too. Where they are, an ulp in another sum
    rounds one code of some thousands the other way, and those behind it follow. Returns the engine's metrics.
    """
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, prompt_logprobs=1, detokenize=False)
    more = {} if options.get("mode") == "eager" else {"compile_ranges": ()}
    with LLM(folder, **OPTIONS | {"skip_tokenizer_init": True} | more | options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        metrics = llm.metrics()
    explained, distances = 0, []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        logits = oracle(torch.tensor([prompt + tokens])).logits[0]
        expected = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        for place, (found, wanted) in enumerate(zip(tokens, expected, strict=True)):
            if found != wanted:
                row = logits[len(prompt) - 1 + place]
                assert float(row[wanted] - row[found]) < (1e-4 if exact else ONE_CODE)
                explained += 1
        logprobs = logits.log_softmax(-1)
        for place, row in enumerate((output.prompt_logprobs or [])[1:], start=1):
            assert row is not None
            distances.append(abs(row[prompt[place]].logprob - float(logprobs[place - 1, prompt[place]])))
    assert explained <= len(prompts) * LENGTH // 10
    assert min(distances) < 1e-4
    assert max(distances) < 1e-3 or not exact
    return metrics


IGNORED = ["lm_head", "model.layers.2.mlp.down_proj"]
ODD = {"hidden_size": 204, "intermediate_size": 336, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40}
# Rows of every linear are in whole tiles.
EVEN = ODD | {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
IDS = [[(7 * i * i + 3 * j) % 130 for j in range(3 + 8 * i)] for i in range(4)]
# Compiled always, as its inputs are rounded while the model runs. The others differ in how scales are stored, which the
# decoded weights show, and in the scales of the inputs, with which the graphs are verified.
COMPILED = "compressed-tensors, channel and token"
DECODED = pytest.mark.shown_by(
    "engine/test_quantised_engine.py::test_each_layout_is_decoded",
    "passes/test_quantise.py::test_every_pass_keeps_its_contract_and_its_verifier",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is not quantised."""
    make_checkpoint(folder := tmp_path_factory.mktemp("plain"), "llama", **EVEN)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_decoded(name: str, plain: Path, tmp_path: Path) -> None:
    oracle = write_quantised(plain, tmp_path, LAYOUTS[name], IGNORED, round_inputs=False)
    compare(tmp_path, oracle, IDS, exact=True, mode="eager", strict_passes=False)


@pytest.mark.parametrize(
    "name",
    [name if name == COMPILED else pytest.param(name, marks=DECODED) for name in LAYOUTS],
)
def test_each_layout_computes_what_its_codes_stand_for(
    name: str, bundled_model_path: Path, bundled_tokenizer: Any, tmp_path: Path
) -> None:
    oracle = write_quantised(bundled_model_path, tmp_path, LAYOUTS[name], IGNORED)
    prompts = [bundled_tokenizer.hf(text)["input_ids"] for text in PROMPTS]
    compare(tmp_path, oracle, prompts, LAYOUTS[name].inputs is None)


BLOCK = LAYOUTS["compressed-tensors, block"]
TOKEN = LAYOUTS["compressed-tensors, channel and token"]
# Has each kind of linear, and fewer pieces to compile than two.
ONE_LAYER = {"num_hidden_layers": 1}


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("llama", {"attention_bias": True, "tie_word_embeddings": False}, {"compile_ranges": ()}),
        ("qwen3", {"tie_word_embeddings": True}, {"compile_ranges": (8,)}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": False}, {"model_impl": "transformers"}),
    ],
    ids=["llama", "qwen3, tied", "transformers' code"],
)
def test_odd_sizes(family: str, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """Tiles of 128 that end nowhere where a linear does."""
    make_checkpoint(tmp_path / "plain", family, **ODD | ONE_LAYER | changes)
    oracle = write_quantised(tmp_path / "plain", tmp_path / "fp8", BLOCK, ["lm_head"])
    compare(tmp_path / "fp8", oracle, IDS, **options)


def test_eager_computes_with_decoded_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "llama", **ODD)
    alone = LAYOUTS["compressed-tensors, channel, weights alone"]
    oracle = write_quantised(tmp_path / "plain", tmp_path / "fp8", alone, ["lm_head"])
    compare(tmp_path / "fp8", oracle, IDS, True, mode="eager", strict_passes=False)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "ignore", "parts"),
    [
        (drop(f"{Q}.weight_scale"), None, ("missing", f"{Q}.weight_scale")),
        (put(f"{Q}.weight_scale", torch.ones(3, 1)), None, ("of another shape", f"{Q}.weight_scale ([3, 1] instead")),
        (put(f"{Q}.weight", torch.zeros(112, 56)), None, ("unexpected", f"{Q}.weight_scale")),
        (put(f"{Q}.input_scale", torch.ones(1)), None, ("unexpected", f"{Q}.input_scale")),
        (lambda tensors: None, ["lm_head", Q], ("quantised against the rules", f"{Q}.weight", "to be ignored")),
        (put("model.norm.weight_scale", torch.ones(1)), None, ("unexpected", "model.norm.weight_scale")),
    ],
    ids=["no scale", "scale of another shape", "not quantised", "a scale too many", "ignored", "a scale of a norm"],
)
def test_folders_that_contradict_themselves(
    edit: Callable[[dict[str, torch.Tensor]], None], ignore: list[str] | None, parts: tuple[str, ...], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "plain", "llama", tie_word_embeddings=False)
    write_quantised(tmp_path / "plain", tmp_path / "fp8", TOKEN, ["lm_head"])
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    if ignore is not None:
        config = json.loads((tmp_path / "fp8" / "config.json").read_text())
        config["quantization_config"]["ignore"] = ignore
        (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="do not fit") as caught:
        LLM(tmp_path / "fp8", device="cpu", mode="eager", progress=False, skip_tokenizer_init=True)
    assert all(part in str(caught.value) for part in parts)
    assert "\n" not in str(caught.value)


def test_two_ranks_off_the_borders_of_blocks(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Shards of 168 columns and 120 rows; with --all compiled too.

    Inputs are not rounded, as ranks round theirs in smaller groups.
    """
    make_checkpoint(tmp_path / "plain", "llama", **ODD | {"tie_word_embeddings": False, "vocab_size": 132})
    alone = replace(BLOCK, config=compressed("block", None, block_structure=[128, 128]), inputs=None)
    oracle = write_quantised(tmp_path / "plain", tmp_path / "fp8", alone, ["lm_head"])
    two: dict[str, Any] = {"exact": True, "tensor_parallel_size": 2}
    compare(tmp_path / "fp8", oracle, IDS, mode="eager", strict_passes=False, **two)
    if pytestconfig.getoption("--all"):
        compare(tmp_path / "fp8", oracle, IDS, **two)


# These have the loss of the bundled model, and passes over weights that are quantised while they are loaded.
LOSSES = pytest.mark.shown_by(
    "bench/test_held_out_loss.py::test_rows_are_compared_with_float32",
    "passes/test_quantise.py::test_every_pass_keeps_its_contract_and_its_verifier",
)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block", "int4"])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", "float32", marks=LOSSES),
        pytest.param("cuda", "bfloat16", marks=(pytest.mark.gpu, pytest.mark.product(one_in=1000))),
    ],
)
def test_weights_are_quantised_while_they_are_loaded(
    device: str, dtype: str, quantization: str, bundled_model_path: Path, bundled_tokenizer: Any
) -> None:
    """A text stays about as likely, and no pass computes something else than the rules say."""
    ids = bundled_tokenizer.hf((bundled_model_path / "held_out.txt").read_text())["input_ids"][:200]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, detokenize=False)
    quantised: dict[str, Any] = {"quantization": quantization, "verify_passes": True, "strict_passes": True}
    quantised |= {"compile_ranges": ()} if device == "cpu" else {"compile_workers": 0}
    losses = []
    for checked in ({"mode": "eager"}, quantised):
        options = {"device": device, "dtype": dtype, "progress": False, "skip_tokenizer_init": True} | checked
        options |= {"num_blocks": 256, "max_num_seqs": 4}  # others may share the GPU
        with LLM(bundled_model_path, **options) as llm:
            (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        rows = (output.prompt_logprobs or [])[1:]
        losses.append(-sum(row[token].logprob for row, token in zip(rows, ids[1:], strict=True) if row) / len(rows))
    assert 0 < abs(losses[0] - losses[1]) < 0.05


@pytest.mark.shown_by(
    "bench/test_held_out_loss.py::test_quantise_tells_the_loss_before_and_after",
    "models/test_quantise_folder.py::test_tensors_and_config_are_as_the_format_describes",
    "models/test_quantise_folder.py::test_four_bits_are_as_the_format_describes",
)
@pytest.mark.parametrize(("quantization", "sizes"), [("fp8", ODD), ("fp8_block", EVEN), ("int4", EVEN)])
def test_a_written_folder_computes_what_loading_quantises(
    quantization: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    sizes = sizes | ONE_LAYER | {"tie_word_embeddings": False}
    make_checkpoint(tmp_path / "plain", "llama", **sizes, dtype=torch.bfloat16)
    command = ["quantise", str(tmp_path / "plain"), str(tmp_path / "fp8"), "--scheme", quantization]
    assert CliRunner().invoke(app, command).exit_code == 0
    made, read = generated(tmp_path / "plain", quantization=quantization), generated(tmp_path / "fp8")
    assert made == read


def generated(folder: Path, **options: Any) -> list[tuple[Any, ...]]:
    """Tokens, and log-probabilities of prompts and of tokens."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=3, prompt_logprobs=1, detokenize=False)
    with LLM(folder, **OPTIONS, compile_ranges=(), skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in IDS], params, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), list(o.outputs[0].logprobs), o.prompt_logprobs) for o in outputs]
