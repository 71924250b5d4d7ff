"""The op of cross-attention: its reference against plain torch, and its kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from hopper_compilation import compiled_for_hopper
from interpreting_process import interpret

from compiled_engine.passes.speech.cross_attention import reference
from compiled_engine.passes.speech.cross_attention_kernel import NUM_WARPS, cross_attention_kernel, keys_at_a_time

INTERPRETED = """
import torch
from poison import poisoned
from compiled_engine.passes.speech.cross_attention import launch, reference

generator = torch.Generator().manual_seed(0)
cases = [(1, 1, 300, 1, 64), (5, 3, 70, 2, 16), (7, 2, 256, 3, 24), (67, 3, 70, 2, 8)]
with poisoned():
    for tokens, clips, length, heads, size in cases:
        q = torch.randn(heads, tokens, size, generator=generator).transpose(0, 1)
        k, v = (torch.randn(clips * length, heads, size, generator=generator) for _ in range(2))
        clip = torch.randint(-1, clips, (tokens,), generator=generator, dtype=torch.int32)
        found = launch(q, k, v, clip, length, 0.3)
        torch.testing.assert_close(found, reference(q, k, v, clip, length, 0.3), rtol=2e-5, atol=2e-5)
print("right")
"""


def test_each_token_attends_to_its_own_clip() -> None:
    generator = torch.Generator().manual_seed(1)
    length, scale = 6, 0.4
    q_THd = torch.randn(5, 2, 8, generator=generator)
    k_EHd, v_EHd = (torch.randn(3 * length, 2, 8, generator=generator) for _ in range(2))
    clips = [2, -1, 0, 2, 1]
    found_THd = reference(q_THd, k_EHd, v_EHd, torch.tensor(clips, dtype=torch.int32), length, scale)
    for token, clip in enumerate(clips):
        if clip < 0:
            assert not found_THd[token].any()
            continue
        rows = slice(clip * length, (clip + 1) * length)
        weights_HL = torch.einsum("hd,lhd->hl", q_THd[token], k_EHd[rows] * scale).softmax(-1)
        expected_Hd = torch.einsum("hl,lhd->hd", weights_HL, v_EHd[rows])
        torch.testing.assert_close(found_THd[token], expected_Hd, rtol=1e-5, atol=1e-5)


def test_the_kernel_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", INTERPRETED)
    assert run.stdout.strip() == "right", run.stderr[-2000:]


@pytest.mark.parametrize("size", [64, 80])
def test_the_kernel_compiled_for_hopper(size: int) -> None:
    """Needs no GPU."""
    block_d = 64 if size == 64 else 128
    constants = {"LENGTH": 1500, "NUM_HEADS": 20, "HEAD_DIM": size, "BLOCK_D": block_d}
    program = compiled_for_hopper(
        cross_attention_kernel,
        constants | {"BLOCK_L": keys_at_a_time(block_d), "DEPENDENT_LAUNCH": 1},
        {"clip_ptr": "*i32", "scale": "fp32"},
        aligned=(),
        num_warps=NUM_WARPS,
    )
    assert "griddepcontrol.wait" in program.asm["ptx"]
