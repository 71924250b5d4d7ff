"""Converts tokens to text incrementally, without ever emitting part of a character."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.frontend.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# With more held-back tokens than this and still no whole character, their text is emitted, except its last U+FFFD.
MOST_HELD = 16
# Tokens that can affect the next one's text. A character has up to four bytes, each maybe followed by an empty token.
MOST_CONTEXT = 8


class Detokenizer:
    """Converts the tokens of one completion to text. The emitted pieces join to the decoded whole.

    A token's text may depend on the token before it: the first token of a text loses its leading space. New tokens are
    therefore decoded together with a few tokens whose text was emitted (the window), and the emitted text is removed
    from the result. Tokens are held back while their text may still change: it is empty, ends within a character, or
    ends in a run of byte tokens. Each token is decoded a bounded number of times.

    `prompt_token_ids` precede the completion. With `spaces_between_special_tokens=False`, the space that some
    tokenizers put between two special tokens is removed.
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
        before, begun = self._context(prompt_token_ids)
        self._start([*before, *begun])
        # The output may complete a character that the prompt began, which then belongs to the output.
        self._whole_text = self._tokenizer.decode(before) if begun else self._emitted_text.removesuffix(REPLACEMENT)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now final, often "" while a character is incomplete."""
        text = ""
        for token_id in token_ids:
            if self.leaves_no_text(token_id) or self._repeats_no_text(token_id, self._window[-1:]):
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
        if not decoded.endswith(REPLACEMENT):
            return text + self._emit(decoded) if self._new_text(decoded) else text
        if len(self._window) - self._num_emitted <= MOST_HELD:
            return text
        text += self._emit(decoded).removesuffix(REPLACEMENT)
        self._emitted_text = self._whole_text = self._emitted_text.removesuffix(REPLACEMENT)
        return text

    def flush(self) -> str:
        """Return the held-back text. Called at the end of generation. An incomplete character becomes U+FFFD."""
        return self._emit(self._tokenizer.decode(self._window))

    def peek(self, token_id: int) -> str:
        """Return the text that one more token would make final, without adding the token.

        The result is "" for an incomplete character and within a long run of byte tokens.
        """
        if len(self._window) - self._num_emitted > MOST_HELD:
            return ""
        decoded = self._tokenizer.decode([*self._window, token_id])
        return "" if decoded.endswith(REPLACEMENT) else self._new_text(decoded)

    def leaves_no_text(self, token_id: int) -> bool:
        """Return whether a token is skipped or unknown to the tokenizer."""
        return token_id in self._skipped or not self._tokenizer.knows(token_id)

    def _repeats_no_text(self, token_id: int, neighbour: Sequence[int]) -> bool:
        """Return whether the token can be left out, since neither it nor the adjacent token has text.

        A token without text ends a run of byte tokens, so one of several such tokens is kept. neighbour: a list with
        the adjacent token; empty if there is none.
        """
        text_of = self._tokenizer.decode_token
        return bool(neighbour) and not text_of(token_id) and not text_of(neighbour[0])

    def _joins_last(self, token_id: int) -> bool:
        """Return whether this token and the previous one are special and joined without a space.

        Stores whether this token is special, for the next call.
        """
        if not self._join_specials:
            return False
        after_special, self._last_is_special = self._last_is_special, token_id in self._tokenizer.special_ids
        return after_special and self._last_is_special

    def _new_text(self, decoded: str) -> str:
        """Return the part of the window's text that was not emitted yet."""
        known = self._emitted_text if decoded.startswith(self._emitted_text) else self._whole_text
        return decoded[len(known) :]

    def _emit(self, decoded: str) -> str:
        new_text = self._new_text(decoded)
        self._start(self._window[self._num_emitted :][-MOST_CONTEXT:])
        return new_text

    def _start(self, emitted: list[int]) -> None:
        """Begin a new window with the tokens `emitted`, whose text was emitted."""
        self._window = emitted
        self._num_emitted = len(emitted)
        self._emitted_text = self._whole_text = self._tokenizer.decode(emitted)

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return two lists of token ids from the prompt's end.

        The first has the tokens that affect the text of the next token. It begins at the last token that has text of
        its own, and has at most MOST_CONTEXT tokens. The second has the byte tokens of an incomplete character.
        """
        byte_ids = self._tokenizer.byte_ids
        context: list[int] = []
        run: list[int] = []  # trailing byte tokens, decoded as a whole
        for token_id in reversed(prompt_token_ids):
            if self.leaves_no_text(token_id) or self._repeats_no_text(token_id, context[-1:]):
                continue
            if len(context) - len(run) == MOST_CONTEXT:
                break
            if token_id in byte_ids and len(run) == len(context):
                run.append(token_id)
            context.append(token_id)
            text = self._tokenizer.decode_token(token_id)
            if text and REPLACEMENT not in text and token_id not in byte_ids:
                break
        context.reverse()
        begun = self._begun_character(run[::-1])
        before = context[: len(context) - len(run)]
        # Whole characters of the run are left out, since the output's bytes are decoded apart from them.
        return before or (list(self._tokenizer.word_ids) if len(run) > len(begun) else []), begun

    def _begun_character(self, run: list[int]) -> list[int]:
        """Return the byte tokens at the end of `run` that do not form a whole character.

        Later tokens may complete them to a character. Otherwise they are invalid bytes, and the run is no valid text.
        """
        try:
            bytes(map(self._tokenizer.byte_ids.__getitem__, run)).decode()
        except UnicodeDecodeError as error:
            return run[error.start : error.end + 1]
        return []
