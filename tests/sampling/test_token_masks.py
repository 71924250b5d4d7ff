"""Token masks: output stays within a grammar, others are not disturbed; a mask that fails ends its request alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fake_runner import VOCAB_SIZE
from simulated_engine import SimulatedEngine
from small_engines import PROMPTS, SMALL
from token_masks import WAYS_TO_FAIL, ByLastToken, OneOf, packed

from compiled_engine.frontend.outputs import CompletionOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.token_mask import ask, num_words

TEXTS = ["yes", "no", "not at all", "never mind that at all"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
RANDOM: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 20, "ignore_eos": True}


class LetThrough:
    """A logits processor that strongly prefers token 0."""

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        return params.extra_args is not None

    def remove_row(self, row: int) -> None: ...

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        logits_RV[:, 0] = 1e30


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def llm(request: pytest.FixtureRequest, one_thread: None) -> Iterator[LLM]:
    with LLM(**SMALL, async_scheduling=request.param, logits_processors=[LetThrough()]) as engine:
        yield engine
        metrics = engine.metrics()
        assert (metrics["running"], metrics["waiting"], metrics["kv_usage"]) == (0, 0, 0)


def one_of(llm: LLM, texts: Sequence[str] = TEXTS) -> OneOf:
    """A mask that allows one of the texts, then the end."""
    tokenizer = llm.get_tokenizer()
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    return OneOf([[*tokenizer.encode(text), end] for text in texts], llm.config.model.vocab_size)


def generate(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[CompletionOutput]:
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, RANDOM | {"top_p": 0.9, "repetition_penalty": 1.2, "n": 3}])
def test_the_output_is_one_of_the_texts_and_others_are_not_disturbed(llm: LLM, sampling: dict[str, Any]) -> None:
    plain = SamplingParams(**sampling)
    alone = [completion.token_ids for completion in generate(llm, PROMPTS, [plain] * 3)]
    mask = one_of(llm)
    masked = SamplingParams(**sampling | {"ignore_eos": False}, token_mask=mask)
    completions = generate(llm, [*PROMPTS, *PROMPTS], [plain, masked, plain, masked, plain, masked])
    n = plain.n
    by_request = [completions[i * n : (i + 1) * n] for i in range(6)]
    in_order = generate(llm, PROMPTS, [plain, masked, plain])
    assert [c.token_ids for c in in_order[:n]] == alone[:n]
    assert [c.token_ids for c in by_request[0]] == alone[:n]
    assert [c.token_ids for c in by_request[2]] == alone[2 * n :]
    assert [c.token_ids for c in by_request[4]] == alone[n : 2 * n]
    for completion in by_request[1] + by_request[3] + by_request[5]:
        assert completion.token_ids in mask.sequences
        assert (completion.text in TEXTS, completion.finish_reason) == (True, "stop")


def test_every_text_comes(llm: LLM) -> None:
    params = SamplingParams(temperature=100.0, seed=0, n=40, token_mask=one_of(llm))
    texts = {completion.text for completion in generate(llm, PROMPTS[:1], [params])}
    assert texts == set(TEXTS)


def test_a_mask_is_asked_for_once_a_token_also_after_a_prompt_in_parts(llm: LLM) -> None:
    mask = one_of(llm)
    prompt = "x = [" + ", ".join(map(str, range(17)))
    assert len(llm.get_tokenizer().encode(prompt)) > SMALL["max_num_batched_tokens"]
    (completion,) = generate(llm, [prompt], [SamplingParams(temperature=0, token_mask=mask)])
    assert completion.text in TEXTS
    assert mask.num_calls == len(completion.token_ids)


def test_no_processor_and_no_bias_lets_a_token_through(llm: LLM) -> None:
    (completion,) = generate(llm, PROMPTS[:1], [SamplingParams(**GREEDY | {"max_tokens": 1}, extra_args={})])
    assert completion.token_ids == [0]
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={1: 1e30}, extra_args={}, token_mask=one_of(llm))
    (completion,) = generate(llm, PROMPTS[:1], [params])
    assert (completion.text in TEXTS, completion.finish_reason) == (True, "stop")


def test_log_probabilities_stay_those_of_the_model(llm: LLM) -> None:
    plain = SamplingParams(**GREEDY | {"max_tokens": 1}, logprobs=3)
    masked = SamplingParams(**GREEDY | {"max_tokens": 1}, logprobs=3, token_mask=one_of(llm))
    entries = [generate(llm, PROMPTS[:1], [params])[0].logprobs for params in (plain, masked)]
    assert entries[0] is not None
    assert entries[1] is not None
    likely, with_chosen = entries[0][0], entries[1][0]
    assert likely.items() <= with_chosen.items()


def test_the_length_and_stop_strings_end_it_as_ever(llm: LLM) -> None:
    mask = one_of(llm, TEXTS[-1:])
    for params, text, reason in [
        (SamplingParams(temperature=0, max_tokens=2, token_mask=mask), None, "length"),
        (SamplingParams(temperature=0, stop="that", token_mask=mask), "never mind ", "stop"),
    ]:
        plain = SamplingParams(**GREEDY)
        completion, other = generate(llm, PROMPTS[:2], [params, plain])
        assert completion.finish_reason == reason
        assert completion.text == text if text else len(completion.token_ids) == 2
        assert other.token_ids == generate(llm, PROMPTS[1:2], [plain])[0].token_ids


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("pipelined", [False, True])
def test_preempted_requests_stay_within_their_grammar(pipelined: bool, one_thread: None) -> None:
    options: dict[str, Any] = SMALL | {"num_blocks": 8, "block_size": 8, "enable_prefix_caching": False}
    with LLM(**options, async_scheduling=pipelined) as llm:
        vocab_size = llm.config.model.vocab_size
        grammar = ByLastToken(vocab_size)
        plain, masked = SamplingParams(**RANDOM), SamplingParams(**RANDOM, token_mask=grammar)
        alone = [generate(llm, [prompt], [plain])[0].token_ids for prompt in PROMPTS]
        alone_masked = [generate(llm, [prompt], [masked])[0].token_ids for prompt in PROMPTS]
        before = llm.metrics()["preemptions"]
        completions = generate(llm, [p for p in PROMPTS for _ in range(2)], [plain, masked] * 3)
        assert llm.metrics()["preemptions"] > before
        assert [c.token_ids for c in completions[::2]] == alone
        assert [c.token_ids for c in completions[1::2]] == alone_masked
    for token_ids in alone_masked:
        assert all(token in grammar.token_ids(token_ids[:i]) for i, token in enumerate(token_ids))


def test_a_request_is_aborted_in_flight(llm: LLM) -> None:
    masked = SamplingParams(**GREEDY, token_mask=ByLastToken(llm.config.model.vocab_size))
    plain = SamplingParams(**GREEDY)
    expected = generate(llm, PROMPTS[:1], [plain])[0].token_ids
    stream, other = llm.stream(PROMPTS[1], masked), llm.stream(PROMPTS[0], plain)
    for _ in range(3):
        next(stream)
        next(other)
    stream.close()  # type: ignore[attr-defined]
    *_, last = other
    assert last.outputs[0].token_ids == expected


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Return the tokens of three requests that run alone, the first and the last with a mask."""
    good = SamplingParams(**RANDOM, token_mask=ByLastToken(llm.config.model.vocab_size))
    params = [good, SamplingParams(**RANDOM), good]
    return [generate(llm, [p], [s])[0].token_ids for p, s in zip(PROMPTS, params, strict=True)]


