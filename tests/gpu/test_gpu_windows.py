"""Engines whose layers have windows and whose prompts come in chunks, over every kind of cache: no step reads memory
that nobody has written."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from folders import SUPPORT

from compiled_engine import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 132}
SIZES |= {"num_hidden_layers": 4, "intermediate_size": 512, "max_position_embeddings": 4096, "sliding_window": 200}
# Chunks of the long prompts begin off every border, as decodes of the first take a token of each step.
PROMPTS = [[(7 * i + 3 * j * j) % 130 for j in range(length)] for i, length in enumerate((9, 1700, 3100))]
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 3200, "num_blocks": 700, "max_num_batched_tokens": 710}
# So many times nearer to those of transformers are log-probabilities, rounded as they are, than those of the next
# position.
NEARER = 2
CASES = {
    **{
        f"{mode}, {storage}": {"mode": mode, "kv_cache_dtype": storage}
        for mode in ("eager", "graphed")
        for storage in ("auto", "int8")
    },
    "graphed, fp8": {"mode": "graphed", "kv_cache_dtype": "fp8"},
    "graphed, int8, large steps": {"mode": "graphed", "kv_cache_dtype": "int8", "max_num_batched_tokens": 2110},
}


def check(folder: Path, oracle: Any, **options: Any) -> None:
    """Compare the log-probabilities of the prompts' tokens with those of transformers in fp32."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=0, temperature=0, detokenize=False)
    compiling = {} if options["mode"] == "eager" else {"compile_workers": 0}
    with LLM(folder, progress=False, device="cuda", **OPTIONS | compiling | options) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    found, unrelated = [], []
    for output, ids in zip(outputs, PROMPTS, strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids], device="cuda")).logits[0].log_softmax(-1).cpu()
        got = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        places, tokens = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
        right = expected[places, tokens]
        found += (torch.tensor(got) - right).abs().nan_to_num(torch.inf).tolist()
        unrelated += (expected[places + 1, tokens] - right).abs().tolist()
    assert max(found) < torch.inf
    assert median(found) < median(unrelated) / NEARER


@pytest.fixture(scope="module", params=[64, 128], ids=["heads of 64", "heads of 128"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_checkpoint(folder, "mistral", **SIZES | {"head_dim": request.param}).cuda()


@pytest.mark.parametrize("name", CASES)
def test_one_gpu(name: str, checkpoint: tuple[Path, Any]) -> None:
    check(*checkpoint, **CASES[name])


@pytest.mark.gpu_pair
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["mode"] != "eager"])  # has no stages
def test_two_stages(name: str, checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(SUPPORT / "poisoned_processes"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    check(*checkpoint, pipeline_parallel_size=2, **CASES[name])
