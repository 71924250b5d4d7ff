"""Collects the tokens of one completion, and makes its text, log-probabilities and finish reason."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from compiled_engine.engine.messages import EngineOutput
from compiled_engine.frontend.detokenizer import Detokenizer
from compiled_engine.frontend.logprob_list import GrowingLogprobs
from compiled_engine.frontend.outputs import CompletionOutput
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.sampling.params import SamplingParams


class StopStrings:
    """Finds the first of several stop strings in text that arrives in pieces.

    The first match is the stop string that ends first; of two that end at the same character, the longer. The result
    does not depend on how the text is split. Unless `include_in_output` is set, text that may begin a stop string is
    held back.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(sorted(stops))
        self._include = include_in_output
        self._longest = max(map(len, stops), default=0)
        self._text = ""  # the tail of the text: everything held back, and wherever a stop string may begin
        self._released = 0  # characters of `_text` that were released
        self._searched = 0  # no match ends at or before this index of `_text`

    def push(self, text: str, *, search: bool = True) -> tuple[str, str | None]:
        """Add text. Return the text that is released, and the stop string that is complete, or None.

        If `search` is false, stop strings that end in this text are ignored. Nothing may be pushed after a match.
        """
        if not self._stops:
            return text, None
        self._text += text
        match = self._find() if search else None
        self._searched = len(self._text)
        if match is None:
            return self._release(self._possible_beginning()), None
        start, stop = match
        return self._release(start + len(stop) if self._include else start), stop

    def flush(self) -> str:
        """Return the held-back text. Called when no text follows."""
        return self._release(len(self._text))

    def _find(self) -> tuple[int, str] | None:
        """Return the start and text of the first stop string in the text that was not searched yet, or None.

        The stop string must end in this part, after index `_searched`; it may begin before.
        """
        for end in range(self._searched + 1, len(self._text) + 1):
            if self._text.endswith(self._stops, 0, end):
                stop = max((stop for stop in self._stops if self._text.endswith(stop, 0, end)), key=len)
                return end - len(stop), stop
        return None

    def _possible_beginning(self) -> int:
        """Return the start of the longest suffix that is a prefix of a stop string.

        If there is no such suffix, or stop strings are part of the output, the result is the text's length.
        """
        if self._include:
            return len(self._text)
        # Search only held-back text: new text cannot turn released text into a prefix. So each index is visited once.
        for start in range(max(self._released, len(self._text) - self._longest + 1), len(self._text)):
            ending = self._text[start:]
            place = bisect_right(self._stops, ending)  # sorted: the first of the longer strings that begin with it
            if place < len(self._stops) and self._stops[place].startswith(ending):
                return start
        return len(self._text)

    def _release(self, end: int) -> str:
        """Return the text up to `end` that was not released before.

        Also drop from `_text` the part in which no stop string can begin.
        """
        released = self._text[self._released : end]
        forgotten = max(0, min(end, len(self._text) - self._longest + 1))
        self._text = self._text[forgotten:]
        self._released = end - forgotten
        self._searched -= forgotten
        return released


