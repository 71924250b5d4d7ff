"""Which tiles are worth trying for a small-batch linear."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import triton

from compiled_engine.config import ModelConfig
from compiled_engine.passes.small_batch_linear_launch import Tiles

SHARED_MEMORY = 220 << 10
TOKEN_COUNTS = (1, 8, 32, 64)


@dataclass(frozen=True)
class LinearCase:
    """A [num_tokens, k] x [num_rows, k] product of a model; with silu_mul num_rows counts gate and up together."""

    name: str
    num_tokens: int
    num_rows: int
    k: int
    norm: bool
    silu_mul: bool
    residual: bool


def cases_of(model: ModelConfig, num_tokens: int) -> list[LinearCase]:
    """The five linears of a decoder-only model, as the passes leave them."""
    heads, width = model.num_heads + 2 * model.num_kv_heads, model.intermediate_size
    hidden = model.hidden_size
    return [
        LinearCase("qkv", num_tokens, heads * model.head_dim, hidden, True, False, False),
        LinearCase("o", num_tokens, hidden, model.num_heads * model.head_dim, False, False, True),
        LinearCase("gate_up", num_tokens, 2 * width, hidden, True, True, False),
        LinearCase("down", num_tokens, hidden, width, False, False, True),
        LinearCase("head", num_tokens, model.vocab_size, hidden, True, False, False),
    ]


def candidates(case: LinearCase) -> list[Tiles]:
    """Tiles that fit the registers and the shared memory of an SM."""
    if case.num_tokens == 1:
        return _one_token(case)
    tokens = min(64, max(8, triton.next_power_of_2(case.num_tokens)))
    splits = (1,) if case.silu_mul else (1, 2, 4, 8)
    outputs = case.num_rows // 2 if case.silu_mul else case.num_rows
    found = []
    for rows, block_k, split_k, warps, stages in product(
        (16, 32, 64, 128), (64, 128, 256, 512), splits, (4, 8), (3, 5)
    ):
        stage = (rows * (2 if case.silu_mul else 1) + tokens) * block_k * 2
        programs = -(-outputs // rows) * split_k
        if stage * stages > SHARED_MEMORY or block_k * split_k > case.k or (rows < 32 and warps == 8):
            continue
        if not 60 <= programs <= 10000 or stage < 4 << 10:
            continue
        found.append(Tiles(tokens, rows, block_k, split_k, warps, stages))
    return found


def _one_token(case: LinearCase) -> list[Tiles]:
    found = []
    for rows, block_k, warps in product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)):
        weights = rows * (2 if case.silu_mul else 1) * block_k // (32 * warps)
        if block_k <= triton.next_power_of_2(case.k) and 16 <= weights <= 128:
            found.append(Tiles(1, rows, block_k, num_warps=warps))
    return found
