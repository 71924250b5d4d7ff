"""Two checkpoints of one shape, and the bits that engines compute with weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file

from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "mode": "eager",
    "progress": False,
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "num_blocks": 64,
}
PROMPTS: list[list[int]] = [[*range(3, 40)], [*range(60, 71)], [7, 5, 3, 2]]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)

Bits = list[Any]


def bits_of(outputs: list[RequestOutput]) -> Bits:
    """Return tokens and log-probabilities, of which the latter change with any bit of the logits."""
    return [
        [
            (output.outputs[0].token_ids, [{i: each.logprob for i, each in row.items()} for row in rows if row])
            for rows in (output.outputs[0].logprobs or [], output.prompt_logprobs or [])
        ]
        for output in outputs
    ]


def stored(llm: LLM) -> dict[str, torch.Tensor]:
    """Return the parameters of an engine in this process."""
    executor: Any = llm.core.executor
    tensors: dict[str, torch.Tensor] = executor.runner.calls["weights.apply"].__self__.weights.stored.tensors
    return tensors


def bits(llm: LLM) -> Bits:
    """Return the bits of prompts that are alone in their steps, as sums depend on what else is in a batch."""
    alone = [llm.generate([{"prompt_token_ids": ids}], PARAMS, use_tqdm=False) for ids in PROMPTS]
    return bits_of([output for outputs in alone for output in outputs])


def fresh(folder: Path, options: dict[str, Any]) -> Bits:
    with LLM(folder, **ENGINE | options) as llm:
        return bits(llm)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of the old weights and the new ones."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    make_checkpoint(old, "llama", seed=0)
    make_checkpoint(new, "llama", seed=1)
    return old, new
