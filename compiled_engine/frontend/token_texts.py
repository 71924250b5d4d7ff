"""The texts of single tokens, of which log-probabilities tell: those of consecutive tokens join to the whole text."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.frontend.detokenizer import REPLACEMENT, Detokenizer
from compiled_engine.frontend.tokenizer import Tokenizer


class TokenTexts:
    """Texts of the tokens of a completion or a prompt, one by one; arguments are those of Detokenizer.

    A token that ends within a character has the text "", and the token that completes it has the character. A special
    token has its own text, even if it is left out of the whole.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """The texts of the next token and of others that might have come in its place; the next one is the first."""
        chosen, *others = token_ids
        texts = list(map(self._as_next, others))
        if self._detokenizer.leaves_no_text(chosen):
            return [self._tokenizer.decode_token(chosen), *texts]
        return [self._detokenizer.push([chosen]), *texts]

    def flush(self) -> str:
        """Remaining text of the last token at the end: U+FFFD for an incomplete character, for example."""
        return self._detokenizer.flush()

    def _as_next(self, token_id: int) -> str:
        text = self._tokenizer.decode_token(token_id)
        return self._detokenizer.peek(token_id) if REPLACEMENT in text else text
