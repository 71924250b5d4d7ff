"""Drafts on models with recurrences change no token, and no bit of a state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import head_config, random_tensors, write_head
from families import family, write_checkpoint
from graphed_drafts import config_of, run
from lagging_device import lagging_device
from oracle_drafts import Oracle
from recorded_capture import RecordedCapture
from scripted_drafts import AnyLength

from compiled_engine.bench.drafts import LENGTH, drafts_of
from compiled_engine.config import GraphMode
from compiled_engine.engine import runner as model_runner
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.features import registry
from compiled_engine.llm import LLM
from compiled_engine.other_engines.translate import make_options
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.recurrence.states import MATRIX_DRAFTS, MATRIX_LENGTHS, MATRIX_STATE
from compiled_engine.resolve.engine import resolve
from compiled_engine.resolve.speculation import EAGLE3
from compiled_engine.sampling.params import SamplingParams

VOCABULARY, MOST_DRAFTS = 131, 3
# Few tokens a step, so that prompts come in chunks beside drafts.
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "mode": "eager",
    "dtype": "float32",
    "progress": False,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "num_blocks": 200,
}
# Logits that leave few tokens, so that text repeats itself.
FEW = dict.fromkeys((7, 8, 9, 10), 40.0)
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0, "logit_bias": FEW},
    {"temperature": 0.9, "logit_bias": FEW, "logprobs": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "allowed_token_ids": [3, 4, 5], "n": 2},
    {"temperature": 0, "logit_bias": FEW, "frequency_penalty": 0.3},
    {"temperature": 0.5, "logit_bias": FEW, "stop_token_ids": [9], "min_tokens": 11},
    {"temperature": 0, "prompt_logprobs": 1, "repetition_penalty": 1.1},
    {"temperature": 1.0, "logit_bias": FEW, "max_tokens": 2},
    {"temperature": 0, "logit_bias": FEW, "disable_spec_decode": True},
]
FAMILIES = (
    *("qwen3_5_text", "lfm2", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "lfm2_moe"),
    *("falcon_h1", "nemotron_h", "kimi_linear"),
)
DRAWN = pytest.mark.product(one_in=1000)
# Their states are those of the first two; each family's own code is compared without drafts. On a GPU one is drawn.
OTHERS = pytest.mark.shown_by(
    "engine/test_recurrent_drafts.py::test_drafts_change_no_token",
    "recurrence/test_recurrent_models.py::test_logprobs_are_those_of_transformers",
)
pytestmark = pytest.mark.usefixtures("one_thread")


def ngrams(number: int = MOST_DRAFTS, **others: Any) -> dict[str, Any]:
    drafts = {"method": "ngram", "num_speculative_tokens": number, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return {"speculative_config": drafts | others}


@pytest.fixture(
    scope="module",
    params=[name if name in FAMILIES[:2] else pytest.param(name, marks=(OTHERS, DRAWN)) for name in FAMILIES],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    write_checkpoint(made, family(request.param))
    return made


@pytest.fixture(scope="module")
def delta_net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_5_text")
    write_checkpoint(made, family("qwen3_5_text"))
    return made


def prompts() -> list[list[int]]:
    """Some longer than a step, some with a common beginning, some that repeat themselves."""
    draw = random.Random(3)
    shared = [draw.randrange(VOCABULARY) for _ in range(72)]
    own = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (1, 12, 40, 3, 9, 5, 20, 2, 7)]
    return [(shared if number % 2 else own[number] * 2) + own[number] for number in range(9)]


Result = tuple[list[int], str | None, list[float]]


def results(llm: LLM, count: int = len(SAMPLING)) -> list[Result]:
    """Return the tokens, reason of the end, and log-probabilities of each of the first `count` requests."""
    params = [
        SamplingParams(**{"seed": number, "max_tokens": 30, "detokenize": False, "ignore_eos": True} | sampling)
        for number, sampling in enumerate(SAMPLING[:count])
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()[:count]], params, use_tqdm=False)
    llm.core.check_integrity()
    return [
        (
            list(each.token_ids),
            each.finish_reason,
            [row[token].logprob for token, row in zip(each.token_ids, each.logprobs or (), strict=False)],
        )
        for output in outputs
        for each in output.outputs
    ]


def check(llm: LLM, expected: list[Result], count: int = len(SAMPLING)) -> dict[str, Any]:
    """Raise AssertionError unless the results of `count` requests are those expected. Returns the engine's metrics."""
    for found, (tokens, reason, logprobs) in zip(results(llm, count), expected, strict=True):
        assert (found[:2]) == (tokens, reason)
        assert found[2] == pytest.approx(logprobs, abs=1e-3)
    return llm.metrics()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Result]:
    with LLM(folder, **ENGINE) as llm:
        return results(llm)


WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "few blocks, two steps in flight": {"async_scheduling": True, "num_blocks": 44},
    "few snapshots": {"num_state_snapshots": 2, "async_scheduling": True},
}


@pytest.mark.parametrize(
    ("way", "num_drafts"),
    [
        ("eager", MOST_DRAFTS),
        ("few blocks, two steps in flight", MOST_DRAFTS),
        ("few snapshots", 5),  # more than a convolution has inputs
    ],
)
def test_drafts_change_no_token(way: str, num_drafts: int, folder: Path, expected: list[Result]) -> None:
    check_drafts(folder, expected, WAYS[way], num_drafts)


# Qwen3.5 has LFM2's convolutions too, before its delta rules.
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text",
        pytest.param(
            "lfm2",
            marks=pytest.mark.shown_by(
                "engine/test_recurrent_drafts.py::test_drafts_change_no_token_of_a_compiled_model"
            ),
        ),
    ],
)
def test_drafts_change_no_token_of_a_compiled_model(name: str, tmp_path: Path) -> None:
    """The log-probabilities are those of eager code too. Of each kind of layer there is one: others are further
    pieces."""
    write_checkpoint(tmp_path, family(name).first_layers(2))
    with LLM(tmp_path, **ENGINE) as llm:
        expected = results(llm)
    check_drafts(tmp_path, expected, {"mode": "compiled", "compile_ranges": ()}, 2)


def check_drafts(folder: Path, expected: list[Result], options: dict[str, Any], num_drafts: int) -> None:
    with LLM(folder, **ENGINE | options, **ngrams(num_drafts)) as llm:
        check(llm, expected)
        metrics = check(llm, expected)  # again, from snapshots
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]
    assert metrics["prefix_hits"] > 0
    assert (metrics["preemptions"] > 0) == ("num_blocks" in options)


def test_numbers_of_drafts_may_change(folder: Path, expected: list[Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DraftLength", AnyLength)
    with LLM(folder, **ENGINE, **ngrams(enable_adaptive_verification=True)) as llm:
        metrics = check(llm, expected)
    assert metrics["draft_lengths"].keys() == {"0", "1", "3"}
    assert metrics["accepted_tokens"] > 0


def test_a_draft_model_drafts_for_hybrids(folder: Path, expected: list[Result], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family("qwen3"))
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    with LLM(folder, **ENGINE, speculative_config=drafts, async_scheduling=True) as llm:
        metrics = check(llm, expected)
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]


def test_a_head_drafts_for_hybrids_and_rests(
    folder: Path, expected: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "DraftLength", AnyLength)
    config = head_config(folder)
    drafts = {"method": "eagle3", "model": str(write_head(tmp_path, config, random_tensors(config)))}
    drafts |= {"num_speculative_tokens": MOST_DRAFTS, "enable_adaptive_verification": True}
    with LLM(folder, **ENGINE, speculative_config=drafts, async_scheduling=True) as llm:
        metrics = check(llm, expected)
    assert metrics["draft_tokens"] > 0
    assert metrics["rested"] > 0


def test_ranks_divide_states_with_drafts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family("qwen3_5_text").to_divide())
    with LLM(tmp_path, **ENGINE) as llm:
        expected = results(llm, 4)
    with LLM(tmp_path, **ENGINE, **ngrams(), tensor_parallel_size=2) as llm:
        metrics = check(llm, expected, 4)
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]


