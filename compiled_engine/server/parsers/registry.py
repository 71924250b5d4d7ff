"""The parsers by name, and the choice of parsers by a checkpoint's chat template.

A new format is a file with a `TextParser`, a function in call_grammars.py and a row here. One that writes calls as tags
is a row of xml_markup.py and a row here.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from compiled_engine.server.parsers import hermes, llama3_json, mistral
from compiled_engine.server.parsers.call_grammars import CallGrammar, hermes_calls, llama3_calls, mistral_calls
from compiled_engine.server.parsers.hermes import HermesParser
from compiled_engine.server.parsers.llama3_json import Llama3JsonParser
from compiled_engine.server.parsers.mistral import MistralParser
from compiled_engine.server.parsers.pieces import TextParser
from compiled_engine.server.parsers.reasoning import CLOSING, OPENING, ThinkParser
from compiled_engine.server.parsers.xml_calls import XmlParser
from compiled_engine.server.parsers.xml_grammar import xml_calls
from compiled_engine.server.parsers.xml_markup import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, XmlMarkup

ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a family of models writes calls.

    parser: makes a parser, given the schemas of arguments of the request's tools, by the tools' names. grammar: its
    calls as a grammar. marks: rows of texts; a chat template for this format contains all of one row. markup: texts
    that may be special tokens. call_id_length: of the ids that the family's templates accept; None for any.
    """

    parser: Callable[[Mapping[str, Mapping[str, Any]]], TextParser]
    grammar: CallGrammar
    marks: tuple[tuple[str, ...], ...]
    markup: tuple[str, ...]
    call_id_length: int | None = None

    def call_id(self) -> str:
        """A new id for a call."""
        if self.call_id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(self.call_id_length))


def _tags(markup: XmlMarkup, *marks: str) -> ToolFormat:
    return ToolFormat(partial(XmlParser, markup), partial(xml_calls, markup), (marks,), markup.tags)


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(lambda names: HermesParser(), hermes_calls, (("<tool_call>", "arguments"),), hermes.MARKUP),
    "llama3_json": ToolFormat(
        Llama3JsonParser, llama3_calls, (("<|python_tag|>",), ('"parameters":', "ipython")), (llama3_json.TAG,)
    ),
    "mistral": ToolFormat(lambda names: MistralParser(), mistral_calls, (("[TOOL_CALLS]",),), mistral.MARKUP, 9),
    "qwen3_coder": _tags(QWEN3_CODER, "<tool_call>", "<function="),
    "seed_oss": _tags(SEED_OSS, "<seed:tool_call>", "<function="),
    "glm45": _tags(GLM45, "<tool_call>", "<arg_key>", "<arg_value>"),
    "minimax_m2": _tags(MINIMAX_M2, "<minimax:tool_call>", "<invoke name="),
}

# Name -> whether a model of the format reasons from its first token on, unless the prompt has closed the tag.
REASONING_FORMATS: dict[str, bool] = {"qwen3": False, "deepseek_r1": True}


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
    if CLOSING not in template:
        return None
    # A template that searches only for the end of the reasoning belongs to a model with answers that begin with it.
    return "qwen3" if OPENING in template else "deepseek_r1"


def begins_inside(name: str, prompt: str, continued: str | None = None) -> bool | None:
    """Return whether the text after `prompt` is reasoning from its first character on; None if none can follow, as it
    is closed. continued: the message that the text continues, whose last tag decides; the prompt's end does without."""
    if continued and continued.strip():
        opened, closed = continued.rfind(OPENING), continued.rfind(CLOSING)
        return True if opened > closed else None
    end = prompt.rstrip()
    return None if end.endswith(CLOSING) else REASONING_FORMATS[name] or end.endswith(OPENING)


def reasoning_parser(name: str, prompt: str, continued: str | None = None) -> TextParser | None:
    """A parser for what follows `prompt`; None if the reasoning is closed already. continued: see `begins_inside`."""
    inside = begins_inside(name, prompt, continued)
    begun = bool((continued or "").rpartition(OPENING)[2].strip())
    return None if inside is None else ThinkParser(inside=inside, begun=begun)
