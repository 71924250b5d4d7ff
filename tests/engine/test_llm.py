from __future__ import annotations

import gc
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from compiled_engine.engine.core import EngineCore
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.token_mask import num_words

PROMPTS = ["def add(a, b):\n", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n", "for i in range("]
SMALL: dict[str, Any] = {
    "mode": "eager",
    "device": "cpu",
    "progress": False,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 64,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(one_thread: None) -> Iterator[LLM]:
    with LLM(**SMALL) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM) -> Iterator[None]:
    yield
    metrics = llm.metrics()
    assert (metrics["running"], metrics["waiting"], metrics["kv_usage"]) == (0, 0, 0)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_greedy_tokens_are_those_of_transformers(llm: LLM, bundled_model_path: Path) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(bundled_model_path, dtype=torch.float32)
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        ids = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
        with torch.inference_mode():
            logits = oracle(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output.outputs[0].token_ids)[:, None])[:, 0]
        # Two tokens may be as good as equal: the chosen one is then the other.
        assert (chosen >= logits.max(dim=1).values - 1e-3).all()


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (9, 2, 7, 4)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(ids) for ids in tokens(outputs)] == [9, 2, 7, 4]
    for prompt, param, ids in zip(PROMPTS, params, tokens(outputs), strict=True):
        assert tokens(llm.generate(prompt, param)) == [ids]


def test_prompts_of_text_and_of_tokens_are_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    from_text = llm.generate(PROMPTS[0], GREEDY)
    assert tokens(llm.generate(ids, GREEDY)) == tokens(from_text)
    assert tokens(llm.generate([{"prompt_token_ids": ids}], GREEDY)) == tokens(from_text)


def test_text_is_the_decode_of_the_tokens(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], GREEDY)
    tokenizer = llm.get_tokenizer()
    assert output.prompt is not None
    whole = tokenizer.decode(output.prompt_token_ids + output.outputs[0].token_ids, skip_special_tokens=True)
    assert output.prompt + output.outputs[0].text == whole


def test_a_stream_ends_with_what_generate_returns(llm: LLM) -> None:
    outputs = list(llm.stream(PROMPTS[0], GREEDY))
    texts = [output.outputs[0].text for output in outputs]
    assert len(outputs) == GREEDY.max_tokens
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert [output.finished for output in outputs] == [False] * 11 + [True]
    assert outputs[-1].outputs == llm.generate(PROMPTS[0], GREEDY)[0].outputs


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    for output in llm.stream(PROMPTS[0], GREEDY):
        assert not output.finished
        break
    assert llm.metrics()["running"] == 0


def test_streams_may_run_at_the_same_time(llm: LLM) -> None:
    first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
    begun = next(first)
    assert not begun.finished
    last_of_second = list(second)[-1]
    last_of_first = list(first)[-1]
    assert tokens([last_of_first, last_of_second]) == tokens(llm.generate(PROMPTS[:2], GREEDY))