class Completion:
    """Collects the engine core's outputs of one completion. `finish_reason` is None until the completion ends.

    Outputs come through `update`. As a shortcut, callers may append a token that does not end the completion to
    `token_ids`, and its row of log-probabilities to `logprobs`. With stop strings, they must then call `look` after
    each token.
    """

    def __init__(
        self,
        index: int,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.token_ids: list[int] = []
        self.logprobs: GrowingLogprobs | None = None
        if params.logprobs is not None:
            self.logprobs = GrowingLogprobs(params.logprobs, tokenizer, prompt_token_ids, params)
        self._stop_reason: str | int | None = None
        self._params = params
        self._text = ""
        self._num_decoded = 0
        self._num_textless = 0  # trailing tokens that are not part of the text
        self._num_given_tokens = self._num_given_chars = 0  # by `delta`
        self._end_is_given = False
        self._stops = StopStrings(params.stop or (), include_in_output=params.include_stop_str_in_output)
        self._stop_tokens: dict[int, str] = {}  # skipped special tokens have no text to search, so they match by id
        if tokenizer is not None and params.stop and params.skip_special_tokens:
            ids = tokenizer.ids_of_special
            self._stop_tokens = {ids[text]: text for text in params.stop if text in ids}
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

    def look(self, *, ends: bool = False) -> None:
        """Decode the token that was appended last, and end the completion if a stop string is complete.

        A special token can itself be a stop string. ends: the core ends the completion at this token, so that the token
        does not count as a stop string.
        """
        if self._params.stop:
            self._decode()
            stop = None if ends else self._stop_tokens.get(self.token_ids[-1])
            if stop is not None and self.finish_reason is None and len(self.token_ids) > self._params.min_tokens:
                self._end("stop", stop)

    def update(self, output: EngineOutput) -> None:
        """Add a step's output. A stop string may end the completion before the core does."""
        last = len(output.new_token_ids) - 1
        for position, token_id in enumerate(output.new_token_ids):
            self.token_ids.append(token_id)
            if self.logprobs is not None:
                assert output.logprobs is not None
                self.logprobs.add(output.logprobs.select(slice(position, position + 1)))
            ends = output.finish_reason == "stop" and position == last
            self._num_textless = int(ends and not self._params.include_stop_str_in_output)
            self.look(ends=ends)
            if self.finish_reason is not None:
                return
        if output.finish_reason is not None:
            self._finish(output)

    def snapshot(self) -> CompletionOutput:
        """Return the cumulative output so far."""
        self._decode()
        return CompletionOutput(
            index=self.index,
            text=self._text,
            token_ids=self.token_ids.copy(),
            cumulative_logprob=None if self.logprobs is None else self.logprobs.sum_of_chosen(),
            logprobs=None if self.logprobs is None else self.logprobs.snapshot(),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def delta(self) -> CompletionOutput | None:
        """Return the changes since the last call, or None if there are none."""
        self._decode()
        tokens, chars, ended = self._num_given_tokens, self._num_given_chars, self.finish_reason is not None
        if tokens == len(self.token_ids) and chars == len(self._text) and ended == self._end_is_given:
            return None
        self._num_given_tokens, self._num_given_chars = len(self.token_ids), len(self._text)
        self._end_is_given = ended
        return CompletionOutput(
            index=self.index,
            text=self._text[chars:],
            token_ids=self.token_ids[tokens:],
            cumulative_logprob=None if self.logprobs is None else self.logprobs.sum_of_chosen(),
            logprobs=None if self.logprobs is None else self.logprobs.since(tokens),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _decode(self) -> None:
        """Detokenise the tokens that are new since the last call.

        Called after each token if there are stop strings, otherwise when the text is read.
        """
        end = len(self.token_ids) - self._num_textless
        if self._detokenizer is not None and end > self._num_decoded:
            self._add_text(self._detokenizer.push(self.token_ids[self._num_decoded : end]))
            self._num_decoded = end

    def _add_text(self, text: str) -> None:
        # As for stop tokens, min_tokens must precede a stop string's last token.
        released, stop = self._stops.push(text, search=len(self.token_ids) > self._params.min_tokens)
        self._text += released
        if stop is not None:
            self.finish_reason, self._stop_reason = "stop", stop

    def _finish(self, output: EngineOutput) -> None:
        self._decode()
        self._end(output.finish_reason, output.stop_reason)

    def _end(self, finish_reason: str | None, stop_reason: str | int | None) -> None:
        """End the completion and release the held-back text.

        If the released text completes a stop string, the finish reason is that stop string instead of the given one.
        """
        if self.logprobs is not None:
            self.logprobs.end()
        if self._detokenizer is not None:
            self._add_text(self._detokenizer.flush())
        if self.finish_reason is None:
            self._text += self._stops.flush()
            self.finish_reason, self._stop_reason = finish_reason, stop_reason
