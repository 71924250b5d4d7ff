"""What sampling gives in place of a token id where no token can be chosen: the host learns of it with the tokens."""

from __future__ import annotations

NOT_A_NUMBER = -2
NOTHING_ALLOWED = -3

WHY_NO_TOKEN = {
    NOT_A_NUMBER: "the logits of the next token are NaN: an overflow in the model (dtype float16 overflows sooner than "
    "bfloat16 and float32), NaN in its weights, or a logits processor's work",
    NOTHING_ALLOWED: "no token may come next: all logits are minus infinity, after what allowed_token_ids, bad_words, "
    "min_tokens, token_mask and logits processors forbid",
}
"""What each of them means, as the error of the request."""

NO_TOKENS = frozenset(WHY_NO_TOKEN)
