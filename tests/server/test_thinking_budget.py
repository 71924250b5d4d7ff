"""A bound on the tokens of reasoning: the closing tag is all that may follow the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher, LLTokenizer
from running_server import RunningServer, ScriptedEngine, error_of, running
from test_call_grammars import ANSWER, LONG_WORK, tool_use
from test_special_markup import CALLS, chat_of

from compiled_engine.features.structured.grammars.text import grammar_text
from compiled_engine.features.structured.grammars.trials import parser_limits
from compiled_engine.sampling.structured_outputs import StructuredOutputs
from compiled_engine.server.chat_format import ChatFormat
from compiled_engine.server.forms import ToolUse, answer_form

CALL = CALLS["hermes"][1]
TEMPLATE = "{% if false %}<think></think>{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}


def form(
    chat: ChatFormat, budget: int, prompt: str = "", use: ToolUse | None = None, asked: dict[str, Any] | None = None
) -> StructuredOutputs | None:
    given = None if asked is None else StructuredOutputs(json=asked, disable_any_whitespace=True)
    return asyncio.run(answer_form(LONG_WORK, chat, prompt, use, given, None, budget))


def allowed(chat: ChatFormat, given: StructuredOutputs | None, text: str) -> bool:
    """Whether the text may be the whole answer."""
    assert given is not None
    backend = LLTokenizer(chat.tokenizer.to_json(), eos_token=[1])
    matcher = LLMatcher(backend, grammar_text(given), log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


def tokens(chat: ChatFormat, text: str) -> int:
    return len(chat.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("kind", ["special", "added"])
@pytest.mark.parametrize("prompt", ["", "<think>\n"])
def test_reasoning_ends_with_its_budget(kind: str, prompt: str) -> None:
    chat = chat_of(kind)
    opening = "" if prompt else "<think>"
    text = "I add 1 and 2."
    count = tokens(chat, text)
    for budget in (count, count + 1, count + 50):
        assert allowed(chat, form(chat, budget, prompt), f"{opening}{text}</think>\n\nThe sum is <b>3</b>.")
    assert not allowed(chat, form(chat, count - 1, prompt), f"{opening}{text}</think>\n\n3")
    assert allowed(chat, form(chat, 0, prompt), f"{opening}</think>\n\n3")
    assert not allowed(chat, form(chat, 0, prompt), f"{opening}a</think>\n\n3")


def test_reasoning_between_other_tags_ends_with_its_budget() -> None:
    chat = chat_of("special", "mistral")
    assert allowed(chat, form(chat, 5), "[THINK]abc[/THINK]\n\nYes.")
    assert not allowed(chat, form(chat, 5), "[THINK]abcdefgh[/THINK]\n\nYes.")
    assert (
        chat_of("added", "mistral").why_unbounded == "the tokenizer has no token for [/THINK], which closes reasoning"
    )


def test_an_answer_that_may_begin_with_reasoning_need_not() -> None:
    chat = chat_of("special")
    assert allowed(chat, form(chat, 3), "No reasoning at all, and more than three tokens.")
    assert form(chat, 3, prompt="<think>\n\n</think>\n\n") is None


def test_the_form_and_the_calls_behind_reasoning_stay() -> None:
    chat = chat_of("added")
    asked = form(chat, 5, asked=ANSWER)
    assert allowed(chat, asked, '<think>abc</think>\n\n{"ok":true}')
    assert not allowed(chat, asked, "<think>abc</think>\n\nyes")
    assert not allowed(chat, asked, '<think>abcdefgh</think>\n\n{"ok":true}')
    may_call = form(chat, 5, use=tool_use(required=False, strict=False))
    assert allowed(chat, may_call, f"<think>abc</think>\n\nI call. {CALL}")
    assert allowed(chat, may_call, "<think>abc</think>\n\nI do not.")
    must_call = form(chat, 5, use=tool_use(required=True))
    assert allowed(chat, must_call, f"<think>abc</think>\n\n{CALL}")
    assert not allowed(chat, must_call, "<think>abc</think>\n\nI do not.")


@pytest.mark.parametrize(("kind", "reasoning"), [("text", "qwen3"), ("special", None), ("special", "openai_gptoss")])
def test_a_budget_needs_reasoning_and_a_token_that_closes_it(kind: str, reasoning: str | None) -> None:
    assert chat_of("special").why_unbounded is None
    assert chat_of("added").why_unbounded is None
    assert chat_of(kind, reasoning).why_unbounded is not None


@pytest.fixture(scope="module")
def lenient(server: RunningServer) -> Iterator[RunningServer]:
    with running(ScriptedEngine(server.engine, ["Hi"]), chat_template=TEMPLATE) as own:
        yield own


@pytest.fixture(scope="module")
def strict(server: RunningServer) -> Iterator[RunningServer]:
    with running(ScriptedEngine(server.engine, ["Hi"]), chat_template=TEMPLATE, strict=True) as own:
        yield own


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asked", [{"thinking_token_budget": 5}, {"thinking_budget": 5}])
def test_a_budget_without_effect_is_named(
    lenient: RunningServer, strict: RunningServer, path: str, asked: dict[str, Any]
) -> None:
    """The bundled tokenizer has no tokens for tags."""
    (name,) = asked
    ignored = httpx.post(f"{lenient.url}{path}", json={**PATHS[path], **asked}, timeout=60)
    assert ignored.status_code == 200
    assert f"{name} is ignored: the tokenizer has no token for </think>" in ignored.headers["x-compiled-engine-warning"]
    refused = httpx.post(f"{strict.url}{path}", json={**PATHS[path], **asked}, timeout=60)
    assert (refused.status_code, error_of(refused)["param"]) == (400, name)


@pytest.mark.parametrize("path", PATHS)
def test_budgets_of_requests(strict: RunningServer, path: str) -> None:
    def post(**asked: Any) -> httpx.Response:
        return httpx.post(f"{strict.url}{path}", json={**PATHS[path], **asked}, timeout=60)

    wrong = error_of(post(thinking_token_budget=-2))
    assert wrong["message"].startswith("thinking_token_budget: expected int >= -1, got -2")
    assert error_of(post(thinking_token_budget=5, thinking_budget=6))["message"].endswith("must be equal, got 5, 6")
    assert post(thinking_token_budget=-1, thinking_budget=None).status_code == 200


def test_a_model_without_reasoning_ignores_a_budget(server: RunningServer) -> None:
    body = {"max_tokens": 2, "thinking_token_budget": 5, **PATHS["/v1/chat/completions"]}
    message = {"max_tokens": 2, "thinking": {"type": "enabled", "budget_tokens": 5}, **PATHS["/v1/chat/completions"]}
    for path, asked in (("/v1/chat/completions", body), ("/v1/messages", message)):
        response = httpx.post(f"{server.url}{path}", json=asked, timeout=60)
        assert response.status_code == 200
        assert "no reasoning of this model is known" in response.headers["x-compiled-engine-warning"]
