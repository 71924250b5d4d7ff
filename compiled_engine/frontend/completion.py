"""The state of one completion: tokens in, text, log-probabilities and the reason of its end out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compiled_engine.frontend.detokenizer import Detokenizer
from compiled_engine.frontend.outputs import CompletionOutput, Logprob
from compiled_engine.frontend.stop_strings import StopStrings
from compiled_engine.frontend.token_texts import TokenTexts
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.messages import EngineOutput
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.token_logprobs import TokenLogprobs


def token_texts(tokenizer: Tokenizer | None, token_ids: Sequence[int], params: SamplingParams) -> TokenTexts | None:
    """For what follows these tokens; None without a tokenizer."""
    if tokenizer is None:
        return None
    return TokenTexts(
        tokenizer,
        token_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def logprob_dict(entry: TokenLogprobs, texts: TokenTexts | None) -> dict[int, Logprob]:
    """The chosen token with its rank, then the most likely ones, ranked from 1."""
    ranks = (entry.rank, *range(1, len(entry.token_ids)))
    decoded: Sequence[str | None] = [None] * len(ranks) if texts is None else texts.push(entry.token_ids)
    found: dict[int, Logprob] = {}
    for token_id, logprob, rank, text in zip(entry.token_ids, entry.logprobs, ranks, decoded, strict=True):
        found.setdefault(token_id, Logprob(logprob, rank, text))
    return found


class Completion:
    """Collects what the engine core says of one request. `finish_reason` is None until it ends."""

    def __init__(
        self,
        index: int,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self._stop_reason: str | int | None = None
        self._params = params
        self._text = ""
        self._token_ids: list[int] = []
        self._undecoded: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._token_texts = None if params.logprobs is None else token_texts(tokenizer, prompt_token_ids, params)
        self._cumulative_logprob = 0.0
        self._num_given_tokens = self._num_given_chars = 0  # by `delta`
        self._end_is_given = False
        self._stops = StopStrings(params.stop or (), include_in_output=params.include_stop_str_in_output)
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

    def add_token(self, token_id: int) -> None:
        """Take in the next token, with which the core has nothing else to say; a stop string may end the completion."""
        self._token_ids.append(token_id)
        self.num_tokens += 1
        self._undecoded.append(token_id)
        if self._params.stop:
            self._decode()

    def update(self, output: EngineOutput) -> None:
        """Take in whatever a step added; a stop string may end the completion before the core does."""
        last = len(output.new_token_ids) - 1
        for position, token_id in enumerate(output.new_token_ids):
            self._token_ids.append(token_id)
            self.num_tokens += 1
            if self._logprobs is not None:
                assert output.logprobs is not None
                self._logprobs.append(logprob_dict(output.logprobs[position], self._token_texts))
                self._cumulative_logprob += output.logprobs[position].logprobs[0]
            ends = output.finish_reason == "stop" and position == last
            if not ends or self._params.include_stop_str_in_output:
                self._undecoded.append(token_id)
            if self._params.stop:
                self._decode()
            if self.finish_reason is not None:
                return
        if output.finish_reason is not None:
            self._finish(output)

    def snapshot(self) -> CompletionOutput:
        """The completion as it is now."""
        self._decode()
        return CompletionOutput(
            index=self.index,
            text=self._text,
            token_ids=list(self._token_ids),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def delta(self) -> CompletionOutput | None:
        """What is new since the last call: text, tokens, their log-probabilities; None if nothing is."""
        self._decode()
        tokens, chars, ended = self._num_given_tokens, self._num_given_chars, self.finish_reason is not None
        if tokens == self.num_tokens and chars == len(self._text) and ended == self._end_is_given:
            return None
        self._num_given_tokens, self._num_given_chars, self._end_is_given = self.num_tokens, len(self._text), ended
        return CompletionOutput(
            index=self.index,
            text=self._text[chars:],
            token_ids=self._token_ids[tokens:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[tokens:],
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _decode(self) -> None:
        """Bring the text up to the tokens: at each token for stop strings, else when someone wants to see it."""
        if self._detokenizer is not None and self._undecoded:
            self._add_text(self._detokenizer.push(self._undecoded))
            self._undecoded.clear()

    def _add_text(self, text: str) -> None:
        # A stop string counts only once min_tokens have come before its last token, like a stop token.
        released, stop = self._stops.push(text, search=self.num_tokens > self._params.min_tokens)
        self._text += released
        if stop is not None:
            self.finish_reason, self._stop_reason = "stop", stop

    def _finish(self, output: EngineOutput) -> None:
        self._decode()
        self._complete_last_logprob()
        if self._detokenizer is not None:
            self._add_text(self._detokenizer.flush())
        if self.finish_reason is None:
            self._text += self._stops.flush()
            self.finish_reason, self._stop_reason = output.finish_reason, output.stop_reason

    def _complete_last_logprob(self) -> None:
        """Give the last token the text that was held back for more to come."""
        rest = self._token_texts.flush() if self._token_texts is not None else ""
        if self._logprobs and rest:
            (token_id, last), *others = self._logprobs[-1].items()
            self._logprobs[-1] = {
                token_id: replace(last, decoded_token=rest + (last.decoded_token or "")),
                **dict(others),
            }