def test_drafts_that_the_host_does_not_know(
    folder: Path, expected: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has rows for all drafts, beside chunks of prompts too, and some drafts do not exist."""
    oracle = Oracle(range(MOST_DRAFTS + 1))
    oracle.sequences = [
        prompt + tokens
        for prompt in prompts()
        for tokens, *_ in expected  # of other prompts too, so that some drafts are wrong at once
    ]
    monkeypatch.setattr(registry, "drafting", oracle.features)
    with LLM(folder, **ENGINE, **ngrams(), async_scheduling=True) as llm:
        metrics = check(llm, expected)
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]


@pytest.mark.product(one_in=1000, each=("mode",))
@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.FULL_DECODE_ONLY])
def test_a_lagging_device_replays_graphs(mode: GraphMode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are padded to their sizes, and the host stages a step before the one before it has run."""
    monkeypatch.setattr(model_runner, "CudaCapture", RecordedCapture)
    options = {"model": folder, "async_scheduling": True, "skip_tokenizer_init": True, "max_model_len": 160}
    asked = [
        EngineRequest(
            str(number), tuple(prompt), SamplingParams(seed=number, max_tokens=25, logit_bias=FEW, **sampling)
        )
        for number, (prompt, sampling) in enumerate(zip(prompts(), [{"temperature": 0}, {}, {}] * 3, strict=True))
    ]
    core = start_core(config_of(mode, None, **options), SilentProgress())
    expected, oracle = run(core, asked), Oracle(range(MOST_DRAFTS + 1))
    core.close()
    oracle.sequences = [prompt + expected[str(number)] for number, prompt in enumerate(prompts())]
    monkeypatch.setattr(registry, "drafting", oracle.features)
    core = start_core(config_of(mode, ngrams()["speculative_config"], **options), SilentProgress())
    with lagging_device():
        assert run(core, asked) == expected
    metrics = core.metrics()
    core.close()
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]
    replays = metrics["graph_replays_by_key"]
    assert len([name for name, count in replays.items() if name.startswith("verify-4 ") and count]) > 1


def watched(
    llm: LLM, oracle: Oracle, prompt: list[int], params: SamplingParams
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Yield, after each step of the only request, the number of its tokens that are computed, and its states."""
    assert oracle.parts is not None
    recurrences, requests = oracle.parts.config.model.recurrences, oracle.parts.states
    assert recurrences is not None
    llm.core.add(EngineRequest("a", tuple(prompt), params))
    while llm.core.has_unfinished():
        llm.core.step()
        if llm.core.has_unfinished():
            row = requests.row("a")
            states = {state.name: oracle.parts.tensors[state.name][row].clone() for state in recurrences.states}
            yield int(requests.num_computed_S[row]), states


def at_position(states: dict[str, torch.Tensor], computed: int) -> dict[tuple[str, int], torch.Tensor]:
    """The inputs of convolutions that the next token needs, by position, and delta rules' states by their length."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    for name, state in states.items():
        owner, _, kind = name.rpartition(".")
        if kind == MATRIX_STATE:
            found[name, int(states[f"{owner}.{MATRIX_LENGTHS}"].max())] = state
        elif kind not in (MATRIX_DRAFTS, MATRIX_LENGTHS):
            num_slots = state.shape[1]
            for position in range(max(0, computed - num_slots + MOST_DRAFTS), computed):
                found[name, position] = state[:, position % num_slots]
    return found


def test_states_are_those_of_the_tokens_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare states after each step with those of an engine whose drafts are never right and whose steps have as many
    rows. They are equal to the bit."""
    prompt, length = [5, 17, 80, 3, 9], 40
    params = SamplingParams(temperature=0, seed=0, max_tokens=length, detokenize=False, ignore_eos=True)
    with LLM(folder, **ENGINE) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    alone, oracle = dict[tuple[str, int], torch.Tensor](), Oracle([0])
    oracle.sequences = [prompt + list(output.outputs[0].token_ids)]
    monkeypatch.setattr(registry, "drafting", oracle.features)
    # The last steps have fewer rows, as fewer tokens are left.
    last = len(prompt) + length - MOST_DRAFTS - 2
    with LLM(folder, **ENGINE, **ngrams()) as llm:
        for computed, states in watched(llm, oracle, prompt, params):
            alone |= at_position(states, computed) if computed <= last else {}
        assert llm.metrics()["accepted_tokens"] == 0
    oracle.num_right = range(MOST_DRAFTS + 1)
    with LLM(folder, **ENGINE, **ngrams()) as llm:
        for computed, states in watched(llm, oracle, prompt, params):
            if computed <= last:
                for key, state in at_position(states, computed).items():
                    assert torch.equal(state, alone[key]), key
        assert llm.metrics()["accepted_tokens"] > length / 3


def test_right_drafts_are_all_accepted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, oracle = [5, 17, 80, 3, 9], Oracle([MOST_DRAFTS])
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=41, detokenize=False, ignore_eos=True)
    with LLM(folder, **ENGINE) as llm:
        (expected,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    oracle.sequences = [prompt + list(expected.outputs[0].token_ids)]
    monkeypatch.setattr(registry, "drafting", oracle.features)
    with LLM(folder, **ENGINE, **ngrams()) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        metrics = llm.metrics()
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert metrics["steps"] == 1 + 40 // (MOST_DRAFTS + 1)
    assert metrics["accepted_tokens"] == metrics["draft_tokens"] == 30


def test_drafts_accepted_at_random_leave_states_of_numbers(folder: Path, tmp_path: Path) -> None:
    """Accept a random head's drafts at random, as benchmarks do."""
    options = ENGINE | {"load_format": "dummy"}
    model = resolve(make_options({"model": folder, "device": "cpu", "load_format": "dummy"})).model
    params = [SamplingParams(seed=seed, max_tokens=80, detokenize=False, ignore_eos=True) for seed in range(4)]
    with LLM(folder, **options, speculative_config=drafts_of(EAGLE3, model, tmp_path)) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()[:4]], params, use_tqdm=False)
        metrics = llm.metrics()
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert 1 + metrics["accepted_tokens"] / metrics["drafted_requests"] == pytest.approx(LENGTH, abs=0.4)


