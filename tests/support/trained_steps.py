"""The weights that a trainer makes of the bundled model, step by step, and the tokens of engines that load them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.sampling.params import SamplingParams

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "mode": "eager",
    "dtype": "float32",
    "progress": False,
    "enable_sleep_mode": True,
    "logprobs_mode": "processed_logprobs",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_blocks": 32,
}
PROMPT = [*range(5, 29)]
PARAMS = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True, logprobs=0)

Bits = list[tuple[int, float]]
"""Sampled tokens, with their log-probabilities."""


class Step(NamedTuple):
    """New weights in a folder, and the bits of a fresh load of the folder."""

    folder: Path
    tensors: dict[str, torch.Tensor]
    bits: Bits


def trained_steps(parent: Path, count: int) -> list[Step]:
    """Make `count` steps, whose bits all differ."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(BUNDLED_MODEL_PATH / "model.safetensors")
    steps = []
    for number in range(count):
        folder = parent / f"step-{number}"
        folder.mkdir()
        for path in BUNDLED_MODEL_PATH.glob("*.json"):
            if path.name != "model.safetensors.index.json":  # the index names the MTP layer's file, too
                shutil.copy(path, folder)
        tensors = {
            name: tensor + 0.2 * tensor.float().std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            for name, tensor in tensors.items()
        }
        save_file(tensors, folder / "model.safetensors")
        with LLM(folder, **ENGINE) as llm:
            (output,) = llm.generate({"prompt_token_ids": PROMPT}, PARAMS, use_tqdm=False)
        steps.append(Step(folder, tensors, bits_of(output)))
    assert len({tuple(step.bits) for step in steps}) == count
    return steps


def bits_of(output: RequestOutput) -> Bits:
    (completion,) = output.outputs
    assert completion.logprobs is not None
    return [(token, row[token].logprob) for token, row in zip(completion.token_ids, completion.logprobs, strict=True)]
