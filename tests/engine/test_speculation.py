"""Drafts change no token: engines with and without them agree, with everything that a scheduler and a sampler do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_idle_layers
from eagle_heads import write_fitted_head
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from small_engines import CHUNKED

from compiled_engine.engine.executor import InProcessExecutor
from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.engine.step_hooks import RunnerParts, StepFeature
from compiled_engine.features import registry
from compiled_engine.features.speculation.ngram import ngram_drafts
from compiled_engine.features.speculation.step_drafts import StepDrafts
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.structured_outputs import StructuredOutputs

# Few blocks, so that requests are preempted.
ENGINE = CHUNKED | {"num_blocks": 40}
REPETITIVE = "x = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2"
pytestmark = pytest.mark.usefixtures("one_thread")


def ngram(num_drafts: int, longest: int = 3, shortest: int = 1) -> dict[str, Any]:
    drafts = {"method": "ngram", "num_speculative_tokens": num_drafts}
    return {"speculative_config": drafts | {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}}


def draft_model(num_drafts: int) -> dict[str, Any]:
    """Without the path, which the fixture adds."""
    return {"speculative_config": {"method": "draft_model", "num_speculative_tokens": num_drafts}}


def eagle3(num_drafts: int) -> dict[str, Any]:
    """Likewise."""
    return {"speculative_config": {"method": "eagle3", "num_speculative_tokens": num_drafts}}


@pytest.fixture(scope="module")
def text(bundled_model_path: Path) -> str:
    return (bundled_model_path / "held_out.txt").read_text()


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(mode="eager", **ENGINE) as llm:
        yield llm


DRAFTED: dict[str, dict[str, Any]] = {
    "eager, in torch": {"mode": "eager", "attention_backend": "torch", **ngram(3)},
    "compiled, two steps in flight": {"mode": "compiled", "async_scheduling": True, **ngram(5)},
    "recorded, one draft": {"async_scheduling": True, **ngram(1, 4, 2)},
    "recorded, more drafts than a step has room for": {"max_num_seqs": 3, **ngram(20)},
    "two ranks": {"mode": "eager", "async_scheduling": True, "tensor_parallel_size": 2, **ngram(4)},
    "a draft model, eager, in torch": {"mode": "eager", "attention_backend": "torch", **draft_model(3)},
    "a draft model, recorded, two steps in flight": {"async_scheduling": True, **draft_model(5)},
    "a draft model, two ranks": {"mode": "eager", "tensor_parallel_size": 2, **draft_model(1)},
    "a head, eager, in torch": {"mode": "eager", "attention_backend": "torch", **eagle3(3)},
    "a head, recorded, two steps in flight": {"async_scheduling": True, **eagle3(5)},
    "a head, two ranks": {"mode": "eager", "tensor_parallel_size": 2, **eagle3(2)},
}


@pytest.fixture(scope="module")
def first_layers(bundled_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is often right, and often wrong."""
    return write_idle_layers(bundled_model_path, tmp_path_factory.mktemp("draft"), 5)


