"""Sample once in each way that a request may ask for, so that no request waits for a kernel to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from compiled_engine.rows.row_fields import RowFields
from compiled_engine.sampling.edits import StepMasks
from compiled_engine.sampling.logprobs import batch_logprobs
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import VocabularySlice
from compiled_engine.sampling.sampler import Sampler
from compiled_engine.sampling.token_mask import num_words

FILTERED = SamplingParams(top_k=20, top_p=0.9)
# Sampling parameters that together launch all kernels of sampling. A bias makes sampling edit float32 copies of the
# logits.
WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(logprobs=1),
    SamplingParams(logit_bias={0: 0.0}),
    SamplingParams(top_k=20, top_p=0.9, logit_bias={0: 0.0}),
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(bad_words_token_ids=((0, 0),)),
    SamplingParams(bad_words_token_ids=((0, 0),), repetition_penalty=1.1),
)
# The parameters that take the most memory, except for penalties, whose memory is reserved separately.
MOST_MEMORY = SamplingParams(top_k=20, top_p=0.9, logit_bias={0: 0.0}, logprobs=1)


def ways_of_sampling(
    vocabulary: VocabularySlice, dtype: torch.dtype, device: torch.device
) -> Iterator[Callable[[], object]]:
    """Yield functions that each sample one token, in a different way, from a row of zeros as logits.

    The filters compile longest, so they come first: for float32, the dtype of edited logits, and for `dtype`, that of
    the model's logits. vocabulary: this rank's columns.
    """
    yield from (
        partial(_sample_zeros, FILTERED, vocabulary, each, device) for each in dict.fromkeys((torch.float32, dtype))
    )
    yield from (partial(_sample_zeros, params, vocabulary, dtype, device) for params in WAYS)
    yield partial(_sample_zeros, SamplingParams(), vocabulary, dtype, device, masked=True)


def _sample_zeros(
    params: SamplingParams,
    vocabulary: VocabularySlice,
    dtype: torch.dtype,
    device: torch.device,
    *,
    masked: bool = False,
) -> torch.Tensor:
    logits_1V = torch.zeros(1, vocabulary.size, dtype=dtype, device=device)
    return sample_once(params, logits_1V, vocabulary, masked=masked)


@torch.inference_mode()
def sample_once(
    params: SamplingParams, logits_RV: torch.Tensor, vocabulary: VocabularySlice, *, masked: bool = False
) -> torch.Tensor:
    """Return token ids, int64 [R], sampled from logits with a sampler that exists only for this call.

    The first row has a token mask, which allows all tokens, if `masked` is True or the parameters have a logit bias.
    Log-probabilities are computed too if the parameters request them.
    """
    num_rows, device = len(logits_RV), logits_RV.device
    sampler = Sampler(RowFields(num_rows, device), vocabulary.whole_size, group=vocabulary.group)
    for row in range(num_rows):
        sampler.add_row(row, params, seed=0, token_ids=(0,), num_prompt_tokens=1, eos_token_ids=(), edited_late=masked)
    masks = None
    if masked or params.logit_bias:
        every_token = np.full((1, num_words(vocabulary.size)), -1, np.int32)
        masks = StepMasks.of(every_token, np.where(np.arange(num_rows), -1, 0), device)
    rows_R = torch.arange(num_rows, dtype=torch.int32, device=device)
    token_ids_R = sampler.sample(
        logits_RV, np.arange(num_rows), rows_R, torch.ones_like(rows_R, dtype=torch.int64), masks
    )
    if (num_logprobs_R := sampler.num_logprobs(np.arange(num_rows))) is not None:
        batch_logprobs(logits_RV, token_ids_R.int().clamp(min=0), num_logprobs_R, vocabulary=vocabulary)
    return token_ids_R