@pytest.mark.product(one_in=1000, each=("way", "failing_after"))
@pytest.mark.parametrize("way", WAYS_TO_FAIL)
@pytest.mark.parametrize("failing_after", [0, 1, 4])
def test_a_mask_that_fails_ends_its_request_alone(
    llm: LLM, way: str, failing_after: int, alone: list[list[int]]
) -> None:
    vocab_size = llm.config.model.vocab_size
    good = SamplingParams(**RANDOM, token_mask=ByLastToken(vocab_size))
    bad = SamplingParams(**RANDOM, token_mask=ByLastToken(vocab_size, failing_after, way))
    plain, expected = SamplingParams(**RANDOM), alone
    completions = generate(llm, [*PROMPTS, PROMPTS[0]], [good, plain, bad, bad])
    assert [completion.token_ids for completion in completions[:2]] == expected[:2]
    for completion, whole in zip(completions[2:], (expected[2], expected[0]), strict=True):
        assert completion.token_ids == whole[:failing_after]
        assert completion.finish_reason == "error"
        assert str(completion.stop_reason).startswith("token_mask: ByLastToken.allowed ")
        assert f"after {failing_after} output tokens" in str(completion.stop_reason)
    (by_itself,) = generate(llm, PROMPTS[2:], [bad])
    assert (by_itself.token_ids, by_itself.finish_reason) == (expected[2][:failing_after], "error")


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM | {"n": 3}])
def test_on_a_gpu(sampling: dict[str, Any]) -> None:
    """With CUDA graphs and steps launched ahead."""
    with LLM(progress=False, device="cuda", max_model_len=64, num_blocks=64, max_num_seqs=8) as llm:
        mask = one_of(llm)
        masked = SamplingParams(**sampling | {"ignore_eos": False}, token_mask=mask)
        plain = SamplingParams(**sampling)
        completions = generate(llm, [p for p in PROMPTS for _ in range(2)], [masked, plain] * 3)
        for i in range(0, len(completions), 2 * plain.n):
            assert all(c.token_ids in mask.sequences for c in completions[i : i + plain.n])
            assert all(len(c.token_ids) == 20 for c in completions[i + plain.n : i + 2 * plain.n])


