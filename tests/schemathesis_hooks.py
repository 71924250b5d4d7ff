"""What no schema says: hooks for schemathesis, which leave out requests whose fields are fine one by one and cannot be
honoured together. Each is a 400 that names a field. docs/serving.md has the command."""

from __future__ import annotations

from typing import Any

import schemathesis

MOST_COMPLETIONS = 128


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Whether the fields of a request go together, as far as they have the right types."""
    body = case.body
    if not isinstance(body, dict):
        return True
    contradictions = (forbids_all, has_other_lengths, has_other_completions, stops_at_no_text)
    return not any(contradicts(body) for contradicts in contradictions)


def forbids_all(body: dict[str, Any]) -> bool:
    """No token may come: a 400 of the code no_token_allowed."""
    allowed, words = body.get("allowed_token_ids"), body.get("bad_words_token_ids")
    if not isinstance(allowed, list) or not isinstance(words, list):
        return False
    forbidden = [word[0] for word in words if isinstance(word, list) and len(word) == 1]
    return all(token in forbidden for token in allowed)


def has_other_lengths(body: dict[str, Any]) -> bool:
    """min_tokens must not be above max_tokens, and max_completion_tokens is the same as that."""
    most = [
        body[name] for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if is_number(body, name)
    ]
    least = body["min_tokens"] if is_number(body, "min_tokens") else 0
    return len(set(most)) > 1 or any(least > each for each in most)


def has_other_completions(body: dict[str, Any]) -> bool:
    """Greedy completions of one prompt would all be the same, and prompt_logprobs do not come in a stream."""
    number, prompts = body.get("n") if is_number(body, "n") else 1, body.get("prompt")
    if isinstance(prompts, list) and prompts and not is_number({"first": prompts[0]}, "first"):
        number *= len(prompts)
    greedy = body.get("temperature") == 0 and is_number(body, "n") and body["n"] > 1
    streams_prompt = body.get("stream") is True and is_number(body, "prompt_logprobs")
    return number > MOST_COMPLETIONS or greedy or streams_prompt


def stops_at_no_text(body: dict[str, Any]) -> bool:
    """Stop strings are looked for in text, which an answer that is not detokenised has not."""
    return body.get("detokenize") is False and bool(body.get("stop"))


def is_number(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool)
