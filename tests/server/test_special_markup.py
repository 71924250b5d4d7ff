"""Markup whose tags are tokens of the tokenizer: special ones, added ones that are not special, or plain text."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer
from test_call_grammars import ANSWER, LONG_WORK, SCHEMAS, form_of, tool_use
from test_call_grammars import CALLS as LOOK_UPS
from tiny_tokenizers import byte_level, wrap
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from compiled_engine.frontend.detokenizer import Detokenizer
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.grammars.trials import parser_limits
from compiled_engine.server.chat_format import ChatFormat, SpecialTokenGuard
from compiled_engine.server.parsers.answer import joined
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from compiled_engine.server.parsers.registry import TOOL_FORMATS

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
KINDS = ("special", "added", "text")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":7,"b":"x"}}\n</tool_call>'
PIECES: list[Piece] = [Reasoning("I add."), CallStart(0, "add"), CallArguments(0, '{"a":7,"b":"x"}')]


def tokenizer_of(kind: str, tags: tuple[str, ...] = TAGS) -> Tokenizer:
    backend = Backend.from_str(byte_level().to_json())
    if kind != "text":
        backend.add_tokens([AddedToken(tag, special=kind == "special", normalized=False) for tag in tags])
    return wrap(backend)


def chat_of(kind: str, reasoning: str | None = "qwen3") -> ChatFormat:
    tokenizer = tokenizer_of(kind)
    guard = SpecialTokenGuard(tokenizer)
    template = "{{ messages[0].content }}<think></think><tool_call>arguments"
    return ChatFormat(tokenizer, template, None, TOOL_FORMATS["hermes"], reasoning, guard, LONG_WORK, (), {})


def accepts(chat: ChatFormat, grammar: str, text: str) -> bool:
    """Whether the grammar lets these tokens through, and the text may end."""
    backend = LLTokenizer(chat.tokenizer.to_json(), eos_token=[1])
    matcher = LLMatcher(backend, grammar, log_level=0, limits=parser_limits())
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_are_demanded_can_be_written(kind: str) -> None:
    chat = chat_of(kind, None)
    grammar = form_of(chat, tool_use(required=True, several=True))
    assert accepts(chat, grammar, CALL)
    assert accepts(chat, grammar, f"{CALL}\n{CALL}")
    assert not accepts(chat, grammar, CALL.replace("7", '"7"'))
    assert not accepts(chat, grammar, "Hello")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_reasoning_before_json_can_be_closed(kind: str, reasoning: str) -> None:
    chat = chat_of(kind, reasoning)
    grammar = form_of(chat, None, asked=ANSWER, prompt="<think>\n" if reasoning == "deepseek_r1" else "")
    opening = "" if reasoning == "deepseek_r1" else "<think>"
    for text in ("so {be} it\n", " ", "x" * 50):
        assert accepts(chat, grammar, opening + text + '</think>\n\n{"ok":true}')
    assert not accepts(chat, grammar, opening + "so</think>not json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_answers_are_parsed_whichever_tokens_their_markup_is(kind: str, size: int) -> None:
    """Streamed tokens, and texts cut after each number of characters."""
    chat = chat_of(kind)
    text = f"<think>\nI add.\n</think>\n\n{CALL}"
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    skip = not chat.has_special_markup(with_tools=True)
    detokenizer = Detokenizer(chat.tokenizer, skip_special_tokens=skip)
    parser = chat.parser("", list(SCHEMAS), one_call=False)
    pieces: list[Piece] = []
    for place in range(0, len(ids), size):
        pieces += parser.push(detokenizer.push(ids[place : place + size]))
    pieces += parser.push(detokenizer.flush()) + parser.finish()
    assert joined(pieces) == PIECES
    parser = chat.parser("", list(SCHEMAS), one_call=False)
    pieces = [piece for place in range(0, len(text), size) for piece in parser.push(text[place : place + size])]
    assert joined(pieces + parser.finish()) == PIECES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v3", "gemma4", "granite", "internlm", "lfm2"])
def test_calls_between_marks_can_be_demanded_and_are_read(name: str, kind: str) -> None:
    tools = TOOL_FORMATS[name]
    tokenizer = tokenizer_of(kind, tools.markup)
    guard = SpecialTokenGuard(tokenizer)
    chat = ChatFormat(tokenizer, "", None, tools, None, guard, LONG_WORK, (), {})
    assert accepts(chat, form_of(chat, tool_use(required=True)), LOOK_UPS[name])
    assert not accepts(chat, form_of(chat, tool_use(required=True)), LOOK_UPS[name].replace("{}", '{"a": 1}'))
    ids = tokenizer.encode(f"So.{LOOK_UPS[name]}", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=not chat.has_special_markup(with_tools=True))
    parser = chat.parser("", list(SCHEMAS), one_call=False)
    pieces = [piece for token in ids for piece in parser.push(detokenizer.push([token]))]
    pieces = joined(pieces + parser.push(detokenizer.flush()) + parser.finish())
    assert [type(piece) for piece in pieces] == [Content, CallStart, CallArguments]
    call_id = "functions.look-up:0" if name == "kimi_k2" else None
    assert pieces[1:] == [CallStart(0, "look-up", call_id), CallArguments(0, "{}")]


def test_the_tokenizer_decides_which_texts_keep_special_tokens() -> None:
    assert chat_of("special").has_special_markup(with_tools=False)
    assert chat_of("special", None).has_special_markup(with_tools=True)
    assert not chat_of("special", None).has_special_markup(with_tools=False)
    assert not chat_of("added").has_special_markup(with_tools=True)
    assert not chat_of("text").has_special_markup(with_tools=True)
