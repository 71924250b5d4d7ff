"""Samples once in every way, on a sampler of one row: kernels are compiled or loaded before a request asks for them."""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampler import Sampler
from compiled_engine.sampling.step_masks import StepMasks
from compiled_engine.sampling.token_mask import num_words

# A bias makes the logits float32 copies, to be edited.
WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=20, top_p=0.9),
    SamplingParams(logprobs=1),
    SamplingParams(logit_bias={0: 0.0}),
    SamplingParams(top_k=20, top_p=0.9, logit_bias={0: 0.0}),
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(bad_words_token_ids=((0, 0),)),
    SamplingParams(bad_words_token_ids=((0, 0),), repetition_penalty=1.1),
)


@torch.inference_mode()
def sample_once(params: SamplingParams, logits_1V: torch.Tensor) -> None:
    """One of WAYS, for logits of the model's vocabulary and dtype; an edited row has a token mask too."""
    device, vocab_size = logits_1V.device, logits_1V.shape[1]
    sampler = Sampler(1, vocab_size, max_model_len=2, device=device)
    sampler.add_row(0, params, seed=0, token_ids=(0,), num_prompt_tokens=1, eos_token_ids=())
    masks = None
    if params.logit_bias:
        masks = StepMasks.of([np.full(num_words(vocab_size), -1, np.int32)], device)
    row_index_1 = torch.zeros(1, dtype=torch.int32, device=device)
    sampler.sample(logits_1V, np.zeros(1, int), row_index_1, torch.ones(1, dtype=torch.int64, device=device), masks)
