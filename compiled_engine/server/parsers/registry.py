"""The parsers by name, and their selection by a checkpoint's chat template.

A new format needs a file with a `TextParser`, a function in call_grammars.py and a row in the tables of this module. No
new file is needed for some formats: calls that are objects, Python calls or names with arguments, each between marks,
need a row in call_marks.py instead, and calls as XML tags need a row in xml_markup.py. The name of each format is also
in the option in server/options.py.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from compiled_engine.server.parsers import deepseek, gemma, harmony, kimi_k2, llama3_json, mistral
from compiled_engine.server.parsers.call_grammars import (
    CallGrammar,
    MarkedGrammar,
    fenced_begin,
    gemma_begin,
    harmony_calls,
    kimi_begin,
    line_of_object,
    llama3_calls,
    mistral_calls,
    object_begin,
    python_begin,
    separated_begin,
)
from compiled_engine.server.parsers.call_marks import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTION_GEMMA,
    GEMMA4,
    GRANITE,
    GRANITE_20B_FC,
    HERMES,
    INTERNLM,
    JAMBA,
    KIMI_K2,
    LFM2,
    LLAMA4_PYTHONIC,
    LONGCAT,
    OLMO3,
    PHI4_MINI,
    PYTHONIC,
    XLAM,
    CallMarks,
)
from compiled_engine.server.parsers.call_object import CallObject
from compiled_engine.server.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from compiled_engine.server.parsers.gemma import GemmaParser
from compiled_engine.server.parsers.harmony import HarmonyParser
from compiled_engine.server.parsers.kimi_k2 import KimiK2Parser
from compiled_engine.server.parsers.llama3_json import Llama3JsonParser
from compiled_engine.server.parsers.marked_calls import MarkedCalls
from compiled_engine.server.parsers.mistral import MistralParser
from compiled_engine.server.parsers.pieces import TextParser
from compiled_engine.server.parsers.python_call import PythonCall
from compiled_engine.server.parsers.reasoning import ReasoningTags, think_parser
from compiled_engine.server.parsers.reasoning_grammars import ReasoningGrammar, harmony_rules, think_rules
from compiled_engine.server.parsers.xml_calls import XmlParser
from compiled_engine.server.parsers.xml_grammar import xml_calls
from compiled_engine.server.parsers.xml_markup import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, XmlMarkup

HARMONY = "openai_gptoss"
HARMONY_MARKS = ((harmony.CHANNEL, harmony.MESSAGE),)
ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """A model family's format of tool calls: parser, grammar, and texts by which it is recognised."""

    # makes a parser, given the argument schemas by tool name
    parser: Callable[[Mapping[str, Mapping[str, Any]]], TextParser]
    grammar: CallGrammar
    marks: tuple[tuple[str, ...], ...]  # A chat template of this format contains all texts of one row.
    markup: tuple[str, ...]  # texts that may be special tokens
    call_id_length: int | None = None  # length of ids that the family's templates accept; None for any
    # the reasoning format whose parser reads these calls too, as they are not in the answer's text
    reasoning: str | None = None

    def call_id(self) -> str:
        """Return a new call id."""
        if self.call_id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(self.call_id_length))


def _tags(markup: XmlMarkup, *marks: str) -> ToolFormat:
    return ToolFormat(partial(XmlParser, markup), partial(xml_calls, markup), (marks,), markup.tags)


def _objects(marks: CallMarks, *rows: tuple[str, ...], on_lines: bool = False) -> ToolFormat:
    """Return a format with calls that are JSON objects. If `marks.bare`, only objects that name a tool are calls.

    rows: texts by which the format is recognised in a chat template, see `ToolFormat.marks`. on_lines: each object is
    on a line of its own.
    """
    begin, after, between = (line_of_object, "}\n", "\n") if on_lines else (object_begin, "}", ", ")
    return ToolFormat(
        lambda names: MarkedCalls(marks, lambda: CallObject(frozenset(names) if marks.bare else None)),
        MarkedGrammar(marks, begin, after, between),
        rows,
        marks.texts,
    )


def _python(marks: CallMarks, *rows: tuple[str, ...]) -> ToolFormat:
    return ToolFormat(
        lambda names: MarkedCalls(marks, lambda: PythonCall(frozenset(names))),
        MarkedGrammar(marks, python_begin, ")", "\n" if marks.calls == "lines" else ", "),
        rows,
        marks.texts,
    )


