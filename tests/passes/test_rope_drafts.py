"""Rotation, KV write and attention of drafts in one kernel, against the two ops that it stands for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import AUTO
from draft_attention_cases import SHAPES, drafted
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from test_rope_attend import TOLERANCE

from compiled_engine.attention.backends import triton_backend
from compiled_engine.attention.backends.triton_rope_drafts import fits_one_program, rope_drafts
from compiled_engine.attention.inputs import AttentionInputs, Rotation, Scoring
from compiled_engine.attention.op import attend
from compiled_engine.passes.rope import rope_attend as op


def arguments_of(seed: int, dtype: torch.dtype, device: str, **limits: Any) -> tuple[list[Any], int]:
    """Of the op, with q, k and v as views of one tensor, and the rows of each request."""
    case, batch = drafted(seed, dtype, device, storages=(AUTO,), **limits)
    generator = torch.Generator().manual_seed(seed)
    parts = [batch.q_THd, batch.k_TKd, batch.v_TKd]
    q, k, v = (
        part.unflatten(-1, (-1, case.head_dim))
        for part in torch.cat([part.flatten(1) for part in parts], 1).split([p[0].numel() for p in parts], 1)
    )
    weights = tuple(torch.randn(case.head_dim, generator=generator).to(device, dtype) for _ in range(2))
    angles = torch.rand(len(q), 1, case.head_dim, generator=generator).mul(7)
    cos, sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    rotation = Rotation(
        *(weights if seed % 3 else (None, None)), 3e-4, cos, sin, *((0.5, True), (0.0, False))[seed % 2]
    )
    out = torch.full_like(batch.q_THd, math.nan)
    arguments = [
        q,
        k,
        v,
        batch.kv_cache_N2PKd,
        out,
        *rotation,
        *batch.scoring,
        *replace(batch.inputs, backend="triton").flat(),
    ]
    return arguments, int(batch.inputs.host_3[1])


def wrong(seed: int, dtype: torch.dtype, device: str, **limits: Any) -> str | None:
    """What the kernel does otherwise than the two ops; None where it is the same."""
    arguments, queries = arguments_of(seed, dtype, device, **limits)
    one, two = ([*arguments[:3], arguments[3].clone(), arguments[4].clone(), *arguments[5:]] for _ in range(2))
    rotation, inputs = Rotation(*one[5 : 5 + op.OF_ROTATION]), op.inputs_of(tuple(one))
    scoring = Scoring(*op.without_inputs(tuple(one[5:]))[op.OF_ROTATION :])
    rope_drafts(*one[:3], rotation, one[3], one[4], inputs, queries, scoring)
    op.unfused(attend, *two)
    for what, index in (("cache", 3), ("output", 4)):
        found, expected = one[index].double(), two[index].double()
        tolerance = TOLERANCE[dtype]
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=what == "cache"):
            return f"seed {seed}: the {what} is off by {(found - expected).abs().nan_to_num(9e9).max().item():.3g}"
    return f"seed {seed}: padding rows are not zeros" if one[4][inputs.seq_lens_R == 0].any() else None


@loops_to_a_loaded_bound
def test_in_the_interpreter() -> None:
    run = interpret(__file__, __file__)
    assert run.stdout.strip() == "right", run.stderr[-2000:] + run.stdout[-2000:]


# Head sizes that short contexts have kernels for.
SHORT_SHAPES = ((16, 8, 128), (32, 8, 128), (8, 2, 64), (16, 1, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [40, 200, 500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(dtype: torch.dtype, longest: int) -> None:
    found = [wrong(seed, dtype, "cuda", shapes=SHORT_SHAPES, longest=longest) for seed in range(24)]
    assert [each for each in found if each] == []


@pytest.mark.parametrize(
    ("num_requests", "queries", "context", "expected"),
    [(8, 4, 256, True), (9, 4, 256, False), (8, 4, 4096, False), (8, 17, 256, False)],
)
def test_the_backend_has_it_for_short_contexts_of_few_requests_and_drafts(
    num_requests: int, queries: int, context: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 16 multiprocessors, with two K/V heads."""
    served: list[int] = []
    monkeypatch.setattr(triton_backend, "rope_drafts", lambda *arguments: served.append(arguments[-2]))
    monkeypatch.setattr(triton_backend, "short_contexts", lambda *arguments: (256, 512))
    monkeypatch.setattr(triton_backend, "_num_multiprocessors", lambda device: 16)
    rows = num_requests * queries
    q, k, cache = torch.zeros(rows, 4, 64), torch.zeros(rows, 2, 64), torch.zeros(1, 2, 16, 2, 64)
    seq_lens, table = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 1, dtype=torch.int32)
    host, slots = torch.tensor([rows, queries, context], dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    inputs = AttentionInputs(torch.arange(rows + 1).int(), seq_lens, table, slots, host, "triton")
    operands = q, k, k, Rotation(None, None, 0.0, *torch.ones(2, rows, 1, 64)), cache, torch.empty_like(q)
    assert triton_backend.BACKEND.attend_unrotated(*operands, inputs, Scoring(1.0)) == expected
    assert served == [queries] * expected


def test_it_serves_the_queries_that_fit_a_program() -> None:
    assert fits_one_program(8, 4)
    assert not fits_one_program(9, 4)


if __name__ == "__main__":
    for seed in range(9):
        dtype = (torch.float32, torch.float16)[seed % 4 == 0]
        assert not (found := wrong(seed, dtype, "cpu", shapes=SHAPES[:3], longest=330)), found
    print("right")