@pytest.fixture(scope="module")
def head(plain: LLM, text: str, bundled_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Likewise."""
    token_ids = torch.tensor(plain.get_tokenizer().encode(text[:20_000]))
    windows_NL = token_ids[: len(token_ids) // 128 * 128].view(-1, 128)
    return write_fitted_head(tmp_path_factory.mktemp("head"), bundled_model_path, windows_NL)


# Of the others one is drawn. Two ranks that verify drafts, with two steps in flight: test_eagle.py.
ALWAYS = (
    "compiled, two steps in flight",
    "a draft model, recorded, two steps in flight",
    "a head, recorded, two steps in flight",
)
OTHERS = pytest.mark.product(one_in=1000)


@pytest.fixture(
    scope="module", params=[name if name in ALWAYS else pytest.param(name, marks=OTHERS) for name in DRAFTED]
)
def drafted(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = ENGINE | DRAFTED[request.param]
    drafting = {"draft_model": "first_layers", "eagle3": "head"}
    if (fixture := drafting.get(options["speculative_config"]["method"])) is not None:
        model = {"model": str(request.getfixturevalue(fixture))}
        options["speculative_config"] = options["speculative_config"] | model
    with LLM(**options) as llm:
        yield llm
        llm.core.check_integrity()
        metrics = llm.metrics()
        assert (metrics["running"], metrics["waiting"], metrics["kv_usage"]) == (0, 0, 0)
        assert metrics["accepted_tokens"] > 0
        assert metrics["accepted_tokens"] < metrics["draft_tokens"]


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.3},
    {"temperature": 0.8, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 0.7, "logprobs": 70},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.5, "n": 2},
    {"temperature": 0, "repetition_penalty": 1.1},
    {"temperature": 0.6, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logprobs": 1},
    {"temperature": 0, "bad_words": ["return", " 1"]},
    {"temperature": 0, "logit_bias": {100: 3.0, 7: -5.0}},
    {"temperature": 0.4, "allowed_token_ids": list(range(0, 3000, 3))},
    {"temperature": 0.6, "structured_outputs": StructuredOutputs(regex="([ab]c){2,9}")},
]
ENDS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {},
    {"stop": ["\n", "e "]},
    {"stop_token_ids": [*range(0, 4000, 40)], "min_tokens": 5},
    {"min_tokens": 4},
]


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, int, SamplingParams]:
    """Draw a prompt's start in the text, its length, how often it is repeated, and its parameters."""
    sampling, ends = draw(st.sampled_from(SAMPLING)), draw(st.sampled_from(ENDS))
    if "structured_outputs" in sampling:
        ends = {name: value for name, value in ends.items() if name != "ignore_eos"}
    max_tokens = draw(st.integers(max(1, ends.get("min_tokens", 1)), 30))
    seed = draw(st.integers(0, 1000))
    params = SamplingParams(seed=seed, max_tokens=max_tokens, truncate_prompt_tokens=80, **sampling, **ends)
    start = draw(st.sampled_from([0, 300]) | st.integers(0, 20_000))
    return start, draw(st.integers(1, 60)), draw(st.sampled_from([1, 1, 3])), params


def same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        for mine, other in zip(our.outputs, their.outputs, strict=True):
            assert list(mine.token_ids) == list(other.token_ids)
            assert (mine.text, mine.finish_reason, mine.stop_reason) == (
                other.text,
                other.finish_reason,
                other.stop_reason,
            )
            assert (mine.logprobs is None) == (other.logprobs is None)
            for row, expected in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                assert {token: entry.logprob for token, entry in row.items()} == pytest.approx(
                    {token: entry.logprob for token, entry in expected.items()}, abs=1e-3
                )
        assert (our.prompt_logprobs is None) == (their.prompt_logprobs is None)


@pytest.fixture(scope="module")
def without_drafts(plain: LLM) -> Callable[[list[str], list[SamplingParams]], list[RequestOutput]]:
    """Every engine with drafts has the same workloads, so that what they give without is found once."""
    kept: dict[str, list[RequestOutput]] = {}

    def generate(prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
        workload = repr((prompts, params))
        if workload not in kept:
            kept[workload] = plain.generate(prompts, params, use_tqdm=False)
        return kept[workload]

    return generate


@given(workload=st.lists(requests(), min_size=1, max_size=9))
@settings(max_examples=6, derandomize=True, phases=[Phase.generate])  # shrinking takes minutes
def test_the_tokens_are_those_without_drafts(
    workload: list[tuple[int, int, int, SamplingParams]], text: str, without_drafts: Any, drafted: LLM
) -> None:
    prompts = [(text[start : start + length] * times)[:150] for start, length, times, _ in workload]
    params = [params for *_, params in workload]
    same(drafted.generate(prompts, params, use_tqdm=False), without_drafts(prompts, params))


class _Launched(StepFeature):
    """Drafts as a GPU has them: they are made when the step's inputs are, and the host does not know them.

    Takes the place of the dispatcher as well, which has to be asked for a graph for the longest context of a step.
    """

    def __init__(self, parts: RunnerParts):
        self._states, self._buffers, self._num_drafts = parts.states, parts.buffers, parts.config.num_ahead
        self._longest = 0

    def dispatch(self, *shape: Any) -> None:
        self._longest = shape[3]

    def before_inputs(self, batch: InputBatch) -> None:
        states, buffers = self._states, self._buffers
        assert states.ahead_SK is not None
        assert buffers.offsets_R is not None
        numbers = buffers.offsets_R.tolist()
        for row, number in zip(buffers.rows_R[: batch.num_rows].tolist(), numbers, strict=False):
            computed = int(states.num_computed_S[row])
            assert row < 0 or computed + number < self._longest
            if row >= 0 and number == 0 and computed >= int(states.prefill_len_S[row]):
                found = ngram_drafts(states.all_token_ids(row)[: computed + 1], 3, 1, self._num_drafts)
                states.ahead_SK[row] = -1
                states.ahead_SK[row, : len(found)] = torch.from_numpy(found)


@pytest.mark.parametrize(
    ("num_drafts", "options"),
    [(1, {"async_scheduling": True}), (3, {"mode": "eager", "attention_backend": "torch"})],
    ids=str,
)
def test_the_host_need_not_know_the_drafts(
    num_drafts: int, options: dict[str, Any], text: str, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[_Launched] = []

    def unknown(parts: RunnerParts) -> list[StepFeature]:
        launched.append(_Launched(parts))
        return [StepDrafts(parts, known=False), *launched]

    monkeypatch.setattr(registry, "drafting", unknown)
    prompts = [
        (text[start : start + 5 + start % 37] * times)[:120]
        for start, times in zip(range(0, 996, 83), [1, 3] * 6, strict=True)
    ]
    params = [
        SamplingParams(seed=number, max_tokens=3 + 5 * (number % 6), truncate_prompt_tokens=80, **sampling)
        for number, sampling in enumerate(SAMPLING[:12])
    ]
    with LLM(**ENGINE | {"num_blocks": 30} | options, **ngram(num_drafts)) as llm:
        executor = llm.core.executor
        assert isinstance(executor, InProcessExecutor)
        (executor.runner.step_graphs.dispatcher,) = launched
        same(*(engine.generate(prompts, params, use_tqdm=False) for engine in (llm, plain)))
        llm.core.check_integrity()
        metrics = llm.metrics()
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]
    assert metrics["preemptions"] > 0


def test_right_drafts_save_steps() -> None:
    """Each step yields one token and the drafts that were right."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(mode="eager", **ENGINE | {"max_num_batched_tokens": 64}, **ngram(4)) as llm:
        (output,) = llm.generate([REPETITIVE], params, use_tqdm=False)
        metrics = llm.metrics()
    assert len(output.outputs[0].token_ids) == 40
    assert metrics["steps"] == 40 - metrics["accepted_tokens"]
    assert metrics["steps"] <= 20
    by_position = list(metrics["accepted_by_position"].values())
    assert sum(by_position) == metrics["accepted_tokens"] <= metrics["draft_tokens"]
    assert by_position == sorted(by_position, reverse=True)
    assert metrics["drafted_requests"] <= metrics["steps"] - 1
    assert output.metrics is not None
    names = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
    own = [getattr(output.metrics, name) for name in names]
    assert own == [metrics[name] for name in ("drafted_requests", "draft_tokens", "accepted_tokens")]
    assert output.metrics.mean_acceptance_length == 1 + own[2] / own[0]


@pytest.mark.parametrize("stop", [None, "2"])
def test_a_request_knows_its_drafts(stop: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    """Each of several, whether or not its end is found in its text; and the progress has their mean."""
    params = SamplingParams(temperature=0.01, seed=0, max_tokens=20, ignore_eos=True, stop=stop, n=2)
    plain = SamplingParams(temperature=0, max_tokens=20, disable_spec_decode=True)
    with LLM(mode="eager", **ENGINE | {"progress": True}, **ngram(4)) as llm:
        capfd.readouterr()
        drafted, other = llm.generate([REPETITIVE] * 2, [params, plain])
        shown, metrics = capfd.readouterr().err, llm.metrics()
    assert drafted.metrics is not None
    assert other.metrics is not None
    assert (other.metrics.num_drafts, other.metrics.mean_acceptance_length) == (0, None)
    num_tokens = sum(len(each.token_ids) for each in drafted.outputs)
    assert 0 < drafted.metrics.num_accepted_tokens <= num_tokens - 2
    assert drafted.metrics.num_accepted_tokens <= metrics["accepted_tokens"]
    assert drafted.metrics.num_draft_tokens <= metrics["draft_tokens"]
    assert f"mean acceptance length {drafted.metrics.mean_acceptance_length:.2f}" in shown


@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_an_abort_among_drafts_leaves_no_trace(steps: int, text: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, seed=1, logprobs=1)
    with LLM(async_scheduling=True, **ENGINE, **ngram(4)) as llm:
        ids = [tuple(llm.get_tokenizer().encode(prompt)) for prompt in (REPETITIVE, text[:50], REPETITIVE[3:])]
        expected = llm.generate([{"prompt_token_ids": list(each)} for each in ids], params, use_tqdm=False)
        found: dict[str, list[int]] = {str(number): [] for number in range(len(ids))}
        for name, each in zip(found, ids, strict=True):
            llm.core.add(EngineRequest(name, each, params))
        count = 0
        while llm.core.has_unfinished():
            if count == steps:
                llm.core.abort("0")
            for output in llm.core.step():
                found[output.request_id] += output.new_token_ids
            count += 1
        llm.core.check_integrity()
        for name, output in zip(found, expected, strict=True):
            assert found[name] == list(output.outputs[0].token_ids)[: len(found[name])]
            assert name == "0" or len(found[name]) == 30


def test_a_request_without_a_token_ends_alone() -> None:
    """The next step is under way when it is known that no token may come."""
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(async_scheduling=True, mode="eager", **ENGINE, **ngram(2)) as llm:
        end = llm.get_tokenizer().eos_token_id
        never = SamplingParams(allowed_token_ids=[end], min_tokens=2, max_tokens=5)
        (expected,) = llm.generate([REPETITIVE], plain, use_tqdm=False)
        failed, other = llm.generate([REPETITIVE[:20], REPETITIVE], [never, plain], use_tqdm=False)
        llm.core.check_integrity()
    assert (list(failed.outputs[0].token_ids), failed.outputs[0].finish_reason) == ([], "error")
    assert list(other.outputs[0].token_ids) == list(expected.outputs[0].token_ids)
