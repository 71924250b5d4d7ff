"""LongRoPE and dynamic NTK on a GPU: a request grows over the border while others decode, with transformers' tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from compiled_engine import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

BORDER = 24
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 132,
}
# Family and configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "max_position_embeddings": 96,
            "original_max_position_embeddings": BORDER,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e3,
                "short_factor": [1.0 + pair / 8 for pair in range(32)],
                "long_factor": [2.0 + pair for pair in range(32)],
            },
        },
    ),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": BORDER,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0},
        },
    ),
}
# Lengths of prompts and outputs: two stay below the border, one grows over it, and one is beyond it.
LENGTHS = [(3, 18), (5, 18), (BORDER - 8, 30), (40, 30)]
PROMPTS = [[(7 * i + 3 * j * j) % 131 for j in range(length)] for i, (length, _) in enumerate(LENGTHS)]
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "progress": False,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_blocks": 32,
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_request_grows_over_the_border_while_others_decode(tmp_path: Path, kind: str) -> None:
    family, changes = MODELS[kind]
    oracle: Any = make_checkpoint(tmp_path, family, **SIZES, **changes)
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in LENGTHS
    ]
    found = {}
    for mode in ("eager", "graphed"):
        compiling = {} if mode == "eager" else {"compile_workers": 0}
        with LLM(tmp_path, mode=mode, **OPTIONS | compiling) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
            found[mode] = [list(output.outputs[0].token_ids) for output in outputs]
            assert mode == "eager" or llm.metrics()["graph_replays"] > max(count for _, count in LENGTHS) / 2
    assert found["graphed"] == found["eager"]
    grown, (_, count) = PROMPTS[2], LENGTHS[2]
    # With a cache, as users run it: dynamic NTK rotates earlier keys by the factor of their time. Not with LongRoPE,
    # for which not every version of transformers computes all tokens again at the border.
    ids, use_cache = torch.tensor([grown]), kind == "dynamic"
    expected = oracle.generate(ids, max_new_tokens=count, do_sample=False, use_cache=use_cache)
    assert found["graphed"][2] == expected[0, len(grown) :].tolist()
