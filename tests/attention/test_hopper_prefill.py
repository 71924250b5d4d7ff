"""Prefill attention on Hopper against attention by its definition: ragged prompts, in steps that the kernel serves."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, Request, build, depends_on_garbage, mistake, step
from hopper import require_hopper

from compiled_engine.attention.backends.hopper_prefill import FEWEST_TOKENS, on_hopper
from compiled_engine.attention.backends.triton_prefill import prefill_tiles

pytestmark = pytest.mark.gpu

# Several tiles of keys; contexts that end inside a block, at its end, and at a tile's; a decode and padding between.
PROMPTS = (
    Request(300, 1),
    Request(1000, 1000),
    Request(1201, 850),
    Request(384, 130),
    Request(640, 300),
    Request(0, 5),
)
CASES = (
    Case("groups of 2", PROMPTS, num_heads=4, head_dim=128, bound=4096),
    Case("groups of 4", PROMPTS, num_heads=8, head_dim=128, bound=4096),
    Case("groups of 7, head size 64", PROMPTS, num_heads=14, bound=4096),
    Case("no groups", PROMPTS, num_heads=2, head_dim=128, bound=4096),
    Case("window", PROMPTS, head_dim=128, sliding_window=200, bound=4096),
    Case("block size 48", PROMPTS, head_dim=128, block_size=48, bound=4096),
    Case("block size 256", PROMPTS, head_dim=128, block_size=256, bound=4096),
)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    require_hopper()


@pytest.mark.product(one_in=4, each=("case",))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_attention(case: Case, dtype: torch.dtype) -> None:
    batch = build(case, dtype, "cuda")
    tiles = prefill_tiles(case.head_dim, dtype.itemsize, case.bound, True)
    assert on_hopper(batch.q_THd, batch.kv_cache_N2PKd, tiles.rows, batch.scoring)
    assert mistake(case, batch, step("triton", case, batch)) is None


def test_garbage_changes_no_bit() -> None:
    assert not depends_on_garbage("triton", CASES[0], "cuda", torch.bfloat16)


@pytest.mark.parametrize("change", ["few tokens", "soft cap", "sinks"])
def test_other_steps_are_served_by_the_kernel_for_all(change: str) -> None:
    prompts = PROMPTS[:2] if change == "few tokens" else PROMPTS
    case = Case("", prompts, soft_cap=20.0 * (change == "soft cap"), sinks=change == "sinks", bound=4096)
    batch = build(case, torch.bfloat16, "cuda")
    assert (batch.q_THd.shape[0] < FEWEST_TOKENS) == (change == "few tokens")
    assert not on_hopper(batch.q_THd, batch.kv_cache_N2PKd, 128, batch.scoring)
    assert mistake(case, batch, step("triton", case, batch)) is None
