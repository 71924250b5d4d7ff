"""Translate StructuredOutputs to the text that llguidance compiles, within limits, and check that it compiles."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, lru_cache
from typing import TYPE_CHECKING, TypeVar

from compiled_engine.grammars.constraint import error_of
from compiled_engine.sampling.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

# Stack for recursion as deep as its input is long, in bytes of address space, used only as far as the depth needs: the
# longest allowed grammar, with every rule nested in the one before, needs less than a third. A process that exceeds
# its stack is killed.
STACK_BYTES = 512 * 2**20
_STACK_SIZE = threading.Lock()  # the stack size is a setting of the whole process
# Limits guard against attacks, since requests bring grammars. KEPT_GRAMMARS: compiled grammars that are kept, the last
# used; QUICK_GRAMMAR: characters up to which a grammar waits for no larger one.
KEPT_GRAMMARS = 256
QUICK_GRAMMAR = 16 << 10
# A request waits at most this long for its grammar, grammars before it included.
LONGEST_COMPILE_S = 10.0
# Between any two parts of JSON: a space, or a line end and an indentation.
WHITESPACE = r" |\r?\n[ \t]{0,24}"
ANY_OBJECT = '{"type": "object"}'
# Errors that only the model's own vocabulary shows: whether it has these tokens.
SPECIAL_TOKEN_MARKS = ("<[", "<|")
# The distinction of Lark and GBNF is llguidance's, but each line is read once.
_IS_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
# The converter compares each of these rules with the others.
MOST_GBNF_RULES = 1000

Result = TypeVar("Result")


def on_large_stack(work: Callable[[], Result]) -> Result:
    """Run in a thread of its own, and wait. Raises what `work` raises."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _STACK_SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="large stack", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


def mask_threads() -> int:
    """Threads that fill masks: few masks take long, so more would wait for each other rather than help."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def parser_limits() -> LLParserLimits:
    """Limits of one grammar. Fuel is a count of steps: a thousand take less than a millisecond.

    Exceeding a limit is an error of the request.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        max_grammar_size=100_000,
        step_lexer_fuel=20_000,
        step_max_items=3_000,
        max_items_in_row=500,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


def grammar_text(given: StructuredOutputs) -> str:
    """Raises ValueError if it cannot be compiled, or takes more than a grammar may."""
    text = _text(given)
    if not any(mark in text for mark in SPECIAL_TOKEN_MARKS) and (error := _error(text)):
        raise ValueError(f"structured_outputs: {error}")
    return text


def _text(given: StructuredOutputs) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if given.regex is not None:
        return LLMatcher.grammar_from_regex(given.regex)
    if given.choice is not None:
        texts = " | ".join(json.dumps(text) for text in given.choice)  # as one terminal: rules may have fewer branches
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if given.grammar is not None:
        if given.grammar.lstrip().startswith("{"):
            return given.grammar
        if _IS_LARK.search(given.grammar):
            return LLMatcher.grammar_from_lark(given.grammar)
        if (count := given.grammar.count("::=")) > MOST_GBNF_RULES:
            raise ValueError(
                f"structured_outputs.grammar must have at most {MOST_GBNF_RULES} rules in GBNF, got {count}"
            )
        try:
            return LLMatcher.grammar_from_lark(gbnf_to_lark(given.grammar))
        except Exception as error:  # the converter raises what its parser does
            raise ValueError(f"structured_outputs.grammar cannot be read: {error}") from error
    schema = ANY_OBJECT if given.json is None else given.json
    assert isinstance(schema, str)
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": not given.disable_any_whitespace,
            "whitespace_pattern": given.whitespace_pattern or (None if given.disable_any_whitespace else WHITESPACE),
        },
    )


@lru_cache(maxsize=KEPT_GRAMMARS)
def _error(text: str) -> str:
    """Return the error of a grammar; empty without one. It is compiled for a vocabulary of bytes, without the GIL, and
    its first mask is computed: endlessly recursive rules compile, but allow nothing."""
    from llguidance import LLMatcher

    def error() -> str:
        matcher = LLMatcher(_bytes(), text, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        return error_of(matcher)

    return on_large_stack(error)


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of the 256 bytes and an end-of-sequence token."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=_Bytes.eos_token_id)


class _Bytes:
    """A vocabulary of bytes with the interface of TokenizerWrapper."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
