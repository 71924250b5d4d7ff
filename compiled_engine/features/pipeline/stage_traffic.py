"""Exchanges activations and tokens between pipeline stages, in the order of the launches.

Activations go from each stage to the next. Sampled tokens go from the last stage to the first, which embeds them; it
receives them before the first step that depends on them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import compress

import torch

from compiled_engine.engine.forward import ForwardOutput, ModelForward
from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.messages import SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_hooks import StepFeature, Tail
from compiled_engine.engine.step_sampling import Advance, Deferred
from compiled_engine.parallel.stages import StageLink
from compiled_engine.rows.staged_writes import upload


@dataclass(frozen=True)
class _ExpectedTokens:
    """Sampled tokens of a step that the first stage has yet to receive."""

    request_ids: frozenset[str]
    rows_S: torch.Tensor  # the requests' rows in the states, int64


class StageTraffic(StepFeature):
    """Sends and receives activations and tokens for one stage. `model` has the buffer for received activations."""

    name = "pipeline"

    def __init__(self, link: StageLink, states: RequestStates, model: ModelForward, device: torch.device):
        self._stage, self._link, self._states, self._model, self._device = link.stage, link, states, model, device
        self._expected: deque[_ExpectedTokens] = deque()

    def begin(self, step: SchedulerOutput) -> None:
        """In the first stage, receive the sampled tokens that the step depends on.

        If the tokens of more steps than there are stages are outstanding, the oldest of them are received too.
        """
        needed = 0
        for number, expected in enumerate(self._expected, 1):
            if not expected.request_ids.isdisjoint(step.request_ids):
                needed = number
        self._receive_tokens(max(needed, len(self._expected) - self._stage.count))

    def _receive_tokens(self, num_steps: int) -> None:
        for _ in range(num_steps):
            rows_S = self._expected.popleft().rows_S
            tokens_S = torch.empty(len(rows_S), dtype=torch.int32, device=self._device)
            self._link.receive_tokens(tokens_S)
            self._states.last_token_S.index_copy_(0, rows_S, tokens_S)

    def receive(self, batch: InputBatch, hidden_wanted: bool) -> None:
        """Receive the previous stage's activations, unless this is the first stage. See ModelForward.received."""
        into = self._model.received(batch.padded_tokens, hidden_wanted=hidden_wanted)
        if into is not None:
            self._link.receive(into)

    def send(self, packed: torch.Tensor, batch: InputBatch) -> None:
        """Send a step's activations, `packed`, to the next stage.

        The first stage also records the tokens that it will receive for the step. On a GPU, later kernels may overwrite
        `packed`; on a CPU it must not be written to.
        """
        self._link.send(packed)
        if self._stage.is_first and batch.samples.any():
            sampled = frozenset(compress(batch.request_of_row, batch.samples.tolist()))
            self._expected.append(_ExpectedTokens(sampled, self._sampled_rows(batch)))

    def after_sample(self, batch: InputBatch) -> None:
        """In the last stage, send the sampled tokens to the first stage."""
        if batch.samples.any():
            self._link.send_tokens(self._states.last_token_S.index_select(0, self._sampled_rows(batch)))

    def close(self) -> None:
        """Receive everything that is still in flight. Called when no step follows."""
        self._receive_tokens(len(self._expected))
        self._link.drain()

    def _sampled_rows(self, batch: InputBatch) -> torch.Tensor:
        """Return the state rows of the S requests that sample, int64 [S], in the batch's order.

        The order is the same in all stages.
        """
        return upload(batch.rows[batch.samples].astype("int64"), self._device)


class SendTail(Tail):
    """Sends the forward's output to the next stage, in every stage but the last."""

    def __init__(self, traffic: StageTraffic, advance: Advance) -> None:
        self._traffic, self.advance = traffic, advance

    def launch_rest(self, batch: InputBatch, output: ForwardOutput, results: dict[str, Deferred]) -> None:
        """Send the forward's output to the next stage. See Tail.

        If the batch has no decode graph, this first advances the request states.
        """
        if not batch.has_decode_graph:
            self.advance(batch, None, batch.num_real_rows)
        self._traffic.send(output.tensor, batch)
