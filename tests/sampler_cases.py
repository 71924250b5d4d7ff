"""A sampler on the CPU and what is asked of it: what the sampler's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampler import Sampler
from compiled_engine.sampling.token_logprobs import TokenLogprobs

VOCAB_SIZE = 40
MAX_MODEL_LEN = 64
EOS = 2


@dataclass
class Output:
    """What a batch came to, on the host."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(sampler: Sampler, logits_SV: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> Output:
    row_index_S, positions_S = torch.from_numpy(rows.astype(np.int32)), torch.from_numpy(positions.astype(np.int64))
    sampled = sampler.sample(logits_SV, rows, row_index_S, positions_S)
    logprobs = sampled.logprobs.entries() if sampled.logprobs else [None] * len(rows)
    return Output(sampled.token_ids_S.tolist(), logprobs)


def make_sampler(vocab_size: int = VOCAB_SIZE, max_num_rows: int = 16) -> Sampler:
    return Sampler(max_num_rows, vocab_size, "cpu")


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
