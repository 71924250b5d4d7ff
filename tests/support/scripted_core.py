"""A core without a model: every request says the tokens that a script has for it, one or several a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiled_engine.engine.messages import EngineOutput, EngineRequest, StepOutputs
from compiled_engine.features.prompt_logprobs.extras import NAME
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs
from compiled_engine.sampling.token_mask import TokenMask


class ScriptedCore:
    """A core whose requests generate the tokens of a script, until a stop token or max_tokens.

    `tokens_a_step`: how many tokens a request gets per step, or a function that returns this. `before_step` is called
    with the step's number before the step. `live` are the running requests.
    """

    def __init__(
        self,
        script: Callable[[EngineRequest], Sequence[int]],
        *,
        tokens_a_step: int | Callable[[], int] = 1,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.live: dict[str, tuple[EngineRequest, list[int]]] = {}
        self.aborted: list[str] = []
        self.stopped: list[str] = []  # those of them whose output was complete
        self.steps = 0
        self._script = script
        self._tokens_a_step = tokens_a_step if callable(tokens_a_step) else lambda: tokens_a_step
        self._before_step = before_step

    def add(self, request: EngineRequest, token_mask: TokenMask | None = None) -> None:
        assert request.request_id not in self.live
        self.live[request.request_id] = (request, [])

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        del self.live[request_id]
        self.aborted.append(request_id)
        self.stopped += [request_id] * stopped

    held = ""
    patience_s = 0.0

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def can_step(self) -> bool:
        return bool(self.live)

    def step(self) -> StepOutputs:
        self.steps += 1
        self._before_step(self.steps)
        outputs = [self._advance(*entry) for entry in list(self.live.values())]
        outputs = [output for output in outputs if output.new_token_ids]
        even = [o for o in outputs if o == EngineOutput(o.request_id, o.new_token_ids, o.logprobs)]
        token_ids = [token_id for output in even for token_id in output.new_token_ids]
        counts = [len(output.new_token_ids) for output in even]
        return StepOutputs(
            [output.request_id for output in even],
            token_ids,
            [output for output in outputs if output not in even],
            LogprobRows.of(map(logprobs_of, token_ids)) if any(output.logprobs for output in even) else None,
            None if all(count == 1 for count in counts) else counts,
        )

    def _advance(self, request: EngineRequest, said: list[int]) -> EngineOutput:
        params = request.sampling_params
        assert params.max_tokens is not None
        first = len(said) == 0
        new: list[int] = []
        finish_reason = stop_reason = None
        num_new = self._tokens_a_step()
        while len(new) < num_new and finish_reason is None:
            token_id = self._script(request)[len(said)]
            said.append(token_id)
            new.append(token_id)
            if token_id in request.eos_token_ids:
                finish_reason = "stop"
            elif token_id in (params.stop_token_ids or ()):
                finish_reason, stop_reason = "stop", token_id
            elif len(said) == params.max_tokens:
                finish_reason = "length"
        if finish_reason is not None:
            del self.live[request.request_id]
        extras = {}
        if first and params.prompt_logprobs is not None:
            extras[NAME] = (1, LogprobRows.of(map(logprobs_of, request.prompt_token_ids[1:])))
        return EngineOutput(
            request_id=request.request_id,
            new_token_ids=tuple(new),
            logprobs=None if params.logprobs is None else LogprobRows.of(map(logprobs_of, new)),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=2 if first else None,
            extras=extras,
        )


def logprobs_of(token_id: int) -> TokenLogprobs:
    """Return log-probabilities of a token at rank 3, after tokens 5 and 6."""
    return TokenLogprobs((token_id, 5, 6), (-3.0, -0.5, -1.0), rank=3)
