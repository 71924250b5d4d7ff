"""The official client of OpenAI against a server with the bundled model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running_server import ENGINE, MODEL, RunningServer, ScriptedEngine, running

from compiled_engine.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

PROMPT = "def add(a, b):\n"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "import os"}]
CONTINUES = {"continue_final_message": True}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> RequestOutput:
    """What the same engine says offline: greedy, with log-probabilities of prompt and completion."""
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=3)
    with LLM(**ENGINE) as llm:
        return llm.generate(PROMPT, params, use_tqdm=False)[0]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_completion(client: openai.OpenAI, expected: RequestOutput) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12, logprobs=3)
    (choice,) = answer.choices
    (want,) = expected.outputs
    assert (choice.text, choice.finish_reason) == (want.text, "length")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx([entry[id].logprob for entry, id in pairs(want)], abs=1e-4)
    assert "".join(choice.logprobs.tokens or ()) == want.text
    assert all(len(top) in (3, 4) for top in choice.logprobs.top_logprobs or ())
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 12


def pairs(completion: Any) -> Any:
    return zip(completion.logprobs, completion.token_ids, strict=True)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, expected: RequestOutput, stream: bool) -> None:
    answer: Any = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12, logprobs=3, echo=True, stream=stream
    )
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    logprobs = [value for choice in choices for value in choice.logprobs.token_logprobs]
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert expected.prompt_logprobs is not None
    of_prompt = zip(expected.prompt_logprobs[1:], expected.prompt_token_ids[1:], strict=True)
    want = [entry[id].logprob for entry, id in (*of_prompt, *pairs(expected.outputs[0])) if entry is not None]
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(want, abs=1e-4)
    text = "".join(choice.text for choice in choices)
    assert text == PROMPT + expected.outputs[0].text == "".join(tokens)
    assert [text[place : place + len(token)] for place, token in zip(offsets, tokens, strict=True)] == tokens


def test_each_completion_begins_with_the_prompt_whichever_comes_first(server: RunningServer) -> None:
    """Only one of them brings the prompt's log-probabilities."""

    def output(of_prompt: list[Any], *indices: int, last: bool = False) -> RequestOutput:
        reason = "length" if last else None
        entries = [{7: Logprob(-1.0, 1, "c")}]
        outputs = [CompletionOutput(index, "c", [7], -1.0, entries, reason, None) for index in indices]
        return RequestOutput("0", "ab", [5, 6], of_prompt, outputs, last, 0, RequestMetrics(0.0))

    engine = ScriptedEngine(server.engine)
    engine.outputs = [output([None], 1), output([], 1), output([{6: Logprob(-2.0, 1, "b")}], 0)]
    engine.outputs += [output([], 0, 1, last=True)]
    with (
        running(engine) as own,
        openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model=MODEL, prompt="ab", n=2, seed=1, max_tokens=3, logprobs=0, echo=True, stream=True
        )
        choices = [choice for part in stream for choice in part.choices]
    for index, text in ((0, "abcc"), (1, "abccc")):
        own_choices = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in own_choices) == text
        logprobs = [
            value for choice in own_choices if choice.logprobs for value in choice.logprobs.token_logprobs or ()
        ]
        assert logprobs == [None, -2.0, *[-1.0] * (len(text) - 2)]


def test_a_prompt_can_be_scored_without_a_completion(client: openai.OpenAI, expected: RequestOutput) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, logprobs=0, echo=True)
    assert answer.choices[0].text == PROMPT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.token_logprobs or ()) == len(expected.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_batches_of_prompts_and_several_completions(client: openai.OpenAI, stream: bool) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    answer: Any = client.completions.create(
        model=MODEL, prompt=prompts, n=2, seed=1, max_tokens=3, stream=stream, extra_body={"return_token_ids": True}
    )
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    ids: dict[int, list[int]] = {}
    for choice in choices:
        ids.setdefault(choice.index, []).extend(choice.token_ids or ())
    assert {index: len(each) for index, each in ids.items()} == {0: 3, 1: 3, 2: 3, 3: 3}
    of_prompts = {
        choice.index // 2: choice.prompt_token_ids for choice in choices if "prompt_token_ids" in choice.model_extra
    }
    assert of_prompts == dict(enumerate(prompts))


def test_tokens_are_streamed_whose_text_is_held_back(client: openai.OpenAI, server: RunningServer) -> None:
    """They are parts of a character."""
    vocabulary = server.engine.tokenizer.hf.get_vocab()
    body = {"return_token_ids": True, "allowed_token_ids": [vocabulary["\u00f0"]], "ignore_eos": True}
    stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, stream=True, extra_body=body)
    parts: list[Any] = [chunk.choices[0] for chunk in stream]
    assert [token for part in parts for token in part.token_ids or ()] == [vocabulary["\u00f0"]] * 5
    assert any(part.token_ids and not part.text for part in parts)


def test_a_chat_is_the_template_with_a_completion(client: openai.OpenAI) -> None:
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nimport os<|im_end|>\n<|im_start|>assistant\n"
    completion = client.completions.create(model=MODEL, prompt=prompt, max_tokens=10, temperature=0)
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=10, temperature=0)
    assert chat.choices[0].message.content == completion.choices[0].text
    assert chat.usage is not None
    assert completion.usage is not None
    assert chat.usage.prompt_tokens == completion.usage.prompt_tokens


def test_many_chats_at_once(server: RunningServer) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def chat(number: int) -> str:
                messages: Any = [{"role": "user", "content": f"x = {number % 4}"}]
                stream = await client.chat.completions.create(
                    model=MODEL, messages=messages, max_tokens=8, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(chat, range(24)))

    texts = asyncio.run(run())
    assert texts == texts[:4] * 6


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": PROMPT, "temperature": -1}, "temperature"),
        ("completions", {"prompt": PROMPT, "response_format": {"type": "xml"}}, "response_format"),
        ("chat/completions", {"messages": MESSAGES, "guided_json": {}}, "guided_json"),
        ("chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template"),
        ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        ("chat/completions", {"messages": MESSAGES, "echo": True}, "echo"),
        (
            "chat/completions",
            {"messages": MESSAGES, **CONTINUES, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ("../tokenize", {"messages": MESSAGES, **CONTINUES, "add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_what_is_refused_is_named(client: openai.OpenAI, path: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(f"/{path}", body={"model": MODEL, **body}, cast_to=object)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param.split("[", maxsplit=1)[0] in caught.value.message


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_no_choice_helps_where_the_template_has_no_place_for_tools(client: openai.OpenAI, choice: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(openai.BadRequestError, match="chat template has no place for them"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=tools, tool_choice=choice)
