"""Attention over a cache of latent rows: cases, and a reference by definition in float64.

`main` runs the cases on the CPU and prints the mistakes as JSON, so that it can run in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.case import AttentionCase, KVFormat
from compiled_engine.attention.inputs import Scoring, attention_inputs_of, step_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BLOCK_SIZE = 16


@dataclass(frozen=True)
class LatentCase:
    """Requests as (tokens computed before, new tokens), followed by padding rows of one token."""

    name: str
    spans: tuple[tuple[int, int], ...]
    num_heads: int = 4
    latent_dim: int = 24
    rotated: int = 8
    padding: int = 0

    def asked(self, device_type: str, dtype: torch.dtype) -> AttentionCase:
        """Return the facts of the case by which a backend decides whether it supports it."""
        cache = KVFormat(dtype, BLOCK_SIZE)
        width = self.latent_dim + self.rotated
        return AttentionCase(device_type, dtype, self.num_heads, 1, width, cache, latent_dim=self.latent_dim)


DECODES = ((0, 1), (15, 1), (40, 1), (200, 1))
CASES = (
    LatentCase("one token", ((0, 1),)),
    LatentCase("decodes, the longer ones split", DECODES),
    LatentCase("a prompt", ((0, 37),)),
    LatentCase("decodes, a chunk and a prompt", (*DECODES, (33, 18), (0, 21))),
    LatentCase("padding after decodes", DECODES, padding=3),
    LatentCase("more heads than a tile has rows", (*DECODES, (20, 5)), num_heads=40),
    LatentCase("heads that do not divide a tile", (*DECODES, (20, 9)), num_heads=12),
    LatentCase("one head", (*DECODES, (7, 30)), num_heads=1),
    LatentCase("the sizes of DeepSeek-V3", ((90, 1), (3, 2)), num_heads=16, latent_dim=512, rotated=64),
    LatentCase("the sizes of MiniCPM3", ((90, 1), (3, 2)), num_heads=8, latent_dim=256, rotated=32),
)


def expected_of(q_THw: torch.Tensor, row_Lw: torch.Tensor, latent_dim: int, scale: float) -> torch.Tensor:
    """Return the attention of a request's last tokens, [T, H, r], in float64."""
    q_HTw, row_Lw = q_THw.double().transpose(0, 1), row_Lw.double()
    num_queries, length = q_HTw.shape[1], len(row_Lw)
    positions_T1 = torch.arange(length - num_queries, length)[:, None]
    hidden_TL = (torch.arange(length) > positions_T1).to(q_HTw.device)
    weights_HTL = (q_HTw @ row_Lw.t() * scale).masked_fill(hidden_TL, -math.inf).softmax(-1)
    return (weights_HTL @ row_Lw[:, :latent_dim]).transpose(0, 1)


def mistake(backend_name: str, case: LatentCase, device: str, dtype: torch.dtype) -> str | None:
    """Write and attend, with NaN in outputs, padding and slots without a row. Returns the mistake, or None."""
    generator = torch.Generator().manual_seed(7)
    width, lens = case.latent_dim + case.rotated, [new for _, new in case.spans]
    total = sum(lens) + case.padding
    num_rows = len(lens) + case.padding

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    blocks_each = max(-(-sum(span) // BLOCK_SIZE) for span in case.spans)
    tables = (torch.randperm(len(lens) * blocks_each, generator=generator) + 1).view(len(lens), -1).tolist()
    spans = [range(start, start + new) for start, new in case.spans] + [range(1)] * case.padding
    tables += [[0] * blocks_each] * case.padding
    step = step_of([0] * total, spans, tables, BLOCK_SIZE, torch.device(device))
    if case.padding:
        step["attention_inputs.seq_lens_R"][len(lens) :] = 0
        step["attention_inputs.slot_mapping_T"][sum(lens) :] = -1
    inputs = attention_inputs_of(step, backend_name)
    assert inputs.seq_lens_R.numel() == num_rows
    cache = torch.full((len(lens) * blocks_each + 1, 1, BLOCK_SIZE, 1, width), math.nan, dtype=dtype, device=device)
    contexts = [random(sum(span), width) for span in case.spans]
    for row_Lw, table, (before, _) in zip(contexts, tables, case.spans, strict=False):
        held = cache[torch.tensor(table), 0, :, 0].flatten(0, 1)
        held[:before] = row_Lw[:before]
        cache[torch.tensor(table), 0, :, 0] = held.unflatten(0, (-1, BLOCK_SIZE))
    q_THw = random(total, case.num_heads, width)
    new_T1w = torch.cat([*(x[before:] for x, (before, _) in zip(contexts, case.spans, strict=True))])[:, None]
    new_T1w = torch.cat((new_T1w, new_T1w.new_full((case.padding, 1, width), math.nan)))
    out_THr = torch.full((total, case.num_heads, case.latent_dim), math.nan, dtype=dtype, device=device)
    backend = get_backend(backend_name)
    backend.accept(case.asked(torch.device(device).type, dtype))
    backend.write_kv(new_T1w, new_T1w[..., : case.latent_dim], cache, inputs.slot_mapping_T)
    scale = width**-0.5
    backend.attend(q_THw, cache, out_THr, inputs, Scoring(scale))
    if not bool(cache[0].isnan().all()):
        return "padding is written to the cache"
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    for row_Lw, (start, end) in zip(contexts, pairwise(starts), strict=True):
        expected = expected_of(q_THw[start:end], row_Lw, case.latent_dim, scale)
        error = (out_THr[start:end].double() - expected).abs()
        if not bool((error <= TOLERANCE[dtype] * (1 + expected.abs())).all()):
            return f"off by {float(error.max()):.3g} in the tokens from {start} to {end}"
    if not bool((out_THr[sum(lens) :] == 0).all()):
        return "the results of padding are not zero"
    return None


def main(backend_name: str) -> None:
    found = {
        f"{case.name} {dtype}": wrong
        for dtype, cases in ((torch.float32, CASES), (torch.float16, CASES[3::5]))
        for case in cases
        if (wrong := mistake(backend_name, case, "cpu", dtype))
    }
    print(json.dumps(found))
