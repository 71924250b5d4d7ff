"""Drafts of MTP layers on a GPU change no token, and those of an exact layer are all right, in graphs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mtp_layers import DEEPSEEK, GLM, MIMO, QWEN_VISION, MtpCase, make_exact, write_mtp_checkpoint
from test_gpu_speculation import ENGINE, MODES

from compiled_engine import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]
PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * j * j) % 131 for j in range(5 + 11 * i)]} for i in range(8)] * 2
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3, "draft_sharpness": 1}
# One of those that compile recurrences, which the seed chooses.
DRAWN = pytest.mark.product(one_in=1000)


@pytest.mark.parametrize(
    ("case", "mode", "exact"),
    [
        pytest.param(MIMO, "piecewise", False, id="mimo, piecewise"),
        pytest.param(QWEN_VISION, "graphed", False, id="qwen3_5, graphed", marks=DRAWN),
        pytest.param(MIMO, "graphed", True, id="exact mimo, graphed"),
        pytest.param(GLM, "graphed", True, id="exact glm, graphed"),
        pytest.param(DEEPSEEK, "graphed", False, id="deepseek, graphed"),
        pytest.param(QWEN_VISION, "graphed", True, id="exact qwen3_5, graphed", marks=DRAWN),
    ],
)
def test_drafts_of_an_mtp_layer(case: MtpCase, mode: str, exact: bool, tmp_path: Path) -> None:
    written = write_mtp_checkpoint(tmp_path, case)
    if exact:
        make_exact(written)
    model = {"model": str(tmp_path), "skip_tokenizer_init": True, "num_blocks": 200}
    found = []
    for drafts in ({}, {"speculative_config": MTP}):
        with LLM(**ENGINE | model | MODES[mode], **drafts) as llm:
            for temperature in (0.0, 0.9):
                params = [
                    SamplingParams(seed=i, max_tokens=9 + i, temperature=temperature, ignore_eos=True, detokenize=False)
                    for i in range(len(PROMPTS))
                ]
                outputs = llm.generate(PROMPTS, params, use_tqdm=False)
                found.append([list(output.outputs[0].token_ids) for output in outputs])
            llm.core.check_integrity()
            metrics = llm.metrics()
    assert found[:2] == found[2:]
    assert metrics["draft_tokens"] > 100
    assert not exact or metrics["accepted_tokens"] == metrics["draft_tokens"]
