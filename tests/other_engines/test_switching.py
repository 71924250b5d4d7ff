"""People who come from vLLM or nano-vllm: what their scripts call works, and docs/switching.md says what differs."""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from folders import REPOSITORY

from compiled_engine import (  # type: ignore[attr-defined]
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    TextPrompt,
    TokensPrompt,
)
from compiled_engine.frontend.outputs import Logprob
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.methods import ARGUMENTS, MISSING
from compiled_engine.other_engines.translate import make_options
from compiled_engine.sampling.params import SamplingParams

DOCUMENT = REPOSITORY / "docs" / "switching.md"
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def llm(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Made as scripts for vLLM make it."""
    folder = tmp_path_factory.mktemp("traces")
    with LLM(
        enforce_eager=True,
        tensor_parallel_size=1,
        trust_remote_code=False,
        enable_chunked_prefill=True,
        dtype="float",
        disable_log_stats=True,
        device="cpu",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=64,
        profiler_config={"profiler": "torch", "torch_profiler_dir": str(folder)},
        progress=False,
    ) as engine:
        yield engine


def test_the_keywords_took_effect(llm: LLM) -> None:
    assert (llm.config.compile.enabled, llm.config.cache.num_blocks) == (False, 64)
    assert str(llm.config.model.dtype) == "torch.float32"


@pytest.mark.parametrize("habit", [{"trust_remote_code": True}, {"enable_chunked_prefill": False}], ids=str)
def test_keywords_that_most_scripts_have_are_accepted_with_a_warning(habit: dict[str, bool]) -> None:
    """They ask for what is never done."""
    with pytest.warns(UserWarning, match="without effect"):
        assert make_options(habit) == EngineOptions()


def test_a_keyword_about_reasoning_says_who_parses_it() -> None:
    with pytest.warns(UserWarning, match=r"reasoning_config \(the server parses reasoning, see --reasoning-parser\)"):
        assert make_options({"reasoning_config": {"reasoning_start_str": "<think>"}}) == EngineOptions()


def test_habits_of_scripts(llm: LLM) -> None:
    """Flags for numbers, a priority that has no effect, and log-probabilities without text."""
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=True, prompt_logprobs=True, detokenize=False)
    with pytest.warns(UserWarning, match="priority has no effect"):
        (output,) = llm.generate(PROMPT, params, priority=1)
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert {len(entry) for entry in entries} <= {1, 2}
    assert {each.decoded_token for entry in entries for each in entry.values()} == {None}


def test_log_probabilities_are_made_by_scripts_too() -> None:
    """For tests of their own."""
    assert (Logprob(-0.1).rank, Logprob(-0.1).decoded_token) == (None, None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("structured_outputs_config", {"disable_additional_properties": True}, "give it to SamplingParams"),
        ("vllm_config", object(), "give its fields as keywords"),
    ],
)
def test_what_would_change_an_answer_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**{name: value}, progress=False)


def test_generate_as_scripts_call_it(llm: LLM) -> None:
    prompts = [PROMPT, {"prompt": PROMPT, "prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [5, 6, 7]}]
    outputs = llm.generate(prompts, [GREEDY] * 3, use_tqdm=False)
    assert [output.prompt for output in outputs] == [PROMPT, PROMPT, None]
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert outputs[1].outputs == outputs[2].outputs
    assert all(output.outputs[0].finished() for output in outputs)
    assert llm.generate([], GREEDY) == []
    assert llm.generate(PROMPT, GREEDY, False, priority=0)[0].outputs == outputs[0].outputs


def test_chat_as_scripts_call_it(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    conversation.append({"role": "user", "content": "write a loop"})
    (one,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    many = llm.chat([conversation] * 3, GREEDY, False, priority=[0, 0, 0])
    assert [output.outputs for output in many] == [one.outputs] * 3
    template = "{{ messages[0]['content'] }}"
    assert llm.chat(conversation, GREEDY, chat_template=template)[0].prompt == "hello"


def test_a_stream_is_not_finished_until_its_end(llm: LLM) -> None:
    assert [output.outputs[0].finished() for output in llm.stream(PROMPT, GREEDY)] == [False, False, False, True]


def test_times_of_a_request_have_the_names_of_the_field(llm: LLM) -> None:
    for output in llm.generate([PROMPT] * 8, GREEDY):  # more than run at once, so that some wait
        times = output.metrics
        assert times is not None
        assert times.time_in_queue is not None
        assert times.ttft_s is not None
        assert times.first_scheduled_time == times.scheduled_ts == times.arrival_time + times.time_in_queue
        assert times.first_token_time == times.first_token_ts == times.arrival_time + times.ttft_s
        assert times.last_token_time == times.last_token_ts == times.finished_time
        order = [times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts]
        assert order == sorted(order)
        assert (times.first_token_latency, times.num_generation_tokens) == (times.ttft_s, 4)


def test_the_newest_token_has_a_time_while_others_are_to_come(llm: LLM) -> None:
    times = [output.metrics for output in llm.stream(PROMPT, GREEDY)]
    newest = [each.last_token_time for each in times if each is not None and each.last_token_time is not None]
    assert newest == sorted(set(newest))
    assert len(newest) == 4
    assert [each.finished_time is None for each in times if each is not None] == [True, True, True, False]


def test_the_prefix_cache_is_reset(llm: LLM) -> None:
    prompt = [[7] * 100]
    cached = [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, 96]
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_the_prefix_cache_is_reset_while_a_request_runs(llm: LLM) -> None:
    prompt = [9] * 100
    alone = llm.generate(prompt, GREEDY)[0].outputs
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].outputs == alone
    assert list(stream)[-1].outputs == alone
    assert llm.metrics()["kv_usage"] == 0


def test_metrics_are_a_list_of_names_and_values(llm: LLM) -> None:
    def found() -> dict[str, float]:
        return {metric.name.removeprefix("compiled_engine:"): metric.value for metric in llm.get_metrics()}

    before = found()
    llm.generate([PROMPT] * 3, GREEDY)
    after = found()
    assert after["request_success"] - before["request_success"] == 3
    assert after["num_requests_running"] == after["kv_cache_usage_perc"] == 0
    assert after["num_steps"] == llm.metrics()["steps"]
    assert {metric.kind for metric in llm.get_metrics()} == {"gauge", "counter"}


def test_a_profile_names_what_ran(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="no profile is running"):
        llm.stop_profile()
    with pytest.raises(ValueError, match=r"profile_prefix is '\.\./x'; allowed"):
        llm.start_profile("../x")
    llm.start_profile("mine")
    with pytest.raises(RuntimeError, match="a profile is running"):
        llm.start_profile()
    llm.generate(PROMPT, GREEDY)
    path = llm.stop_profile()
    assert path.name.startswith("mine")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    attention = [event for event in events if event["name"] == "compiled_engine::attention"]
    assert len(attention) == 4 * llm.config.model.num_layers


def test_what_is_missing_says_what_to_do(llm: LLM) -> None:
    for name, advice in MISSING.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; {re.escape(advice)}"):
            getattr(llm, name)
        assert not hasattr(llm, name)


def test_what_scripts_reach_through_the_engine_within_is_the_llm_itself(llm: LLM) -> None:
    assert llm.llm_engine.model_config is llm.config.model
    assert llm.llm_engine.model_config.max_model_len == 256
    assert llm.llm_engine.get_tokenizer().vocab_size == llm.model_config.vocab_size


def test_prompts_have_the_names_of_scripts(llm: LLM) -> None:
    prompts = [TokensPrompt(prompt_token_ids=[5, 6, 7]), TextPrompt(prompt=PROMPT)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs for output in outputs] == [
        each.outputs for each in llm.generate([[5, 6, 7], PROMPT], GREEDY)
    ]


def test_arguments_of_an_engine_are_an_object() -> None:
    """What they do not say has no effect, and what they say is what the keywords say."""
    assert make_options(asdict(EngineArgs())) == EngineOptions()
    assert AsyncEngineArgs is EngineArgs
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt")
    words = ["--model", "org/name", "--max-model-len", "64", "--enforce-eager", "--prompt", "x"]
    args = EngineArgs.from_cli_args(EngineArgs.add_cli_args(parser).parse_args(words))
    assert args.keywords() == {"model": "org/name", "max_model_len": 64, "enforce_eager": True}
    assert make_options(asdict(args)) == EngineOptions(model="org/name", max_model_len=64, mode="eager")
    with pytest.raises(TypeError, match="enforce_eagr"):
        EngineArgs(enforce_eagr=True)


def test_an_async_engine_is_made_from_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(AsyncLLM, "__init__", lambda self, **keywords: made.append(keywords))
    AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="org/name", disable_log_stats=True))
    assert made == [{"model": "org/name", "disable_log_stats": True}]


def test_arguments_of_others_say_what_to_do_unless_they_are_none(llm: LLM) -> None:
    for name, advice in ARGUMENTS.items():
        with pytest.raises(TypeError, match=rf"LLM.generate\(\) has no {name}, which is 3; {re.escape(advice)}"):
            llm.generate([PROMPT], GREEDY, **{name: 3})
        with pytest.raises(TypeError, match=rf"LLM.chat\(\) has no {name}"):
            llm.chat([{"role": "user", "content": "x"}], GREEDY, **{name: 3})
        with pytest.raises(TypeError, match=rf"unexpected keyword argument 'x{name}'"):
            llm.generate([PROMPT], GREEDY, **{name: None, f"x{name}": None})


@pytest.mark.parametrize("value", ["auto", "string"])
def test_a_format_of_contents_that_is_the_case_has_no_effect(llm: LLM, value: str) -> None:
    """vLLM's default is "auto"."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    [output] = llm.chat(messages, GREEDY, chat_template_content_format=value, use_tqdm=False)
    [plain] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert (output.prompt, output.outputs[0].token_ids) == (plain.prompt, plain.outputs[0].token_ids)
    with pytest.raises(TypeError, match=r"which is 'openai'; a content is a string, or parts {'type': 'text', "):
        llm.chat(messages, GREEDY, chat_template_content_format="openai")


def test_a_name_that_nobody_has_is_an_ordinary_error(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"'LLM' object has no attribute 'wings'$"):
        llm.wings  # noqa: B018


def test_no_method_is_said_to_be_missing_that_is_there(llm: LLM) -> None:
    assert [name for name in MISSING if name in dir(llm)] == []


def test_the_example_prints_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = re.findall(r"```python\n(from .*?)```\n\n```text\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[0]
    exec(compile(code, "<example>", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == printed


def test_scripts_run_behind_the_shim(tmp_path: Path, bundled_model_path: Path) -> None:
    (shim,) = re.findall(r"```python\n(import argparse.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len([line for line in shim.splitlines() if line]) <= 15
    (tmp_path / "shim.py").write_text(shim)
    (tmp_path / "theirs.py").write_text(SCRIPT)
    command = [sys.executable, "shim.py", "theirs.py", "--model", str(bundled_model_path), "--max-tokens", "3"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "4 texts"


# The calls that offline examples of both engines make, on the smallest of engines.
SCRIPT = """
import nanovllm
from vllm import LLM, EngineArgs, SamplingParams
from vllm.outputs import RequestOutput
from vllm.utils import FlexibleArgumentParser
from vllm.utils.argparse_utils import FlexibleArgumentParser

small = {"device": "cpu", "enforce_eager": True, "max_num_seqs": 2, "max_num_batched_tokens": 32}

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    group = parser.add_argument_group("engine")
    EngineArgs.add_cli_args(group)
    group.set_defaults(model="org/name")
    parser.add_argument("--max-tokens", type=int)
    arguments = vars(parser.parse_args())
    params = SamplingParams(max_tokens=arguments.pop("max_tokens"), temperature=0.6)
    engine = LLM(**arguments, **small, max_model_len=64)
    (output,) = engine.generate(["import"], params)
    assert isinstance(output, RequestOutput)
    texts = [output.outputs[0].text]
    texts += [output.outputs[0].text for output in engine.chat([{"role": "user", "content": "a"}], params)]
    engine.close()
    nano = nanovllm.LLM(arguments["model"], **small, tensor_parallel_size=1, max_model_len=4096)
    many = nanovllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=2)
    texts += [output["text"] for output in nano.generate(["import", [5, 6]], [params, many], use_tqdm=False)]
    print(len(texts), "texts")
"""
