"""Attention in both directions among the tokens of each request: cases, and a reference by definition in float64.

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
from compiled_engine.attention.case import AttentionCase
from compiled_engine.attention.inputs import Scoring, attention_inputs_of, step_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class PackedCase:
    """Texts of these lengths; a negative length is a row of padding tokens."""

    name: str
    lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    sliding_window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    merged: bool = False
    farthest: int = 0  # distance from which on biases by relative position are equal; 0: none

    @property
    def num_biases(self) -> int:
        return 2 * self.farthest + 1 if self.farthest else 0

    def asked(self, device_type: str, dtype: torch.dtype) -> AttentionCase:
        """Return the facts of the case by which a backend decides whether it supports it."""
        sizes = self.num_heads, self.num_kv_heads, self.head_dim
        options = self.sliding_window, self.soft_cap, self.sinks
        return AttentionCase(device_type, dtype, *sizes, None, *options, causal=False, num_biases=self.num_biases)


RAGGED = (1, 2, 15, 16, 17, 70, 33)
CASES = (
    PackedCase("one token", (1,)),
    PackedCase("short texts", (3, 16, 7, 1, 12)),
    PackedCase("ragged", RAGGED),
    PackedCase("equal lengths", (20, 20, 20, 5, 5)),
    PackedCase("a text of several tiles", (300, 5)),
    PackedCase("padding behind the texts", (9, 40, -23)),
    PackedCase("padding alone", (-4, -8)),
    PackedCase("rows without tokens", (9, 40, -3, 0, 0)),
    PackedCase("q, k and v in one tensor", RAGGED, merged=True),
    PackedCase("window", (1, 60, 150, 8), sliding_window=9),
    PackedCase("window of one", (40, 3), sliding_window=1),
    PackedCase("window longer than the texts", RAGGED, sliding_window=512),
    PackedCase("soft cap and sinks", RAGGED, soft_cap=5.0, sinks=True),
    PackedCase("window and soft cap", (70, 40), sliding_window=20, soft_cap=5.0),
    PackedCase("biases by relative position", (*RAGGED, 300), farthest=20),
    PackedCase("biases that shared keys do not share", RAGGED, num_heads=6, num_kv_heads=2, farthest=128),
    PackedCase("biases, a window and sinks", (1, 60, 150), sliding_window=30, sinks=True, farthest=9),
    PackedCase("shared keys", RAGGED, num_heads=6, num_kv_heads=2),
    PackedCase("more requests than are searched at a time", tuple([1, 2, 3, 0] * 140), num_heads=1, num_kv_heads=1),
    *(PackedCase(f"head size {size}", (33, 70), 2, 2, size) for size in (16, 64, 72, 80, 128, 256, 320, 576)),
    PackedCase("windows of an image", (64,) * 5 + (16, 4), 2, 2, 80, merged=True),
)


def expected_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, biases_HW: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the attention of one text, [T, H, d], in float64."""
    group = q.shape[1] // k.shape[1]
    q_HTd, k_HTd, v_HTd = (
        x.double().transpose(0, 1).repeat_interleave(n, 0) for x, n in ((q, 1), (k, group), (v, group))
    )
    scores = q_HTd @ k_HTd.transpose(1, 2) * scoring.scale
    if scoring.soft_cap:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    positions = torch.arange(len(q))
    if biases_HW is not None:
        farthest = biases_HW.shape[1] // 2
        apart = (positions - positions[:, None]).clamp(-farthest, farthest)
        scores = scores + biases_HW.double()[:, (apart + farthest).to(scores.device)]
    if scoring.sliding_window:
        far = (positions[:, None] - positions).abs() >= scoring.sliding_window
        scores = scores.masked_fill(far.to(scores.device), -math.inf)
    if scoring.sinks_H is not None:
        sinks = scoring.sinks_H.double().view(-1, 1, 1).expand(*scores.shape[:2], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v_HTd).transpose(0, 1)


def mistake(backend_name: str, case: PackedCase, device: str, dtype: torch.dtype) -> str | None:
    """Run the case on NaN outputs, with NaN in padding. Returns the mistake, or None."""
    generator = torch.Generator().manual_seed(7)
    lens = [abs(length) for length in case.lens]
    total = sum(lens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, k, v = (random(total, heads, case.head_dim) for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads))
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    for length, (start, end) in zip(case.lens, pairwise(starts), strict=True):
        if length < 0:
            q[start:end], k[start:end], v[start:end] = math.nan, math.nan, math.nan
    if case.merged:
        q, k, v = torch.cat((q, k, v), 1).split((case.num_heads, case.num_kv_heads, case.num_kv_heads), 1)
    step = step_of(
        [0] * total, [range(length) for length in lens], [list(range(99))] * len(lens), 16, torch.device(device)
    )
    step["attention_inputs.seq_lens_R"].copy_(torch.tensor([max(0, length) for length in case.lens]))
    inputs = attention_inputs_of(step, backend_name)
    sinks_H = random(case.num_heads) if case.sinks else None
    biases_HW = random(case.num_heads, case.num_biases) * 3 if case.num_biases else None
    scoring = Scoring(case.head_dim**-0.5, case.sliding_window, case.soft_cap, sinks_H)
    backend = get_backend(backend_name)
    backend.accept(case.asked(torch.device(device).type, dtype))
    out = torch.full((total, case.num_heads, case.head_dim), math.nan, dtype=dtype, device=device)
    backend.attend_packed(q, k, v, out, inputs, scoring, biases_HW)
    for length, (start, end) in zip(case.lens, pairwise(starts), strict=True):
        if length < 1:
            continue
        expected = expected_of(q[start:end], k[start:end], v[start:end], scoring, biases_HW)
        error = (out[start:end].double() - expected).abs()
        if not bool((error <= TOLERANCE[dtype] * (1 + expected.abs())).all()):
            return f"off by {float(error.max()):.3g} in the text from {start} to {end}"
    return None


def main(backend_name: str) -> None:
    found = {
        f"{case.name} {dtype}": wrong
        for dtype, cases in ((torch.float32, CASES), (torch.float16, CASES[::3]))
        for case in cases
        if (wrong := mistake(backend_name, case, "cpu", dtype))
    }
    print(json.dumps(found))
