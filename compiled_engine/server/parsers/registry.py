"""The parsers by name, and the choice of parsers by a checkpoint's chat template.

A new format is a file with a `TextParser`, a function in call_grammars.py and a row here. One whose calls stand between
marks, and are objects, calls in Python, or names and arguments, is a row of call_marks.py and a row here. One that
writes calls as tags is a row of xml_markup.py and a row here.
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
    """The format in which a family of models writes calls.

    parser: makes a parser, given the schemas of arguments of the request's tools, by the tools' names. grammar: its
    calls as a grammar. marks: rows of texts; a chat template for this format contains all of one row. markup: texts
    that may be special tokens. call_id_length: of the ids that the family's templates accept; None for any.
    reasoning: the format of reasoning whose parser reads these calls too, as they are no part of the answer's text.
    """

    parser: Callable[[Mapping[str, Mapping[str, Any]]], TextParser]
    grammar: CallGrammar
    marks: tuple[tuple[str, ...], ...]
    markup: tuple[str, ...]
    call_id_length: int | None = None
    reasoning: str | None = None

    def call_id(self) -> str:
        """A new id for a call."""
        if self.call_id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(self.call_id_length))


def _tags(markup: XmlMarkup, *marks: str) -> ToolFormat:
    """Calls as tags."""
    return ToolFormat(partial(XmlParser, markup), partial(xml_calls, markup), (marks,), markup.tags)


def _objects(marks: CallMarks, *rows: tuple[str, ...], on_lines: bool = False) -> ToolFormat:
    """Calls that are objects. Names are looked at where any answer may begin with a list."""
    begin, after, between = (line_of_object, "}\n", "\n") if on_lines else (object_begin, "}", ", ")
    return ToolFormat(
        lambda names: MarkedCalls(marks, lambda: CallObject(frozenset(names) if marks.bare else None)),
        MarkedGrammar(marks, begin, after, between),
        rows,
        marks.texts,
    )


def _python(marks: CallMarks, *rows: tuple[str, ...]) -> ToolFormat:
    """Calls in Python."""
    return ToolFormat(
        lambda names: MarkedCalls(marks, lambda: PythonCall(frozenset(names))),
        MarkedGrammar(marks, python_begin, ")", "\n" if marks.calls == "lines" else ", "),
        rows,
        marks.texts,
    )


def _gemma(marks: CallMarks, quote: str) -> ToolFormat:
    """Calls with arguments in Gemma's form."""
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
    """The format in which a family of models reasons.

    parser: makes the parser of what follows a prompt, given the prompt, the message that the answer continues, and the
    names of tools whose calls it reads too; None if no reasoning can follow. grammar: its reasoning as a grammar.
    marks, markup: as those of `ToolFormat`. ends: special tokens that end an answer, also where the checkpoint's
    generation_config.json does not name them. closing: the tag that ends reasoning whose tokens may have a bound.
    """

    parser: Callable[[str, str | None, Collection[str] | None], TextParser | None]
    grammar: ReasoningGrammar
    marks: tuple[tuple[str, ...], ...]
    markup: tuple[str, ...]
    ends: tuple[str, ...] = ()
    closing: str | None = None


def _think(tags: ReasoningTags, *marks: str) -> ReasoningFormat:
    """Reasoning between tags. marks: of a template; without any, all texts of the tags."""
    return ReasoningFormat(
        lambda prompt, continued, names: think_parser(tags, prompt, continued),
        partial(think_rules, tags),
        (marks or tags.texts,),
        tags.texts,
        closing=tags.closing,
    )


# The first whose marks a template has is that of its model.
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
    # A template that searches only for the end of the reasoning belongs to a model with answers that begin with it.
    "deepseek_r1": _think(ReasoningTags(inside=True), ReasoningTags().closing),
}


def tool_format_of(template: str) -> str | None:
    """Return the name of the format that a chat template uses; None if it uses no known format.

    Some formats have their own marks within those of another one, so the longest row decides.
    """
    found = [
        (len("".join(row)), name)
        for name, tools in TOOL_FORMATS.items()
        for row in tools.marks
        if all(mark in template for mark in row)
    ]
    return max(found)[1] if found else None


def reasoning_format_of(template: str) -> str | None:
    """The same for reasoning."""
    for name, reasoning in REASONING_FORMATS.items():
        if any(all(mark in template for mark in row) for row in reasoning.marks):
            return name
    return None


def reasoning_parser(
    name: str, prompt: str, continued: str | None = None, names: Collection[str] | None = None
) -> TextParser | None:
    """A parser for what follows `prompt`; None if the reasoning is closed already. continued: the message that the text
    continues. names: of the tools whose calls it reads too, if the format's parser does."""
    return REASONING_FORMATS[name].parser(prompt, continued, names)