def test_logprobs_agree_with_prompt_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
    (output,) = llm.generate(PROMPTS[0], params)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    chosen = [entry[token_id] for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert [len(entry) for entry in completion.logprobs] == [3] * 8
    assert all(entry.rank == 1 for entry in chosen)
    assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))

    both = output.prompt_token_ids + completion.token_ids
    (again,) = llm.generate(both, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert again.prompt_logprobs is not None
    assert again.prompt_logprobs[0] is None
    assert len(again.prompt_logprobs) == len(both)
    found = again.prompt_logprobs[-8:]
    assert [entry[token_id].logprob for token_id, entry in zip(completion.token_ids, found, strict=True) if entry] == (
        pytest.approx([entry.logprob for entry in chosen], abs=1e-3)
    )


def test_prompt_logprobs_are_those_of_the_prompt_alone_and_of_nobody_else(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    # In chunks, several to a step; of one, a chunk holds no more than the last two tokens.
    together = llm.generate([*([*llm.get_tokenizer().encode(text)] * 5 for text in PROMPTS), [7] * 34], params)
    for output in together:
        (alone,) = llm.generate(output.prompt_token_ids, params)
        assert output.prompt_logprobs is not None
        assert alone.prompt_logprobs is not None
        for entry, expected in zip(output.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
            assert entry is not None
            assert expected is not None
            found, wanted = ({i: logprob.logprob for i, logprob in each.items()} for each in (entry, expected))
            assert found == pytest.approx(wanted, abs=1e-3)
    # The same rows, and blocks that the prefix cache has kept.
    again = llm.generate([output.prompt_token_ids for output in together], GREEDY)
    assert [output.prompt_logprobs for output in again] == [None] * len(together)


def test_prompt_logprobs_of_many_tokens_in_one_step() -> None:
    prompts = [[5 + i * k % 97 for i in range(300)] for k in (3, 5)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for num_tokens in (800, 32):
        with LLM(**SMALL | {"max_model_len": 512, "max_num_batched_tokens": num_tokens}) as engine:
            outputs = engine.generate(prompts, params)
        entries = [output.prompt_logprobs[1:] for output in outputs if output.prompt_logprobs is not None]
        found.append([logprob.logprob for each in entries for entry in each if entry for logprob in entry.values()])
    assert len(found[0]) == 2 * 299
    assert found[0] == pytest.approx(found[1], abs=1e-3)


def test_completions_of_a_prompt_are_those_of_their_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    alone = [SamplingParams(seed=7 + index, max_tokens=6, ignore_eos=True) for index in range(3)]
    assert tokens([output]) == tokens(llm.generate([PROMPTS[0]] * 3, alone))


def test_a_stop_string_ends_generation(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    text = whole.outputs[0].text
    stop = text[4:7]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[stop])
    before = llm.metrics()
    (completion,) = llm.generate(PROMPTS[0], params)[0].outputs
    after = llm.metrics()
    assert (after["finished"], after["aborted"]) == (before["finished"] + 1, before["aborted"])
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == whole.outputs[0].token_ids[: len(completion.token_ids)]


def test_generation_ends_at_the_length_of_the_model(llm: LLM) -> None:
    (output,) = llm.generate([5] * 120, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (8, "length")


def test_chat_answers_conversations_in_order(llm: LLM) -> None:
    conversations: list[Any] = [[{"role": "user", "content": text}] for text in ("hello", "world")]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    for output, conversation in zip(outputs, conversations, strict=True):
        rendered = llm.get_tokenizer().apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert output.prompt == rendered
    assert tokens(llm.chat(conversations[1], GREEDY)) == tokens(outputs[1:])
    assert tokens(llm.chat(conversations, GREEDY, False, priority=[0, 0])) == tokens(outputs)


def test_defaults_are_those_of_the_checkpoint(llm: LLM, bundled_model_path: Path) -> None:
    stated = json.loads((bundled_model_path / "generation_config.json").read_text())
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p) == (stated["temperature"], stated["top_p"])
    (output,) = llm.generate(PROMPTS[0])
    assert 1 <= len(output.outputs[0].token_ids) <= 16


BAD_INPUT: list[tuple[Any, Any, type[Exception], str]] = [
    ("", None, ValueError, "prompts must have at least one token, got ''"),
    (["a", [4096]], None, ValueError, r"prompts\[1\]: token 0 must be within the vocabulary, 0 to 4095, got 4096"),
    ([[5] * 128], None, ValueError, r"prompts\[0\] must have at most 127 tokens \(max_model_len 128, less one"),
    (["a", 5], None, TypeError, r"prompts\[1\] must be a string, a list of token ids"),
    (["a", {"text": "a"}], None, ValueError, r"prompts\[1\] has the unknown key 'text'"),
    (["a", "b"], [GREEDY], ValueError, "sampling_params must have one entry for each prompt, got 1 for 2 prompts"),
    ("a", {"temperature": 0}, TypeError, "sampling_params must be SamplingParams or a list of them"),
]


@pytest.mark.parametrize(("prompts", "params", "error", "message"), BAD_INPUT)
def test_bad_input_is_refused_and_the_engine_goes_on(
    llm: LLM, prompts: Any, params: Any, error: type[Exception], message: str
) -> None:
    finished = llm.metrics()["finished"]
    with pytest.raises(error, match=message):
        llm.generate(prompts, params)
    assert llm.metrics()["finished"] == finished
    assert len(tokens(llm.generate("a", GREEDY))[0]) == 12


def test_other_bad_calls_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt must be a single prompt, got 2"):
        llm.stream(["a", "b"], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="prompts must have at least one token"):
        llm.stream("", GREEDY)
    with pytest.raises(ValueError, match=r"messages\[0\]\['role'\] must be one of"):
        llm.chat([{"role": "usr", "content": "a"}], GREEDY)
    assert len(tokens(llm.generate("a", GREEDY))[0]) == 12


def test_unknown_and_impossible_options() -> None:
    with pytest.raises(TypeError, match="LLM has no option 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(max_num_seq=3)
    with pytest.raises(ValueError, match="mode is 'fast'; allowed: auto, eager, compiled, graphed"):
        LLM(mode="fast")
    with pytest.raises(FileNotFoundError, match="tokenizer must be a folder, and there is none at 'nowhere'"):
        LLM(tokenizer="nowhere", **SMALL)
    with pytest.raises(TypeError, match="tokenizer is 3; allowed: the path of a folder, org/name of the"):
        LLM(tokenizer=3, **SMALL)


def test_without_a_tokenizer_token_ids_run_and_there_is_no_text() -> None:
    with LLM(skip_tokenizer_init=True, **SMALL) as engine:
        (output,) = engine.generate([[5, 6, 7]], GREEDY)
        assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (12, "")
        with pytest.raises(ValueError, match="prompts must be token ids, as there is no tokenizer"):
            engine.generate("a", GREEDY)
    with pytest.raises(TypeError, match="skip_tokenizer_init is 1; allowed: True or False"):
        LLM(skip_tokenizer_init=1, **SMALL)
    with pytest.raises(TypeError, match="profile_dir is 1; allowed: the path of a folder"):
        LLM(profile_dir=1, **SMALL)


def test_a_closed_engine_says_so() -> None:
    with LLM(load_format="dummy", **SMALL) as engine:
        begun, unbegun = engine.stream("a", GREEDY), engine.stream("a", GREEDY)
        assert not next(begun).finished
    engine.close()
    calls: list[Callable[[], Any]] = [
        engine.metrics,
        engine.get_metrics,
        engine.reset_prefix_cache,
        engine.start_profile,
        engine.stop_profile,
        lambda: engine.generate("a"),
        lambda: engine.stream("a"),
        lambda: engine.chat([{"role": "user", "content": "a"}]),
        lambda: next(begun),
        lambda: next(unbegun),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
            call()
    assert engine.config.model.max_model_len == 128


def test_a_checkpoint_without_a_tokenizer_takes_token_ids(tmp_path: Path, bundled_model_path: Path) -> None:
    shutil.copy(bundled_model_path / "config.json", tmp_path)
    with LLM(tmp_path, load_format="dummy", **SMALL) as engine:
        (output,) = engine.generate([5, 6, 7], GREEDY)
        assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (12, "")
        with pytest.raises(ValueError, match="prompts must be token ids, as there is no tokenizer, got 'a'"):
            engine.generate("a", GREEDY)
        with pytest.raises(ValueError, match=r"tokenizer must be given: '.*' has none"):
            engine.get_tokenizer()
    with LLM(tmp_path, tokenizer=bundled_model_path, load_format="dummy", **SMALL) as engine:
        assert engine.generate("a", GREEDY)[0].prompt == "a"


class Calling:
    """A token mask that allows everything, and calls something first."""

    def __init__(self, call: Callable[[], Any]):
        self._call = call

    def allowed(self, output_token_ids: Any) -> np.ndarray:
        self._call()
        return np.full(num_words(4096), -1, np.int32)


def test_a_second_thread_is_refused_and_costs_nothing(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False))
    inside, outside = threading.Event(), threading.Event()
    found: list[list[list[int]]] = []

    def wait() -> None:
        inside.set()
        assert outside.wait(60)

    def first() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, token_mask=Calling(wait))
        found.append(tokens(llm.generate(PROMPTS[:1], params, use_tqdm=False)))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    stream = llm.stream(PROMPTS[1], GREEDY)
    for call in (lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=False), lambda: next(stream), llm.close):
        with pytest.raises(RuntimeError, match="busy with another call; allowed: one call at a time, from one thread"):
            call()
    outside.set()
    thread.join()
    assert found == [expected]


def test_a_token_mask_that_calls_its_engine_ends_its_own_request(llm: LLM) -> None:
    def call() -> None:
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)

    params = [SamplingParams(temperature=0.0, max_tokens=4, token_mask=Calling(call)), GREEDY]
    failed, other = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert "busy with another call" in str(failed.outputs[0].stop_reason)
    assert len(other.outputs[0].token_ids) == 12


def test_warnings_point_at_the_line_of_the_caller(llm: LLM) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: LLM(**SMALL, load_format="dummy", swap_space=4).close(),
        lambda: llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False, priority=1),
        lambda: llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=False, priority=1),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match="effect") as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]


def test_the_fall_back_to_eager_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a C++ compiler; where eager was asked for there is nothing to say."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    why = "compiling on a CPU needs a C++ compiler, and g++ was not found"
    with LLM(**SMALL | {"mode": "auto"}) as llm:
        assert llm.config.reasons["compile.enabled"] == f"mode is eager: {why}"
    assert caplog.messages == [f"mode is eager, which is slower: {why}"]
    caplog.clear()
    LLM(**SMALL | {"mode": "eager"}).close()
    assert caplog.messages == []


def cores() -> int:
    gc.collect()
    return sum(type(found) is EngineCore for found in gc.get_objects())


def test_a_tokenizer_that_fails_beside_the_start_frees_what_stands(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    before = cores()
    with pytest.raises(ValueError, match=r"tokenizer: cannot load .*tokenizer\.json: the field model is missing"):
        LLM(tokenizer=tmp_path, **SMALL)
    assert cores() == before


def test_a_tokenizer_that_was_cut_off_is_an_error_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    monkeypatch.delattr("compiled_engine.llm_parts.start_cores")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged, it is not JSON"):
        LLM(tokenizer=tmp_path, **SMALL)
