"""Speech on a GPU: tokens and log-probabilities are those of transformers' whole model, and kernels compute what their
references do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from poison import poisoned
from speech_models import SpeechOracle, transcribing_oracle
from speech_requests import check, check_twice, generated

from compiled_engine import LLM
from compiled_engine.passes.speech.cross_attention import launch, reference

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_seqs": 5,
    "max_num_batched_tokens": 16,
    "num_blocks": 64,
    "block_size": 16,
    "skip_tokenizer_init": True,
    "audio_workers": 1,
    "progress": False,
}
GRAPHED = {"mode": "graphed", "compile_workers": 0}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> SpeechOracle:
    return transcribing_oracle(tmp_path_factory.mktemp("whisper"), encoder_layers=1, decoder_layers=2)


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize(
    "more",
    [{"mode": "eager", "audio_features": "workers"}, GRAPHED | {"audio_features": "device"}],
    ids=["eager", "graphed"],
)
def test_tokens_are_those_of_the_whole_model(oracle: SpeechOracle, more: dict[str, Any]) -> None:
    """Prompts run together, and again: each clip is encoded once, and the start compiles and captures all graphs."""
    with LLM(oracle.folder, **OPTIONS, **more) as llm:
        before = llm.metrics()
        check_twice(oracle, llm)
        after = llm.metrics()
    for name in ("compiles", "captures"):
        assert after[name] == before[name], name
    assert (after["graph_replays"] > 0) == (more["mode"] == "graphed")


@pytest.mark.usefixtures("exact_float32")
def test_drafts_and_preemption_change_no_token(oracle: SpeechOracle) -> None:
    few = OPTIONS | {"num_blocks": 9, "block_size": 4}
    with LLM(oracle.folder, speculative_config=DRAFTS, **few, **GRAPHED) as llm:
        check(oracle, generated(llm))
        metrics = llm.metrics()
    assert metrics["preemptions"] > 0
    assert metrics["draft_tokens"] > 0


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_the_kernel_of_cross_attention(dtype: torch.dtype, tolerance: float) -> None:
    """Tokens and clips of both sets of tiles, of heads that fill a tile and that do not."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    with poisoned():
        for tokens, clips, length, heads, size in (
            (1, 1, 1500, 20, 64),
            (5, 3, 70, 2, 16),
            (70, 9, 1500, 20, 64),
            (67, 2, 300, 4, 80),
        ):
            q_THd = random(heads, tokens, size).transpose(0, 1)
            k_EHd, v_EHd = random(clips * length, heads, size), random(clips * length, heads, size)
            clip_T = torch.randint(-1, clips, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
            found_THd = launch(q_THd, k_EHd, v_EHd, clip_T, length, 0.3)
            expected_THd = reference(q_THd.float(), k_EHd.float(), v_EHd.float(), clip_T, length, 0.3)
            torch.testing.assert_close(found_THd.float(), expected_THd, rtol=tolerance, atol=tolerance)
