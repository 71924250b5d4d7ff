"""Incremental detokenisation: text as it comes, never part of a character."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_engine.frontend.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens held back, of which no whole character comes, until all but the last U+FFFD of their text is given out.
MOST_HELD = 16
# Tokens that decide how the next one reads. A character has up to four bytes, and a token without text may follow each.
MOST_CONTEXT = 8


class Detokenizer:
    """Turns the tokens of one completion into text; the pieces of text together are the decode of the whole.

    How a token reads may depend on the one before (a first token loses its leading space), so new tokens are
    decoded together with a few that were emitted already, and what those alone decode to is taken off again.
    New tokens are held back while their text may still change: it ends within a character, in a run of byte
    tokens, or is empty. Each token is decoded a bounded number of times, whichever tokens follow each other.

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
        before, begun = self._context(prompt_token_ids)
        self._start([*before, *begun])
        # The output may complete a character that the prompt began, which then belongs to the output.
        self._whole_text = self._tokenizer.decode(before) if begun else self._emitted_text.removesuffix(REPLACEMENT)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now, after more tokens; often "" when a character needs several."""
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
        """Return the text held back, at the end of generation; an incomplete character becomes U+FFFD."""
        return self._emit(self._tokenizer.decode(self._window))

    def peek(self, token_id: int) -> str:
        """The text that would be certain after one token more, which may be part of a character; "" within a long run
        of byte tokens."""
        if len(self._window) - self._num_emitted > MOST_HELD:
            return ""
        decoded = self._tokenizer.decode([*self._window, token_id])
        return "" if decoded.endswith(REPLACEMENT) else self._new_text(decoded)

    def leaves_no_text(self, token_id: int) -> bool:
        """Return whether a token is skipped, or unknown to the tokenizer."""
        return token_id in self._skipped or not self._tokenizer.knows(token_id)

    def _repeats_no_text(self, token_id: int, neighbour: Sequence[int]) -> bool:
        """Return whether neither a token nor its neighbour has text: one of them is enough to end a run of bytes."""
        text_of = self._tokenizer.decode_token
        return bool(neighbour) and not text_of(token_id) and not text_of(neighbour[0])

    def _joins_last(self, token_id: int) -> bool:
        """Return whether this and the previous token are special, with no space between them."""
        if not self._join_specials:
            return False
        after_special, self._last_is_special = self._last_is_special, token_id in self._tokenizer.special_ids
        return after_special and self._last_is_special

    def _new_text(self, decoded: str) -> str:
        """The part of the window's text that was not returned yet."""
        known = self._emitted_text if decoded.startswith(self._emitted_text) else self._whole_text
        return decoded[len(known) :]

    def _emit(self, decoded: str) -> str:
        new_text = self._new_text(decoded)
        self._start(self._window[self._num_emitted :][-MOST_CONTEXT:])
        return new_text

    def _start(self, emitted: list[int]) -> None:
        """Begin a window with tokens whose text was already returned."""
        self._window = emitted
        self._num_emitted = len(emitted)
        self._emitted_text = self._whole_text = self._tokenizer.decode(emitted)

    def _context(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The end of the prompt, back to a token with text of its own, or a few tokens, which decide how the next one
        reads; and the byte tokens at its end that make no whole character."""
        byte_ids = self._tokenizer.byte_ids
        context: list[int] = []
        run: list[int] = []  # of byte tokens at the end, which is decoded as a whole
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
        """The byte tokens behind the whole characters of a run: those of a character that may be completed, or as many
        as show that the run is no text, whatever follows."""
        try:
            bytes(map(self._tokenizer.byte_ids.__getitem__, run)).decode()
        except UnicodeDecodeError as error:
            return run[error.start : error.end + 1]
        return []
