"""Which tiles are worth trying for a small-batch linear."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from compiled_engine.config import ModelConfig, local_share
from compiled_engine.kernels.launch_arguments import next_power_of_2
from compiled_engine.passes.small_batch_linear_op import Tiles

SHARED_MEMORY = 220 << 10


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


def cases_of(model: ModelConfig, num_tokens: int, num_ranks: int = 1) -> list[LinearCase]:
    """The five linears of a decoder-only model, as the passes leave them: with several ranks those that each has, whose
    norms and residual adds are part of the sums between."""
    model, alone = local_share(model, num_ranks), num_ranks == 1
    heads, width = model.num_heads + 2 * model.num_kv_heads, model.intermediate_size
    hidden = model.hidden_size
    return [
        LinearCase("qkv", num_tokens, heads * model.head_dim, hidden, alone, False, False),
        LinearCase("o", num_tokens, hidden, model.num_heads * model.head_dim, False, False, alone),
        LinearCase("gate_up", num_tokens, 2 * width, hidden, alone, True, False),
        LinearCase("down", num_tokens, hidden, width, False, False, alone),
        LinearCase("head", num_tokens, model.vocab_size, hidden, alone, False, False),
    ]


def candidates(case: LinearCase) -> list[Tiles]:
    """Tiles that fit the registers and the shared memory of an SM, and give every SM something to do."""
    if case.num_tokens == 1:
        return _one_token(case)
    tokens = min(64, max(8, next_power_of_2(case.num_tokens)))
    return [*_split_between_programs(case, tokens), *_split_between_warps(case, tokens)]


def _one_token(case: LinearCase) -> list[Tiles]:
    halves = 2 if case.silu_mul else 1
    found = []
    for outputs, block_k, warps in product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)):
        rows = outputs * halves
        # Of a tile, as many elements for each thread: too few leave the memory idle, too many fill the registers.
        if block_k <= next_power_of_2(case.k) and 16 <= rows * block_k // (32 * warps) <= 128:
            found.append(Tiles(1, rows, block_k, num_warps=warps))
    return found


def _split_between_programs(case: LinearCase, tokens: int) -> list[Tiles]:
    splits = (1, 2, 4, 8) if case.num_rows <= 8192 and not case.silu_mul else (1,)
    norm_inside = (False, True) if case.norm and tokens <= 8 else (False,)
    found = []
    for rows, block_k, split_k, stages, inside in product((32, 64, 128), (64, 128, 256), splits, (3, 5), norm_inside):
        programs = -(-case.num_rows // rows) * split_k
        step = (rows + tokens) * block_k * 2
        if (
            split_k * block_k * 2 <= case.k
            and programs >= 60
            and (split_k == 1 or programs <= 450)
            and step * stages >= 32 << 10
            and step * (stages - 1) <= SHARED_MEMORY
            and not (inside and split_k > 1)
        ):
            found.append(Tiles(tokens, rows, block_k, 1, split_k, num_stages=stages, norm_inside=inside))
    return found


def _split_between_warps(case: LinearCase, tokens: int) -> list[Tiles]:
    """Where there are few tokens: their tile is as deep as the weight's, whatever the number of its rows."""
    found = []
    for rows, block_k, stages, inside in product((16, 32), (64, 128, 256), (3, 5), (False, True)):
        steps = case.k / (4 * block_k)
        memory = (rows + tokens) * 4 * block_k * 2 * (stages - 1 if steps > 1 else 1)
        if (
            tokens <= 8
            and (steps == 1 or (steps > 1 and steps.is_integer()))
            and (steps > 1 or stages == 3)
            and memory <= SHARED_MEMORY
            and (case.norm or not inside)
            and rows * block_k >= 2048
            and case.num_rows >= 60 * rows
        ):
            found.append(Tiles(tokens, rows, block_k, 4, num_stages=stages, norm_inside=inside))
    return found