class TestScheduling:
    """Two steps in flight: the next one is launched before its masks can be known."""

    def test_a_masked_request_has_a_share_of_every_step(self) -> None:
        engine = SimulatedEngine(steps_in_flight=2)
        engine.add("m", [1, 2], params=SamplingParams(max_tokens=4, token_mask=ByLastToken(VOCAB_SIZE)))
        engine.add("o", [3], params=SamplingParams(max_tokens=6))
        steps = [engine.begin_step()]
        for _ in range(5):
            steps.append(engine.begin_step())
            engine.finish_step()
        shares = [(sorted(step.request_ids), step.samples_late) for step in steps]
        assert shares == [(["m", "o"], True)] * 4 + [(["o"], False)] * 2
        engine.run()

    def test_a_part_of_a_prompt_needs_no_mask(self) -> None:
        engine = SimulatedEngine(budget=2)
        engine.add("m", [1, 2, 3], params=SamplingParams(max_tokens=1, token_mask=ByLastToken(VOCAB_SIZE)))
        assert [engine.begin_step().samples_late, bool(engine.finish_step())] == [False, False]
        assert engine.begin_step().samples_late
        engine.run()

    def test_masks_come_only_when_all_tokens_before_them_are_known(self) -> None:
        engine = SimulatedEngine(steps_in_flight=2)
        engine.add("m", [1], params=SamplingParams(max_tokens=3, token_mask=ByLastToken(VOCAB_SIZE)))
        engine.begin_step()
        step = engine.begin_step()
        with pytest.raises(RuntimeError, match="step 2 samples late, after tokens of a step in flight"):
            engine.scheduler.begin_late(step)
        with pytest.raises(RuntimeError, match="no masks are being made"):
            engine.scheduler.finish_late()
        engine.run()

    def test_the_step_in_which_a_mask_fails_goes_on_without_it(self) -> None:
        engine = SimulatedEngine(steps_in_flight=2)
        record = engine.add("m", [1], params=SamplingParams(token_mask=ByLastToken(VOCAB_SIZE, 1)))
        other = engine.add("o", [3], params=SamplingParams(max_tokens=6))
        engine.begin_step()
        engine.begin_step()
        engine.finish_step()
        engine.begin_step()  # launched before anybody knows
        engine.finish_step()
        assert (record.finish_reason, len(record.token_ids)) == ("error", 1)
        assert str(record.stop_reason).endswith("failed after 1 output tokens: LookupError: injected")
        again = engine.add("m", [1], params=SamplingParams(max_tokens=2))
        engine.finish_step()
        step = engine.begin_step()
        assert (step.removed, [new.request_id for new in step.new]) == (("m",), ["m"])
        engine.run()
        assert (other.finish_reason, again.finish_reason) == ("length", "length")


class TestWhatAMaskMayBe:
    @pytest.mark.parametrize("dtype", [np.int32, np.uint32])
    @pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 4096])
    def test_it_is_copied_and_bits_beyond_the_vocabulary_do_not_count(self, dtype: Any, vocab_size: int) -> None:
        class Last:
            array = packed([vocab_size - 1], vocab_size, garbage=True).view(dtype)

            def allowed(self, output_token_ids: Sequence[int]) -> np.ndarray:
                return self.array

        mask = Last()
        got = ask(mask, [], vocab_size)
        mask.array[:] = 0
        assert (got.dtype, got.shape) == (np.int32, (num_words(vocab_size),))
        assert (got == packed([vocab_size - 1], vocab_size)).all()

    @pytest.mark.parametrize(
        ("way", "message"),
        [
            ("raises", "ByLastToken.allowed failed after 2 output tokens: LookupError: injected"),
            ("allows nothing", "must allow some token, got none after 2 output tokens"),
            ("too long", r"must return int32 or uint32 \[2\], got int32 \[4\] after 2 output tokens"),
            ("wrong type", r"must return int32 or uint32 \[2\], got int64 \[2\] after 2 output tokens"),
            ("no array", r"must return a numpy array, int32 or uint32 \[2\], got list after 2 output tokens"),
        ],
    )
    def test_what_is_refused(self, way: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ask(ByLastToken(40, 2, way), [1, 2], 40)
