"""Grammars of reasoning, for models that reason before an answer with a required format."""

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
    """The grammar of the reasoning before an answer, as parts of Lark rules."""

    before: str  # precedes everything else in an answer
    rules: str  # all rules that the parts need
    before_text: str = ""  # precedes the answer's text
    before_message: str = ""  # precedes a call that is a message of its own, after the message with the answer's text


ReasoningGrammar = Callable[[str, "str | None", Literal, "int | None"], "ReasoningRules | None"]
"""Makes the rules, given the prompt, the message that the answer continues, the literal writer and the bound on
reasoning tokens; None if no reasoning can follow."""


def think_rules(
    tags: ReasoningTags, prompt: str, continued: str | None, literal: Literal, budget: int | None = None
) -> ReasoningRules | None:
    """Return the rules for reasoning between tags; None if the reasoning has already ended.

    See `begins_inside` for `continued`. `budget` bounds the tokens of reasoning; the closing tag must then be a special
    token.
    """
    inside = begins_inside(tags, prompt, continued)
    if inside is None:
        return None
    opening = literal(tags.opening) + (f" {quoted(tags.label)}" if tags.label else "")
    before = "thought GAP? " if inside else f"({opening} thought GAP?)? "
    thought = text_until(tags.closing, literal, "thought")
    if budget is not None:  # after the budget only the closing token is allowed
        bounded = f"thought: bounded? {literal(tags.closing)}\nbounded[max_tokens={budget}]: /(?s:.+)/"
        thought = bounded if budget else f"thought: {literal(tags.closing)}"
    return ReasoningRules(before, f"{thought}\nGAP: /\\s{{1,8}}/")


def harmony_rules(prompt: str, continued: str | None, literal: Literal) -> ReasoningRules:
    """Return the rules for harmony messages: any number in the channel `analysis`, then one answer.

    `continued` is the message that the answer continues, or None.
    """
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
