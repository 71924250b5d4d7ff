"""gpt-oss's answers: messages in channels, read as reasoning, content and calls wherever the text is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from test_answer_parsers import chunked, content, cuts, parse
from test_call_grammars import ANSWER, Bytes, chat_format, check_calls, drawn, form_of, tokens_of, tool_use

from compiled_engine.features.structured.grammars.trials import parser_limits
from compiled_engine.frontend.outputs import CompletionOutput, Logprob
from compiled_engine.server.logprob_shapes import TextLogprobs
from compiled_engine.server.parsers.answer import AnswerParser, joined
from compiled_engine.server.parsers.harmony import LONGEST_HEADER, MARKUP, HarmonyParser
from compiled_engine.server.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from compiled_engine.server.parsers.registry import reasoning_format_of, tool_format_of

PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>I add.{NEXT}"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
ADD: list[Piece] = [CallStart(0, "add"), CallArguments(0, '{"a": 1}')]
NAMES = ["add", "look-up", "add all"]


def parser(names: list[str] | None = NAMES, prompt: str = PROMPT, continued: str | None = None) -> HarmonyParser:
    return HarmonyParser.behind(prompt, continued, names)


SAMPLES: dict[str, tuple[str, list[Piece]]] = {
    "an answer": (f"{THOUGHT}{FINAL}Hello!<|return|>", [Reasoning("I add."), Content("Hello!")]),
    "no reasoning": (f"{FINAL}Hello!", [Content("Hello!")]),
    "a call": (THOUGHT + CALL, [Reasoning("I add."), *ADD]),
    "its recipient before the channel": (
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        ADD,
    ),
    "that of a later message": (
        THOUGHT + ' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}',
        [Reasoning("I add."), *ADD],
    ),
    "a call without a type": ('<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>', ADD),
    "a call in the channel of reasoning": ('<|channel|>analysis to=functions.add json<|message|>{"a": 1}', ADD),
    "a call of a tool without its namespace": ('<|channel|>commentary to=add json<|message|>{"a": 1}', ADD),
    "a call of a name with a space": (
        "<|channel|>commentary to=functions.add all json<|message|>{}",
        [CallStart(0, "add all"), CallArguments(0, "{}")],
    ),
    "a call of another function": (
        "<|channel|>commentary to=functions.adder <|constrain|>json<|message|>{}<|call|>",
        [CallStart(0, "adder"), CallArguments(0, "{}")],
    ),
    "a call without arguments": (
        "<|channel|>commentary to=functions.look-up<|message|>\n<|call|>",
        [CallStart(0, "look-up"), CallArguments(0, "{}")],
    ),
    "calls in a row": (
        f"{CALL}<|start|>assistant{CALL}",
        [*ADD, CallStart(1, "add"), CallArguments(1, '{"a": 1}')],
    ),
    "a result that the model made up": (
        f"{CALL}<|start|>functions.add to=assistant<|channel|>commentary<|message|>2{NEXT}{FINAL}It is 2.",
        [*ADD, Reasoning("2"), Content("It is 2.")],
    ),
    "a turn of the user's that the model made up": (
        f"{FINAL}Hi<|end|><|start|>user<|message|>And?",
        [Content("Hi"), Reasoning("And?")],
    ),
    "text before a call": (
        f"{THOUGHT}<|channel|>commentary<|message|>I will add.{NEXT}{CALL}",
        [Reasoning("I add."), Content("I will add."), *ADD],
    ),
    "text before the answer": (
        f"<|channel|>commentary<|message|>A plan.{NEXT}{FINAL}Done.",
        [Content("A plan.\nDone.")],
    ),
    "reasoning in parts": (
        f"{THOUGHT}<|channel|>analysis<|message|>And again.{NEXT}{FINAL}Yes",
        [Reasoning("I add.\nAnd again."), Content("Yes")],
    ),
    "reasoning without end": ("<|channel|>analysis<|message|>Hm, <hm> <|", [Reasoning("Hm, <hm> <|")]),
    "a message for another tool": (
        f"<|channel|>analysis to=python code<|message|>1 + 1<|call|><|start|>assistant{FINAL}2",
        [Reasoning("1 + 1"), Content("2")],
    ),
    "an unknown channel": ("<|channel|>aside<|message|>By the way", [Content("By the way")]),
    "no channel": ("<|message|>Hello", [Content("Hello")]),
    "no header": ("Hello <|x|> there", [Content("Hello <|x|> there")]),
    "text that looks like a recipient": ("to=be or not", [Content("to=be or not")]),
    "no end before the next message": (
        f"<|channel|>analysis<|message|>Hm<|start|>assistant{FINAL}Yes",
        [Reasoning("Hm"), Content("Yes")],
    ),
    "no start of the next message": (
        f"<|channel|>analysis<|message|>Hm{FINAL}Yes",
        [Reasoning("Hm"), Content("Yes")],
    ),
    "two starts": (f"<|start|>assistant<|start|>assistant{FINAL}Yes", [Content("Yes")]),
    "two channels": (f"<|channel|>analysis{FINAL}Yes", [Content("Yes")]),
    "markers within a message": (f"{FINAL}a<|message|>b<|constrain|>c", [Content("abc")]),
    "whitespace between messages": (f"{FINAL}a<|end|>\n ", [Content("a")]),
    "nothing": (f"{THOUGHT}{FINAL}<|return|>", [Reasoning("I add.")]),
    **{
        f"a header that is cut off: {header}": (THOUGHT + header, [Reasoning("I add.")])
        for header in ("", "<|chan", "<|channel|>", "<|channel|>fin", "<|channel|>commentary to=functions.ad", " to=f")
        if header != "<|chan"
    },
}


@pytest.mark.parametrize("name", SAMPLES)
def test_messages_are_read_wherever_they_are_cut(name: str) -> None:
    text, expected = SAMPLES[name]
    assert parse(parser(), text) == expected
    assert parse(parser(), *text) == expected
    for place in range(len(text)):
        assert parse(parser(), text[:place], text[place:]) == expected


FRAGMENTS = [
    *MARKUP,
    *("assistant", "analysis", "final", "commentary", " to=functions.add", " to=", "functions.", "user", " json", "<|"),
    *('{"a": 1}', "text", " ", "\n", "<", "|>", "é", "<|mess", "t", "to", "x" * LONGEST_HEADER),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(text=texts, places=cuts, with_tools=st.booleans(), prompt=st.sampled_from([PROMPT, "", PROMPT + FINAL]))
def test_pieces_do_not_depend_on_the_chunks(text: str, places: list[int], with_tools: bool, prompt: str) -> None:
    names = NAMES if with_tools else None
    whole = parse(parser(names, prompt), text)
    assert parse(parser(names, prompt), *chunked(text, places)) == whole
    assert parse(parser(names, prompt), *text) == whole
    assert not any(marker in content(whole) for marker in MARKUP)
    starts = [piece for piece in whole if isinstance(piece, CallStart)]
    assert [piece.index for piece in starts] == list(range(len(starts)))
    assert with_tools or not starts


@pytest.mark.parametrize("size", [1, 3, 100])
def test_log_probabilities_are_those_of_the_content(size: int) -> None:
    """The line break that the parser puts between two texts is no token's."""
    tokens = ["<|channel|>", "commentary", "<|message|>", "A_pl", "an.", "<|end|>", "<|start|>", "assistant"]
    tokens += ["<|channel|>", "analysis", "<|message|>", "an", "<|end|>", "<|start|>", "assistant"]
    tokens += ["<|channel|>", "final", "<|message|>", "Do", "ne.", "\n"]
    logprobs = TextLogprobs(AnswerParser(parser(), None), 0, None)
    found = []
    for place in range(0, len(tokens), size):
        part = tokens[place : place + size]
        entries = [{7: Logprob(-1.0, 1, token)} for token in part]
        reason = "stop" if place + size >= len(tokens) else None
        found += logprobs.push(CompletionOutput(0, "".join(part), [7] * len(part), None, entries, reason, None))
    assert [entry.token for entry in found] == ["A_pl", "an.", "Do", "ne.", "\n"]


