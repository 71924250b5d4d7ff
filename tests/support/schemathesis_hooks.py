"""What no schema says: hooks for schemathesis, which leave out requests whose fields are fine one by one and cannot be
honoured together. Each is a 400 that names a field. docs/serving.md has the command."""

from __future__ import annotations

import re
from typing import Any

import schemathesis

MOST_COMPLETIONS = 128
FORBIDS = ("bad_words", "bad_words_token_ids", "min_tokens", "logit_bias")
PATTERNS = {"regex": "[a-z0-9 ]+", "grammar": 'start: "[a-z]+"', "whitespace_pattern": "[ \\n]+"}


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Return whether the fields of a request go together, as far as they have the right types."""
    body = case.body
    if not isinstance(body, dict):
        return True
    contradictions = (
        *(forbids_all, has_other_lengths, has_other_completions, stops_at_no_text, may_not_compile),
        continues_and_begins,
    )
    return not any(contradicts(body) for contradicts in contradictions)


def forbids_all(body: dict[str, Any]) -> bool:
    """Return whether a request forbids all tokens that it allows: a 400 of the code no_token_allowed."""
    return bool(body.get("allowed_token_ids")) and any(body.get(name) for name in FORBIDS)


def has_other_lengths(body: dict[str, Any]) -> bool:
    """Return whether min_tokens exceeds max_tokens, or max_tokens and its synonym max_completion_tokens differ."""
    most = [
        body[name] for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if is_number(body, name)
    ]
    least = body["min_tokens"] if is_number(body, "min_tokens") else 0
    return len(set(most)) > 1 or any(least > each for each in most)


def has_other_completions(body: dict[str, Any]) -> bool:
    """Return whether a request asks for several greedy completions, all equal, or streams prompt_logprobs."""
    number, prompts = body.get("n") if is_number(body, "n") else 1, body.get("prompt")
    if isinstance(prompts, list) and prompts and not is_number({"first": prompts[0]}, "first"):
        number *= len(prompts)
    greedy = body.get("temperature") == 0 and is_number(body, "n") and body["n"] > 1
    streams_prompt = body.get("stream") is True and is_number(body, "prompt_logprobs")
    return number > MOST_COMPLETIONS or greedy or streams_prompt


def stops_at_no_text(body: dict[str, Any]) -> bool:
    """Return whether a request has stop strings but is not detokenised."""
    return body.get("detokenize") is False and bool(body.get("stop"))


def continues_and_begins(body: dict[str, Any]) -> bool:
    """Return whether a request both continues the last message and begins an answer."""
    return body.get("continue_final_message") is True and body.get("add_generation_prompt") is True


def may_not_compile(body: dict[str, Any]) -> bool:
    """Return whether a request has an invalid grammar, or one whose tokens other fields forbid.

    Random schemas and choices are valid, as unknown keywords have no effect; random expressions and grammars hardly
    ever are.
    """
    form, described = body.get("structured_outputs"), body.get("response_format")
    if isinstance(form, dict):
        texts = {name: form[name] for name in ("json", *PATTERNS) if isinstance(form.get(name), str)}
        if not all(name in PATTERNS and re.fullmatch(PATTERNS[name], text) for name, text in texts.items()):
            return True
    has_form = isinstance(form, dict) or (isinstance(described, dict) and described.get("type") != "text")
    return has_form and any(body.get(name) for name in ("allowed_token_ids", *FORBIDS, "ignore_eos"))


def is_number(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool)
