"""Models with recurrences: right in chunks, beside others, preempted, in rows used again; cached; refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import family, write_checkpoint
from family_comparison import difference_after_passes, difference_of, fused_model
from greedy_engines import PROMPTS, SMALL, expected_in_company, generated, greedy

from compiled_engine.graphs.cache.key import cache_factors
from compiled_engine.llm import LLM
from compiled_engine.other_engines.translate import make_options
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

FAMILIES = (
    *("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
    *("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h"),
    *("kimi_linear", "bailing_hybrid"),
)


# One of each kind; of the others one runs without --all.
ALWAYS = ("lfm2", "qwen3_5_text", "falcon_h1", "kimi_linear")
DRAWN = pytest.mark.product(one_in=1000)


@pytest.fixture(
    scope="module", params=[name if name in ALWAYS else pytest.param(name, marks=DRAWN) for name in FAMILIES]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A family's folder, and its model in transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_checkpoint(folder, family(request.param))


@pytest.fixture(scope="module")
def delta_net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3_5_text")
    return folder, write_checkpoint(folder, family("qwen3_5_text"))


@pytest.fixture(scope="module", params=["qwen3_5_text", "kimi_linear", pytest.param("nemotron_h", marks=DRAWN)])
def matrices(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_checkpoint(folder, family(request.param))


@pytest.mark.usefixtures("one_thread")
def test_logprobs_are_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    difference = difference_of(folder, oracle, {"mode": "eager", "device": "cpu"})
    assert difference.is_right(torch.float32), difference


# Graphs after all passes are compared below. Compiled Qwen3.5 runs with drafts, and has eager code's log-probabilities.
@pytest.mark.usefixtures("one_thread")
@pytest.mark.shown_by(
    "recurrence/test_recurrent_models.py::test_logprobs_are_those_of_transformers",
    "recurrence/test_recurrent_models.py::test_logprobs_after_all_passes_are_those_of_transformers",
    "engine/test_recurrent_drafts.py::test_drafts_change_no_token_of_a_compiled_model",
)
@pytest.mark.parametrize("name", ["qwen3_5_text", "olmo_hybrid", "kimi_linear"])
def test_logprobs_of_a_compiled_model_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Inductor compiles the gated norms of both. Of each kind of layer there is one: others are further pieces."""
    oracle = write_checkpoint(tmp_path, family(name).first_layers(2))
    difference = difference_of(tmp_path, oracle, {"mode": "compiled", "compile_ranges": (), "device": "cpu"})
    assert difference.is_right(torch.float32), difference


# The ops of each model, and how many operations on parameters alone are folded at least: decays of Mamba 2 are -exp(A).
OPS = {"lfm2_moe": ({"conv_state"}, 0), "qwen3_5_text": ({"conv_state", "delta_rule"}, 0)}
OPS |= {"nemotron_h": ({"conv_state", "state_space"}, 4), "kimi_linear": ({"conv_state", "delta_rule"}, 0)}
COMPILED = pytest.mark.shown_by(
    "recurrence/test_recurrent_models.py::test_logprobs_after_all_passes_are_those_of_transformers",
    "engine/test_recurrent_drafts.py::test_drafts_change_no_token_of_a_compiled_model",
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", ["nemotron_h", "kimi_linear", *(pytest.param(name, marks=COMPILED) for name in [*OPS][:2])]
)
def test_logprobs_after_all_passes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, oracle = tmp_path, write_checkpoint(tmp_path, family(name))
    model = fused_model(folder, {"device": "cpu", "strict_passes": True}, verify=True)
    difference = difference_after_passes(model, oracle)
    assert difference.is_right(torch.float32), difference
    reports, (ops, folded) = {report.name: report for report in model.reports}, OPS[name]
    report = reports["recurrences"]
    assert {note.partition(" x compiled_engine::")[2] for note in report.notes} == ops
    assert report.matches == report.contract == 2 * len(ops)
    assert reports["fold_parameters"].matches >= folded