@pytest.mark.parametrize("steps", [2, 5])
def test_an_abort_leaves_nothing_to_the_next_request_in_its_row(steps: int, delta_net: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False, logit_bias=FEW)
    with LLM(delta_net, **ENGINE | {"max_num_seqs": 1}, **ngrams()) as llm:
        expected = llm.generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False)[0]
        llm.core.add(EngineRequest("a", (7, 8, 9, 7, 8, 9, 7, 8), params))
        for _ in range(steps):
            llm.core.step()
        llm.core.abort("a")
        (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False)
        llm.core.check_integrity()
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_the_memory_of_states_is_told_before_the_start(folder: Path) -> None:
    options = {name: value for name, value in (ENGINE | ngrams()).items() if name != "progress"}
    config = resolve(make_options({"model": folder} | options))
    recurrences = config.model.recurrences
    assert recurrences is not None
    num_bytes = recurrences.row_bytes * recurrences.num_rows
    told = config.reasons["model.recurrences.num_rows"]
    assert told.startswith(f"{recurrences.row_bytes / 2**20:.2f} MiB of states each: {num_bytes / 2**30:.2f} GiB, ")
    assert told.endswith("% of it for drafts")
    with LLM(folder, progress=False, **options) as llm:
        metrics = llm.metrics()
    assert metrics["state_bytes"] - metrics["snapshot_bytes"] == num_bytes
    assert metrics["snapshot_bytes"] == recurrences.snapshot_bytes * recurrences.num_snapshots
    plain = resolve(make_options({"model": folder} | options | {"speculative_config": None})).model.recurrences
    assert plain is not None
    assert plain.row_bytes < recurrences.row_bytes
    has_rules = any(state.name.endswith(MATRIX_STATE) for state in plain.states)
    assert (recurrences.snapshot_bytes < recurrences.row_bytes) == has_rules


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("mode", [pytest.param("eager", marks=DRAWN), "graphed"])
def test_drafts_change_no_token_on_a_gpu(mode: str, folder: Path) -> None:
    options = ENGINE | {"device": "cuda", "block_size": 16}
    with LLM(folder, **options) as llm:
        expected = results(llm)
    if mode != "eager":  # tests side by side on a GPU have a core each: engines compile in this process
        options |= {"mode": mode, "compile_workers": 0}
    with LLM(folder, **options, **ngrams(), num_state_snapshots=4) as llm:
        metrics = check(llm, expected)
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]
