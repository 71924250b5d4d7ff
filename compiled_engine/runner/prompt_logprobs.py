"""Log-probabilities of prompts, a chunk of one at a time, launched with the step that computes their tokens."""

from __future__ import annotations

import torch

from compiled_engine.messages import SchedulerOutput
from compiled_engine.rows.async_copies import upload
from compiled_engine.runner.input_batch import InputBatch
from compiled_engine.runner.model_forward import ModelForward
from compiled_engine.runner.pending_steps import PromptLogprobs
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.sampling.logprobs import logprob_rows
from compiled_engine.sampling.vocabulary_slice import VocabularySlice

# Positions whose logits are there at once.
CHUNK = 256


def owes_prompt_logprobs(step: SchedulerOutput, states: RequestStates) -> bool:
    """Whether a request of the step is in its prompt and wants the log-probabilities of the prompt's tokens."""
    rows = states.prompt_logprobs
    return bool(rows) and any(
        (row := states.row(request_id)) in rows and start < states.num_prompt_tokens[row] - 1
        for request_id, start in zip(step.request_ids, step.starts, strict=True)
    )


def launch_prompt_logprobs(
    batch: InputBatch,
    hidden_TD: torch.Tensor,
    states: RequestStates,
    forward: ModelForward,
    vocabulary: VocabularySlice,
) -> dict[str, PromptLogprobs]:
    """For the requests that want them and are in their prompt: the tokens after those of this step."""
    found: dict[str, PromptLogprobs] = {}
    for i, request_id in enumerate(batch.request_ids):
        row = int(batch.rows[i])
        wanted = states.prompt_logprobs.get(row)
        first, start = int(batch.num_computed[i]), int(batch.query_starts[i])
        in_step, in_prompt = int(batch.query_starts[i + 1]) - start, int(states.num_prompt_tokens[row])
        count = min(in_step, in_prompt - 1 - first)
        if wanted is None or count <= 0:
            continue
        targets_T = upload(states.known_ids(row)[first + 1 : first + 1 + count], hidden_TD.device)
        chunks = []
        for begin in range(0, count, CHUNK):
            end = min(count, begin + CHUNK)
            logits_TV = forward.logits(hidden_TD[start + begin : start + end])
            num_top = vocabulary.whole_size if wanted == -1 else wanted
            chunks.append(logprob_rows(logits_TV, targets_T[begin:end], num_top, vocabulary=vocabulary))
        found[request_id] = PromptLogprobs(first + 1, chunks)
    return found