def _gemma(marks: CallMarks, quote: str) -> ToolFormat:
    grammar = MarkedGrammar(marks, gemma_begin)
    return ToolFormat(lambda names: GemmaParser(marks, quote), grammar, ((marks.opening,),), (*marks.texts, quote))


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _objects(HERMES, (HERMES.opening, "arguments"), on_lines=True),
    "llama3_json": ToolFormat(
        Llama3JsonParser, llama3_calls, (("<|python_tag|>",), ('"parameters":', "ipython")), (llama3_json.TAG,)
    ),
    "mistral": ToolFormat(lambda names: MistralParser(), mistral_calls, (("[TOOL_CALLS]",),), mistral.MARKUP, 9),
    "qwen3_coder": _tags(QWEN3_CODER, "<tool_call>", "<function="),
    "seed_oss": _tags(SEED_OSS, "<seed:tool_call>", "<function="),
    "glm45": _tags(GLM45, "<tool_call>", "<arg_key>", "<arg_value>"),
    "minimax_m2": _tags(MINIMAX_M2, "<minimax:tool_call>", "<invoke name="),
    "kimi_k2": ToolFormat(
        lambda names: KimiK2Parser(), MarkedGrammar(KIMI_K2, kimi_begin), ((KIMI_K2.opening,),), kimi_k2.MARKUP
    ),
    "deepseek_v3": ToolFormat(
        lambda names: DeepSeekV3Parser(),
        MarkedGrammar(DEEPSEEK_V3, fenced_begin, "\n", "\n"),
        ((DEEPSEEK_V3.opening, deepseek.FENCE),),
        deepseek.MARKUP,
    ),
    "deepseek_v31": ToolFormat(
        lambda names: DeepSeekV31Parser(),
        MarkedGrammar(DEEPSEEK_V31, separated_begin),
        ((DEEPSEEK_V31.opening,),),
        deepseek.MARKUP,
    ),
    "gemma4": _gemma(GEMMA4, gemma.QUOTE),
    "functiongemma": _gemma(FUNCTION_GEMMA, gemma.FUNCTION_QUOTE),
    "granite": _objects(GRANITE, (GRANITE.opening,)),
    "granite_20b_fc": _objects(GRANITE_20B_FC, (GRANITE_20B_FC.opening,), on_lines=True),
    "internlm": _objects(INTERNLM, (INTERNLM.lead, INTERNLM.opening), on_lines=True),
    "jamba": _objects(JAMBA, (f"{JAMBA.opening}[",)),
    "longcat": _objects(LONGCAT, (LONGCAT.opening,), on_lines=True),
    "phi4_mini_json": _objects(PHI4_MINI, (f"{PHI4_MINI.opening}[",)),
    "xlam": _objects(XLAM, ("single JSON array", '"arguments"')),
    "lfm2": _python(LFM2, (LFM2.opening,), ("<|tool_list_start|>",)),
    "olmo3": _python(OLMO3, (OLMO3.opening,)),
    "llama4_pythonic": _python(LLAMA4_PYTHONIC, ("<|header_start|>", "[func_name1(")),
    "pythonic": _python(PYTHONIC, ("[func_name1(",)),
    "openai": ToolFormat(HarmonyParser, harmony_calls, HARMONY_MARKS, harmony.MARKUP, reasoning=HARMONY),
}


@dataclass(frozen=True)
class ReasoningFormat:
    """A model family's format of reasoning: parser, grammar, and texts by which it is recognised."""

    # Makes a parser, given the prompt, the message that the answer continues, and the tools whose calls it reads too;
    # returns None if no reasoning can follow.
    parser: Callable[[str, str | None, Collection[str] | None], TextParser | None]
    grammar: ReasoningGrammar
    marks: tuple[tuple[str, ...], ...]  # as in `ToolFormat`
    markup: tuple[str, ...]  # as in `ToolFormat`
    ends: tuple[str, ...] = ()  # special tokens that end an answer even if generation_config.json lacks them
    closing: str | None = None  # the tag after reasoning whose tokens can be bounded


def _think(tags: ReasoningTags, *marks: str) -> ReasoningFormat:
    """Return a format whose reasoning is between tags.

    `marks` are the strings by which the format is recognised in a chat template, by default the texts of the tags.
    """
    return ReasoningFormat(
        lambda prompt, continued, names: think_parser(tags, prompt, continued),
        partial(think_rules, tags),
        (marks or tags.texts,),
        tags.texts,
        closing=tags.closing,
    )


# The first format whose marks a template contains is chosen.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    HARMONY: ReasoningFormat(
        HarmonyParser.behind,
        lambda prompt, continued, literal, budget: harmony_rules(prompt, continued, literal),
        HARMONY_MARKS,
        harmony.MARKUP,
        (harmony.CALL, harmony.RETURN),
    ),
    "kimi_k2": _think(ReasoningTags(until=KIMI_K2.lead)),
    "gemma4": _think(ReasoningTags("<|channel>", "<channel|>", label="thought", until=GEMMA4.opening)),
    "mistral": _think(ReasoningTags("[THINK]", "[/THINK]")),
    "granite": _think(ReasoningTags("Here is my thought process:", "Here is my response:")),
    "seed_oss": _think(ReasoningTags("<seed:think>", "</seed:think>")),
    "hunyuan_a13b": _think(ReasoningTags(around=("<answer>", "</answer>"))),
    "ernie45": _think(ReasoningTags(around=("<response>", "</response>"))),
    "qwen3": _think(ReasoningTags()),
    # A template that only searches for the closing tag belongs to a model whose answers begin with reasoning.
    "deepseek_r1": _think(ReasoningTags(inside=True), ReasoningTags().closing),
}


def tool_format_of(template: str) -> str | None:
    """Return the name of the call format that a chat template uses, or None.

    If the template contains marks of several formats, the longest row of marks decides.
    """
    found = [
        (len("".join(row)), name)
        for name, tools in TOOL_FORMATS.items()
        for row in tools.marks
        if all(mark in template for mark in row)
    ]
    return max(found)[1] if found else None


def reasoning_format_of(template: str) -> str | None:
    """Return the name of the reasoning format that a chat template uses, or None.

    If the template contains marks of several formats, the first one in REASONING_FORMATS is chosen.
    """
    for name, reasoning in REASONING_FORMATS.items():
        if any(all(mark in template for mark in row) for row in reasoning.marks):
            return name
    return None


def reasoning_parser(
    name: str, prompt: str, continued: str | None = None, names: Collection[str] | None = None
) -> TextParser | None:
    """Return the parser for the text after `prompt`, or None if that text is all content, without tags to drop.

    `name` is a key of REASONING_FORMATS. `continued` is the message that the text continues, or None. `names` are the
    tools whose calls the parser reads too, if its format includes calls.
    """
    return REASONING_FORMATS[name].parser(prompt, continued, names)
