"""The parsers by name, and the choice of parsers by a checkpoint's chat template.

A new format is a file with a `TextParser`, a function in call_grammars.py and a row here.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from compiled_engine.server.parsers import harmony, hermes, llama3_json, mistral
from compiled_engine.server.parsers.call_grammars import (
    CallGrammar,
    harmony_calls,
    hermes_calls,
    llama3_calls,
    mistral_calls,
)
from compiled_engine.server.parsers.harmony import HarmonyParser
from compiled_engine.server.parsers.hermes import HermesParser
from compiled_engine.server.parsers.llama3_json import Llama3JsonParser
from compiled_engine.server.parsers.mistral import MistralParser
from compiled_engine.server.parsers.pieces import TextParser
from compiled_engine.server.parsers.reasoning import CLOSING, OPENING, think_parser
from compiled_engine.server.parsers.reasoning_grammars import ReasoningGrammar, harmony_rules, think_rules

HARMONY = "openai_gptoss"
HARMONY_MARKS = ((harmony.CHANNEL, harmony.MESSAGE),)
ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a family of models writes calls.

    parser: makes a parser, given the names of the request's tools. grammar: its calls as a grammar. marks: rows of
    texts; a chat template for this format contains all of one row. markup: texts that may be special
    tokens. call_id_length: of the ids that the family's templates accept; None for any. reasoning: the format of
    reasoning whose parser reads these calls too, as they are no part of the answer's text.
    """

    parser: Callable[[Collection[str]], TextParser]
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


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(lambda names: HermesParser(), hermes_calls, (("<tool_call>", "arguments"),), hermes.MARKUP),
    "llama3_json": ToolFormat(
        Llama3JsonParser, llama3_calls, (("<|python_tag|>",), ('"parameters":', "ipython")), (llama3_json.TAG,)
    ),
    "mistral": ToolFormat(lambda names: MistralParser(), mistral_calls, (("[TOOL_CALLS]",),), mistral.MARKUP, 9),
    "openai": ToolFormat(HarmonyParser, harmony_calls, HARMONY_MARKS, harmony.MARKUP, reasoning=HARMONY),
}


@dataclass(frozen=True)
class ReasoningFormat:
    """The format in which a family of models reasons.

    parser: makes the parser of what follows a prompt, given the prompt, the message that the answer continues, and the
    names of tools whose calls it reads too; None if no reasoning can follow. grammar: its reasoning as a grammar.
    marks, markup: as those of `ToolFormat`. ends: special tokens that end an answer, also where the checkpoint's
    generation_config.json does not name them.
    """

    parser: Callable[[str, str | None, Collection[str] | None], TextParser | None]
    grammar: ReasoningGrammar
    marks: tuple[tuple[str, ...], ...]
    markup: tuple[str, ...]
    ends: tuple[str, ...] = ()


def _think(*, from_the_start: bool) -> ReasoningFormat:
    """from_the_start: a model of the format reasons from its first token on, unless the prompt has closed the tag."""
    return ReasoningFormat(
        lambda prompt, continued, names: think_parser(prompt, continued, from_the_start=from_the_start),
        partial(think_rules, from_the_start=from_the_start),
        # A template that searches only for the end of the reasoning belongs to a model with answers that begin with it.
        ((CLOSING,),) if from_the_start else ((OPENING, CLOSING),),
        (OPENING, CLOSING),
    )


# The first whose marks a template has is that of its model.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    HARMONY: ReasoningFormat(
        HarmonyParser.behind, harmony_rules, HARMONY_MARKS, harmony.MARKUP, (harmony.CALL, harmony.RETURN)
    ),
    "qwen3": _think(from_the_start=False),
    "deepseek_r1": _think(from_the_start=True),
}


def tool_format_of(template: str) -> str | None:
    """Return the name of the format that a chat template uses; None if it uses no known format."""
    if "<function=" in template:  # calls as XML between the tags that Hermes has around JSON
        return None
    for name, tools in TOOL_FORMATS.items():
        if any(all(mark in template for mark in row) for row in tools.marks):
            return name
    return None


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
