"""Incremental detokenisation: text as it comes, never part of a character."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.frontend.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns the tokens of one completion into text; the pieces of text together are the decode of the whole.

    How a token reads may depend on the one before (a first token loses its leading space), so new tokens are
    decoded together with a few that were emitted already, and what those alone decode to is taken off again.
    New tokens are held back while their text may still change: it ends within a character, in a run of byte
    tokens, or is empty.

    prompt_token_ids: what the completion follows. skip_special_tokens: leave special tokens out.
    spaces_between_special_tokens: False takes out the space that some tokenizers put between two of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._join_specials = not skip_special_tokens and not spaces_between_special_tokens
        self._last_is_special = False
        self._emitted_text = ""
        self._start(self._context(prompt_token_ids))
        # The output completes a character that the prompt began.
        self._emitted_text = self._emitted_text.removesuffix(REPLACEMENT)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now, after more tokens; often "" when a character needs several."""
        text = ""
        for token_id in token_ids:
            if self.leaves_no_text(token_id):
                continue
            if self._joins_last(token_id):
                text += self.flush()
                self._start([token_id])
                text += self._emitted_text
            else:
                self._window.append(token_id)
        if self._window and self._window[-1] in self._tokenizer.byte_ids:
            return text
        decoded = self._tokenizer.decode(self._window)
        if decoded.endswith(REPLACEMENT) or len(decoded) <= len(self._emitted_text):
            return text
        return text + self._emit(decoded)

    def flush(self) -> str:
        """Return the text held back, at the end of generation; an incomplete character becomes U+FFFD."""
        return self._emit(self._tokenizer.decode(self._window))

    def peek(self, token_id: int) -> str:
        """The text that would be certain after one token more, which may be part of a character."""
        decoded = self._tokenizer.decode([*self._window, token_id])
        return "" if decoded.endswith(REPLACEMENT) else decoded[len(self._emitted_text) :]

    def leaves_no_text(self, token_id: int) -> bool:
        """Return whether a token is skipped, or unknown to the tokenizer."""
        return token_id in self._skipped or not self._tokenizer.knows(token_id)

    def _joins_last(self, token_id: int) -> bool:
        """Return whether this and the previous token are special, with no space between them."""
        if not self._join_specials:
            return False
        after_special, self._last_is_special = self._last_is_special, token_id in self._tokenizer.special_ids
        return after_special and self._last_is_special

    def _emit(self, decoded: str) -> str:
        new_text = decoded[len(self._emitted_text) :]
        self._start(self._window[self._num_emitted :])
        return new_text

    def _start(self, emitted: list[int]) -> None:
        """Begin a window with tokens whose text was already returned."""
        self._window = emitted
        self._num_emitted = len(emitted)
        self._emitted_text = self._tokenizer.decode(emitted)

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The end of the prompt, back to a token with text of its own: it decides how the next one reads."""
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if self.leaves_no_text(token_id):
                continue
            context.append(token_id)
            text = self._tokenizer.decode_token(token_id)
            if text and REPLACEMENT not in text and token_id not in self._tokenizer.byte_ids:
                break
        return context[::-1]