def test_without_tools_a_call_is_reasoning() -> None:
    assert parse(parser(None), THOUGHT + CALL) == [Reasoning('I add.\n{"a": 1}')]


def test_a_long_header_is_content_and_no_more_is_held() -> None:
    text = "<|channel|>final and so on" + " and so on" * 100
    reader = parser()
    pieces = [piece for character in text for piece in reader.push(character)]
    assert content(joined(pieces)) == text.removeprefix("<|channel|>")
    assert parse(parser(), "<|channel|>" * 1000) == []


@pytest.mark.parametrize(
    ("prompt", "continued", "text", "expected"),
    [
        (PROMPT + FINAL, None, "Hi", [Content("Hi")]),
        (PROMPT + "<|channel|>analysis<|message|>", None, f"Hm{NEXT}{FINAL}Hi", [Reasoning("Hm"), Content("Hi")]),
        (PROMPT + FINAL + "So <|start|>x", "So <|start|>x", " it is", [Content(" it is")]),
        (PROMPT + FINAL + "So", "So", f" it is{NEXT}{CALL}", [Content(" it is"), *ADD]),
        ("<|start|>user<|message|>hi<|end|>", None, f"<|start|>assistant{FINAL}Hi", [Content("Hi")]),
        (PROMPT + ' to=functions.add<|channel|>commentary json<|message|>{"a"', None, ": 1}", [Reasoning(": 1}")]),
    ],
)
def test_the_prompt_may_begin_the_message(prompt: str, continued: str | None, text: str, expected: list[Piece]) -> None:
    assert parse(parser(prompt=prompt, continued=continued), *text) == expected


