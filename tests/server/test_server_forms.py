"""Forms of answers through HTTP: response_format, structured_outputs, and tools that have to be called."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from hostile_grammars import HOSTILE
from random_schemas import is_valid
from running_server import ENGINE, MODEL
from test_tool_calls import TEMPLATE

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.server.app import build_app
from compiled_engine.server.options import ServerOptions

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string", "maxLength": 4}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "wait"}},
]
MESSAGES: Any = [{"role": "user", "content": "1 + 2?"}]
SAMPLING: Any = {"seed": 3, "temperature": 1.0, "max_tokens": 180}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


Ask = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**ENGINE)
    yield engine
    asyncio.run(engine.shutdown())


def asked(engine: AsyncLLM, ask: Ask, tools: str = "hermes", reasoning: str = "none", **options: Any) -> Any:
    """What the client says of a server whose model calls tools and reasons in these formats."""

    async def run() -> Any:
        given = ServerOptions(chat_template=TEMPLATE, tool_call_parser=tools, reasoning_parser=reasoning, **options)
        transport = httpx.ASGITransport(build_app(engine, given, MODEL))
        async with openai.AsyncOpenAI(
            base_url="http://test/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=transport, timeout=60),
        ) as client:
            return await ask(client)

    return asyncio.run(run())


def check_person(text: str | None) -> None:
    assert is_valid(json.loads(text or ""), PERSON), text


def test_response_format_and_structured_outputs(engine: AsyncLLM) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        chat, complete = client.chat.completions.create, client.completions.create
        answer = await chat(model=MODEL, messages=MESSAGES, response_format=SCHEMA, **SAMPLING, n=2)
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            check_person(choice.message.content)
        any_object: Any = {"type": "json_object"}
        answer = await chat(model=MODEL, messages=MESSAGES, response_format=any_object, **SAMPLING)
        (choice,) = answer.choices
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)
        for form, text in [({"choice": ["only this"]}, "only this"), ({"regex": "a{3}"}, "aaa")]:
            answer = await chat(model=MODEL, messages=MESSAGES, extra_body={"structured_outputs": form}, **SAMPLING)
            assert answer.choices[0].message.content == text
            whole = await complete(model=MODEL, prompt="x", extra_body={"structured_outputs": form}, **SAMPLING)
            assert whole.choices[0].text == text
        whole = await complete(model=MODEL, prompt="x", extra_body={"response_format": SCHEMA}, **SAMPLING)
        check_person(whole.choices[0].text)

    asked(engine, ask)


def test_streams_and_the_parsing_helper_of_the_client(engine: AsyncLLM) -> None:
    class Person(pydantic.BaseModel):
        name: Literal["Ann", "Bob"]
        ok: bool

    async def ask(client: openai.AsyncOpenAI) -> None:
        async with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, response_format=Person, **SAMPLING
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        parsed = final.choices[0].message.parsed
        assert parsed is not None
        assert parsed.name in ("Ann", "Bob")
        response = await client.responses.parse(
            model=MODEL, input="hello", text_format=Person, temperature=1.0, max_output_tokens=100
        )
        assert isinstance(response.output_parsed, Person)

    asked(engine, ask)


@pytest.mark.parametrize("tools", ["hermes", "qwen3_coder", "none"])
def test_tools_that_have_to_be_called(engine: AsyncLLM, tools: str) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}

    async def ask(client: openai.AsyncOpenAI) -> None:
        create = client.chat.completions.create
        for choice, sampling in [("required", SAMPLING), (named, SAMPLING), (named, {**SAMPLING, "temperature": 0})]:
            answer = await create(
                model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **sampling
            )
            assert answer.choices[0].finish_reason in ("tool_calls", "length")
            (call,) = answer.choices[0].message.tool_calls or ()
            assert call.type == "function"
            if choice == named or call.function.name == "add":
                assert is_valid(json.loads(call.function.arguments), ADD)
        async with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=named, **SAMPLING
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        (parsed,) = final.choices[0].message.tool_calls or ()
        assert (parsed.function.name, final.choices[0].finish_reason) == ("add", "tool_calls")
        assert is_valid(json.loads(parsed.function.arguments), ADD)
        assert not final.choices[0].message.content
        response = await client.responses.create(
            model=MODEL, input="hello", tools=[{"type": "function", **TOOLS[0]["function"]}],
            tool_choice={"type": "function", "name": "add"}, max_output_tokens=100,
        )  # fmt: skip
        (item,) = response.output
        assert item.type == "function_call"
        assert is_valid(json.loads(item.arguments), ADD)

    asked(engine, ask, tools)


def test_the_form_begins_where_the_reasoning_ends(engine: AsyncLLM) -> None:
    """The model has not learnt to end what it thinks: it does so to the end, unless the prompt has ended it."""

    async def ask(client: openai.AsyncOpenAI) -> None:
        create = client.chat.completions.create
        sampling = {**SAMPLING, "max_tokens": 60}
        answer = await create(model=MODEL, messages=MESSAGES, response_format=SCHEMA, **sampling)
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("length", "")
        assert choice.message.model_extra is not None
        assert choice.message.model_extra["reasoning_content"]
        closed = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = await create(model=MODEL, messages=MESSAGES, response_format=SCHEMA, **SAMPLING, extra_body=closed)
        assert not (answer.choices[0].message.model_extra or {}).get("reasoning_content")
        check_person(answer.choices[0].message.content)

    asked(engine, ask, reasoning="deepseek_r1")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"structured_outputs": {"json": {"type": "strng"}}}, "structured_outputs", "Invalid type: strng"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "must not have 'jsn'; allowed: json"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a"}, "response_format": SCHEMA}, "structured_outputs", "must be absent"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "ignore_eos must be False"),
        ({"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [9]}, None, "no token may come next"),
        (
            {"structured_outputs": {"grammar": 'start: x\nx: x x | "a" | "b" | '}},
            "structured_outputs",
            "Too many|Current",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "must be one of 'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be an object with a schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format",
            "must be a JSON",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
            "Unimplemented keys",
        ),
        ({"guided_json": {}}, "guided_json", "give structured_outputs with json"),
        ({"guided_regex": "a"}, "guided_regex", "give structured_outputs with json"),
        ({"tool_choice": "required"}, "tool_choice", "must not be 'required' where there are no tools"),
        ({"tool_choice": "some", "tools": TOOLS}, "tool_choice", "must be 'auto', 'none', 'required', or a function"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS},
            "tool_choice",
            "must name one",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]},
            r"tools[0].function.parameters",
            "Unimplemented keys",
        ),
    ],
)
def test_what_is_refused(engine: AsyncLLM, body: dict[str, Any], param: str | None, message: str) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, **SAMPLING, extra_body=body)
        assert caught.value.param == param

    asked(engine, ask)


def test_a_hostile_form_stalls_nobody(engine: AsyncLLM) -> None:
    """While they come, others' answers do; each is answered, or is an error of its request."""

    async def ask(client: openai.AsyncOpenAI) -> None:
        async def hostile(form: dict[str, Any]) -> None:
            with contextlib.suppress(openai.BadRequestError):
                await client.completions.create(
                    model=MODEL, prompt="x", max_tokens=8, extra_body={"structured_outputs": form}
                )

        async def plain() -> str:
            answer = await client.completions.create(model=MODEL, prompt="x = ", max_tokens=8, temperature=0)
            return answer.choices[0].text

        expected = await plain()
        attack = asyncio.gather(*map(hostile, HOSTILE.values()))
        answers = [await plain() for _ in range(5)]
        await attack
        assert {*answers, await plain()} == {expected}

    asked(engine, ask)


