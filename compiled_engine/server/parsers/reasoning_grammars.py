"""Reasoning as a grammar: what a model may write before an answer that has a form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiled_engine.server.parsers import harmony
from compiled_engine.server.parsers.call_grammars import Literal, quoted, text_until
from compiled_engine.server.parsers.harmony import HarmonyParser
from compiled_engine.server.parsers.pieces import Reasoning
from compiled_engine.server.parsers.reasoning import ReasoningTags, begins_inside


@dataclass(frozen=True)
class ReasoningRules:
    """before: the part before anything else of an answer, in a rule of Lark. before_text, before_message: further parts
    before its text, and before a call that is a message next to the text. rules: all that these need."""

    before: str
    rules: str
    before_text: str = ""
    before_message: str = ""


ReasoningGrammar = Callable[[str, "str | None", Literal, "int | None"], "ReasoningRules | None"]
"""Given the prompt, the message that the answer continues, how literals are written, and the most tokens of reasoning,
if there is a bound; None if no reasoning can follow."""


def think_rules(
    tags: ReasoningTags, prompt: str, continued: str | None, literal: Literal, budget: int | None = None
) -> ReasoningRules | None:
    """Return the rules for tags; None if the reasoning is closed already. continued: see `begins_inside`. budget: most
    tokens of the reasoning, where a token closes it, which no text holds."""
    inside = begins_inside(tags, prompt, continued)
    if inside is None:
        return None
    opening = literal(tags.opening) + (f" {quoted(tags.label)}" if tags.label else "")
    before = "thought GAP? " if inside else f"({opening} thought GAP?)? "
    thought = text_until(tags.closing, literal, "thought")
    if budget is not None:  # the token that closes is all that is allowed behind the last one of the budget
        bounded = f"thought: bounded? {literal(tags.closing)}\nbounded[max_tokens={budget}]: /(?s:.+)/"
        thought = bounded if budget else f"thought: {literal(tags.closing)}"
    return ReasoningRules(before, f"{thought}\nGAP: /\\s{{1,8}}/")


def harmony_rules(prompt: str, continued: str | None, literal: Literal) -> ReasoningRules:
    """Return the rules for messages: any number of the channel `analysis`, then one of the answer."""
    start, channel, message = literal(harmony.START), literal(harmony.CHANNEL), literal(harmony.MESSAGE)
    header = f'{channel} "final" {message} '
    rules = (
        f'thought: {channel} "analysis" {message} analysis {start} "{harmony.AUTHOR}"\n'
        f"{text_until(harmony.END, literal, 'analysis')}"
    )
    within = HarmonyParser.behind(prompt, continued, None).within
    if within is None:
        return ReasoningRules("thought* ", rules, header)
    end = f'{literal(harmony.END)} {start} "{harmony.AUTHOR}" thought* '
    if within is Reasoning:
        return ReasoningRules(f'analysis {start} "{harmony.AUTHOR}" thought* ', rules, header)
    return ReasoningRules("", rules, "", end)