def test_its_template_is_known() -> None:
    template = "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}</think>"
    assert (tool_format_of(template), reasoning_format_of(template)) == ("openai", "openai_gptoss")


def accepts(grammar: str, text: str, special: bool) -> bool:
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes())), grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(tokens_of(text, special)) and matcher.is_accepting())


@pytest.mark.parametrize("special", [False, True])
def test_a_form_is_that_of_the_final_message(special: bool) -> None:
    chat: Any = chat_format("openai", special)
    answer = form_of(chat, None, ANSWER, PROMPT)
    for before in ("", THOUGHT, THOUGHT * 2, f"<|channel|>analysis<|message|>{NEXT}"):
        assert accepts(answer, f'{before}{FINAL}{{"ok":true}}', special)
        assert not accepts(answer, f"{before}{FINAL}yes", special)
    assert not accepts(answer, THOUGHT, special)
    assert not accepts(answer, '{"ok":true}', special)
    within = form_of(chat, None, ANSWER, PROMPT + "<|channel|>analysis<|message|>")
    assert accepts(within, f'Hm{NEXT}{THOUGHT}{FINAL}{{"ok":true}}', special)
    continued = form_of(chat, None, ANSWER, PROMPT + FINAL + "So: ", "So: ")
    assert accepts(continued, '{"ok":true}', special)


@pytest.mark.parametrize("special", [False, True])
def test_a_call_that_is_demanded_follows_reasoning(special: bool) -> None:
    chat: Any = chat_format("openai", special)
    call = '{}<|message|>{{"a": 1, "b": "x"}}'
    headers = [
        "<|channel|>commentary to=functions.add <|constrain|>json",
        "<|channel|>commentary to=functions.add json",
        " to=functions.add<|channel|>commentary <|constrain|>json",
        " to=functions.add<|channel|>commentary json",
    ]
    grammar = form_of(chat, tool_use(required=True, names=("add",)), None, PROMPT)
    for header in headers:
        for before in ("", THOUGHT):
            text = before + call.format(header)
            assert accepts(grammar, text, special), text
            check_calls(chat, text, at_least=1, prompt=PROMPT)
            assert not accepts(grammar, text.replace("1", '"1"'), special)
    assert not accepts(grammar, f"{FINAL}No", special)
    continued = form_of(chat, tool_use(required=True, names=("add",)), None, PROMPT + FINAL + "So", "So")
    assert accepts(continued, NEXT + call.format(headers[0]), special)
    assert not accepts(continued, call.format(headers[0]), special)


@pytest.mark.parametrize("special", [False, True])
def test_strict_calls_may_follow_text(special: bool) -> None:
    chat: Any = chat_format("openai", special)
    call = f'{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 1, "b": "x"}}'
    preamble = f"<|channel|>commentary<|message|>I will add.{NEXT}"
    grammar = form_of(chat, tool_use(required=False), None, PROMPT)
    for text in (call, f"{THOUGHT}{preamble}{call}", f"{preamble}{FINAL}Done", f"{THOUGHT}{FINAL}No, <b>not</b>"):
        assert accepts(grammar, text, special), text
    assert not accepts(grammar, call.replace("1", '"1"'), special)
    continued = form_of(chat, tool_use(required=False), None, PROMPT + FINAL + "So", "So")
    for text in (" it is.", f" I add.{NEXT}{call}") if special else (" it is.",):
        assert accepts(continued, text, special), text
    assert not accepts(continued, f" I add.{NEXT}{call}".replace("1", '"1"'), special)
    for seed in range(20):
        if (drawn_text := drawn(grammar, seed)) is not None:
            check_calls(chat, drawn_text, at_least=0, prompt=PROMPT)
