"""A sampler on the CPU and what is asked of it: what the sampler's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.rows.row_fields import RowFields
from compiled_engine.sampling.logprobs import NO_LOGPROBS, batch_logprobs
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import VocabularySlice
from compiled_engine.sampling.sampled_tokens import LogprobRows, TokenLogprobs
from compiled_engine.sampling.sampler import Sampler

VOCAB_SIZE = 40
MAX_MODEL_LEN = 64
EOS = 2


@dataclass
class Output:
    """The tokens and log-probabilities of a batch, on the host."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(sampler: Sampler, logits_SV: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> Output:
    row_index_S, positions_S = torch.from_numpy(rows.astype(np.int32)), torch.from_numpy(positions.astype(np.int64))
    token_ids_S = sampler.sample(logits_SV, rows, row_index_S, positions_S)
    return Output(token_ids_S.tolist(), logprob_entries(logits_SV, token_ids_S, sampler.num_logprobs(rows)))


def logprob_entries(
    logits_SV: torch.Tensor,
    token_ids_S: torch.Tensor,
    num_logprobs_S: np.ndarray | None,
    triton: bool | None = None,
    vocabulary: VocabularySlice | None = None,
) -> list[TokenLogprobs | None]:
    """Return the log-probabilities from batch_logprobs for each row, as many as the row asks for, on the host."""
    entries: list[TokenLogprobs | None] = [None] * len(logits_SV)
    if num_logprobs_S is None:
        return entries
    found = batch_logprobs(logits_SV, token_ids_S.int().clamp(min=0), num_logprobs_S, triton, vocabulary)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    few = [] if found.few_SW is None else [*LogprobRows.of_array(found.few_SW.numpy())]
    for index, wanted in enumerate(num_logprobs_S.tolist()):
        if wanted == NO_LOGPROBS:
            continue
        if index in found.many:
            (entry,) = LogprobRows.of_array(found.many[index].numpy())
        else:
            entry = few[index]
        count = 1 + ((vocabulary.whole_size if vocabulary else logits_SV.shape[1]) if wanted == -1 else wanted)
        entries[index] = TokenLogprobs(entry.token_ids[:count], entry.logprobs[:count], entry.rank)
    return entries


def make_sampler(vocab_size: int = VOCAB_SIZE, max_num_rows: int = 16) -> Sampler:
    return Sampler(RowFields(max_num_rows, "cpu"), vocab_size)


def random_logits(num_rows: int, seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def sample_once(
    logits_V: torch.Tensor,
    params: SamplingParams,
    token_ids: Sequence[int] = (1,),
    num_prompt_tokens: int = 1,
    seed: int = 0,
) -> int:
    sampler = make_sampler(len(logits_V))
    sampler.add_row(3, params, seed, token_ids, num_prompt_tokens, {EOS})
    return sample(sampler, logits_V[None], np.array([3]), np.array([len(token_ids)])).token_ids[0]