def test_two_schemas_that_compile_without_end_hold_up_no_other_form(engine: AsyncLLM) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        async def formed(form: dict[str, Any]) -> str:
            answer = await client.completions.create(
                model=MODEL, prompt="x", max_tokens=8, extra_body={"structured_outputs": form}
            )
            return answer.choices[0].text

        ended = []
        schemas = [{"json": {"type": "integer", "multipleOf": number}} for number in (99999989, 99999971)]
        hostile = [asyncio.ensure_future(formed(schema)) for schema in schemas]
        for each in hostile:
            each.add_done_callback(ended.append)
        await asyncio.sleep(0.1)
        for number in range(3):
            assert await formed({"choice": [f"yes {number}"]}) == f"yes {number}"
        assert not ended
        for error in await asyncio.gather(*hostile, return_exceptions=True):
            assert isinstance(error, openai.BadRequestError)
            assert error.param == "structured_outputs"
            assert re.search("(takes|took) more than", str(error))  # its own limit, or that of a request's form

    asked(engine, ask)


def test_the_metrics_show_them(engine: AsyncLLM) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        form = {"structured_outputs": {"choice": ["counted"]}}
        for _ in range(2):
            await client.completions.create(model=MODEL, prompt="x", extra_body=form)
        return (await client.get("http://test/metrics", cast_to=httpx.Response)).text

    text = asked(engine, ask)
    for name in ("requests", "compiles", "cache_hits", "compile_seconds"):
        (value,) = re.findall(rf"^compiled_engine:grammar_{name}_total{{.*}} ([0-9.e-]+)$", text, re.MULTILINE)
        assert float(value) > 0
