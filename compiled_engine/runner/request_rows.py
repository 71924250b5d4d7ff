"""The rows of running requests: taken, filled and freed as each step says, in the states and in the sampler alike."""

from __future__ import annotations

from compiled_engine.messages import NewRequest, SchedulerOutput
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.sampling.sampler import Sampler


class RequestRows:
    """sampler: None in a stage of a pipeline that does not sample."""

    def __init__(self, states: RequestStates, sampler: Sampler | None):
        self._states, self._sampler = states, sampler

    def update(self, step: SchedulerOutput) -> None:
        """What the step says of requests that come, go and get blocks. Raises what `Sampler.add_row` raises."""
        for request_id in step.removed:
            row = self._states.remove(request_id)
            if row is not None and self._sampler is not None:
                self._sampler.remove_row(row)
        if step.new:
            starts = dict(zip(step.request_ids, step.starts, strict=True))
            for request in step.new:
                self._add(request, starts[request.request_id])
        for request_id, block_ids in step.new_block_ids.items():
            self._states.append_blocks(self._states.row(request_id), block_ids)

    def _add(self, request: NewRequest, num_computed: int) -> None:
        """A row in the states and in the sampler, or in neither."""
        row = self._states.add(request, num_computed)
        if self._sampler is None:
            return
        params = request.sampling_params
        assert params.seed is not None  # the engine core fills it in
        try:
            self._sampler.add_row(
                row,
                params,
                params.seed,
                request.token_ids,
                request.num_prompt_tokens,
                request.eos_token_ids,
                masked=request.masked,
            )
        except BaseException:
            self._states.remove(request.request_id)
            raise
