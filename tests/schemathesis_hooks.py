"""What no schema can say: hooks for schemathesis, which leave out requests whose fields are fine one by one and cannot
be honoured together. docs/serving.md has the command."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Keep requests of which some token may come; one that forbids all is a 400 of the code no_token_allowed."""
    body = case.body
    if not isinstance(body, dict):
        return True
    allowed, words = body.get("allowed_token_ids"), body.get("bad_words_token_ids")
    if not isinstance(allowed, list) or not isinstance(words, list):
        return True
    forbidden = [word[0] for word in words if isinstance(word, list) and len(word) == 1]
    return any(token not in forbidden for token in allowed)