@pytest.mark.usefixtures("one_thread")
def test_tokens_are_transformers_whatever_runs_beside_them(matrices: tuple[Path, Any]) -> None:
    folder, oracle = matrices
    expected = expected_in_company(folder, oracle)
    whole, _ = generated(folder, mode="eager", max_num_seqs=5)
    assert whole == expected


@pytest.mark.usefixtures("one_thread")
def test_a_request_that_is_given_up_leaves_nothing_to_the_next_in_its_row(matrices: tuple[Path, Any]) -> None:
    folder, oracle = matrices
    params = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    with LLM(folder, **SMALL, mode="eager", max_num_seqs=1) as llm:
        stream = llm.stream({"prompt_token_ids": PROMPTS[1]}, params)
        next(stream)
        stream.close()
        (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params)
    assert list(output.outputs[0].token_ids) == greedy(oracle, PROMPTS[0])


def test_the_key_has_the_states_and_their_rows(delta_net: tuple[Path, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family("qwen3"))

    def factors(folder: Path, **options: Any) -> dict[str, Any]:
        given = {"model": folder, "device": "cpu", "model_impl": "transformers", "mode": "compiled"}
        return cache_factors(resolve(make_options(given | options)))

    few, many = (factors(delta_net[0], max_num_seqs=count) for count in (3, 4))
    assert few["config"]["model.recurrences.num_rows"] == 3
    assert few["config"].keys() == many["config"].keys()
    assert few != many
    plain = factors(tmp_path, max_num_seqs=3)
    assert plain == factors(tmp_path, max_num_seqs=4)
    assert not any("recurrences" in name for name in plain["config"])
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    assert factors(delta_net[0], max_num_seqs=3, speculative_config=drafts) != few
    more = few["source"].keys() - plain["source"].keys()
    assert {name.partition("/")[0] for name in more} == {"recurrence"}


def test_stages_are_refused(delta_net: tuple[Path, Any]) -> None:
    reason = "pipeline_parallel_size is 2, but the states of Qwen3_5ForCausalLM's recurr"
    with pytest.raises(ValueError, match=f"^{reason}.*; allowed: 1$") as error:
        resolve(make_options({"model": delta_net[0], "device": "cpu", "pipeline_parallel_size": 2}))
    assert "\n" not in str(error.value)


def test_heads_that_ranks_cannot_divide_are_refused(delta_net: tuple[Path, Any]) -> None:
    with pytest.raises(
        ValueError, match="size is 4, which does not divide the model's 2 linear_num_key_heads; allowed"
    ):
        resolve(make_options({"model": delta_net[0], "device": "cpu", "tensor_parallel_size": 4}))


@pytest.mark.shown_by("engine/test_recurrent_drafts.py::test_ranks_divide_states_with_drafts")
@pytest.mark.usefixtures("one_thread")
def test_two_ranks_give_transformers_log_probabilities(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, family("qwen3_5_text").to_divide())
    difference = difference_of(tmp_path, oracle, {"mode": "eager", "device": "cpu", "tensor_parallel_size": 2})
    assert difference.is_right(torch.float32), difference


# Tests side by side on a GPU have a core each: engines compile in this process.
HERE: dict[str, Any] = {"compile_workers": 0}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=DRAWN), "graphed"])
def test_logprobs_on_a_gpu_are_those_of_transformers(mode: str, checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    options = {"mode": mode, "device": "cuda"} | ({} if mode == "eager" else HERE)
    difference = difference_of(folder, oracle.to("cpu"), options)
    assert difference.is_right(torch.float32), difference


@pytest.mark.gpu
def test_half_precision_on_a_gpu_is_as_near_as_transformers(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    options = HERE | {"mode": "graphed", "device": "cuda", "dtype": "bfloat16"}
    difference = difference_of(folder, oracle.to("cpu"), options)
    assert difference.is_right(torch.bfloat16), difference
