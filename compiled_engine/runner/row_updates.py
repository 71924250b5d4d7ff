"""Rows of requests that come and go with a step, in the states and in the sampler alike."""

from __future__ import annotations

from compiled_engine.messages import NewRequest, SchedulerOutput
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.sampling.sampler import Sampler


def update_rows(step: SchedulerOutput, states: RequestStates, sampler: Sampler | None) -> None:
    """Before the step is prepared. sampler: None in a stage of a pipeline that does not sample. Raises what
    Sampler.add_row raises."""
    for request_id in step.removed:
        row = states.remove(request_id)
        if row is not None and sampler is not None:
            sampler.remove_row(row)
    if step.new:
        starts = dict(zip(step.request_ids, step.starts, strict=True))
        for request in step.new:
            _add_row(request, starts[request.request_id], states, sampler)
    for request_id, (block_ids,) in step.new_block_ids.items():
        states.append_blocks(states.row(request_id), block_ids)


def _add_row(request: NewRequest, num_computed: int, states: RequestStates, sampler: Sampler | None) -> None:
    """A row in the states and in the sampler, or in neither."""
    row = states.add(request, num_computed)
    if sampler is None:
        return
    params = request.sampling_params
    assert params.seed is not None  # the engine core fills it in
    try:
        sampler.add_row(
            row,
            params,
            params.seed,
            request.token_ids,
            request.num_prompt_tokens,
            request.eos_token_ids,
            masked=request.masked,
        )
    except BaseException:
        states.remove(request.request_id)
        raise
