"""Computes the log-probabilities of prompt tokens from the hidden states of the steps that compute the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.engine.forward import ForwardOutput
from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.messages import NewRequest, SchedulerOutput
from compiled_engine.engine.step_hooks import RunnerParts, StepFeature
from compiled_engine.features.prompt_logprobs.extras import NAME
from compiled_engine.rows.staged_writes import upload
from compiled_engine.sampling.logprobs import logprob_rows
from compiled_engine.sampling.sampled_tokens import LogprobRows

# Number of positions of a prompt whose logits are computed at once.
CHUNK = 256


@dataclass(frozen=True)
class PromptRows:
    """A step's log-probabilities of prompts, a row for each position, being copied to the host. Implements Deferred."""

    # By request: the position of the first row, and the rows in chunks, see logprob_rows.
    chunks: dict[str, tuple[int, list[torch.Tensor]]]

    def by_request(self) -> dict[str, tuple[int, LogprobRows]]:
        """Return the position of the first row and the rows, by request id. See Deferred."""
        return {
            request_id: (first, LogprobRows.of_array(torch.cat(chunks).numpy()))
            for request_id, (first, chunks) in self.chunks.items()
        }


class StepPromptLogprobs(StepFeature):
    """Computes log-probabilities of prompt tokens, in the steps that compute the prompts, for requests that ask."""

    name = NAME

    def __init__(self, parts: RunnerParts, *, computes: bool) -> None:
        """Make the feature. computes: False in pipeline stages before the last, which compute no log-probabilities."""
        self._computes = computes
        self._states, self._model, self._vocabulary = parts.states, parts.model, parts.vocabulary
        self.rows: dict[int, int] = {}  # rows of these requests, with the value of prompt_logprobs

    def added(self, row: int, request: NewRequest) -> None:
        if (wanted := request.sampling_params.prompt_logprobs) is not None:
            self.rows[row] = wanted

    def removed(self, row: int) -> None:
        self.rows.pop(row, None)

    def wants_hidden(self, step: SchedulerOutput) -> bool:
        """Return whether a request of the step computes prompt tokens and asks for their log-probabilities."""
        states, rows = self._states, self.rows
        return any(
            (row := states.row(request_id)) in rows and start < states.num_prompt_tokens[row] - 1
            for request_id, start in zip(step.request_ids, step.starts, strict=True)
        )

    def read_hidden(self, batch: InputBatch, output: ForwardOutput) -> PromptRows | None:
        """Compute the log-probabilities of a step's prompt tokens, for requests that ask for them, and return them.

        The hidden state of a prompt token yields the row of log-probabilities of the next prompt token. Returns None in
        a pipeline stage before the last.
        """
        if not self._computes:
            return None
        found = {request_id: self._rows(batch, i, output) for i, request_id in enumerate(batch.request_of_row)}
        return PromptRows({request_id: rows for request_id, rows in found.items() if rows is not None})

    def _rows(self, batch: InputBatch, index: int, output: ForwardOutput) -> tuple[int, list[torch.Tensor]] | None:
        row = int(batch.rows[index])
        first, start = int(batch.num_computed[index]), int(batch.query_starts[index])
        in_step, in_prompt = int(batch.query_starts[index + 1]) - start, int(self._states.num_prompt_tokens[row])
        count = min(in_step, in_prompt - 1 - first)
        if (wanted := self.rows.get(row)) is None or count <= 0:
            return None
        token_ids: np.ndarray = self._states.all_token_ids(row)
        targets_T = upload(token_ids[first + 1 : first + 1 + count], output.tensor.device)
        num_top = self._vocabulary.whole_size if wanted == -1 else wanted
        chunks = []
        for begin in range(0, count, CHUNK):
            end = min(count, begin + CHUNK)
            logits_TV = self._model.logits_of(output.of_tokens(slice(start + begin, start + end)))
            chunks.append(logprob_rows(logits_TV, targets_T[begin:end], num_top, vocabulary=self._vocabulary))
        return first + 1, chunks
