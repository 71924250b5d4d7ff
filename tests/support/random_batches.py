"""Random batches for attention backends: contexts, chunks and drafts of any length over every kind of cache.

`main` runs some of them on the CPU, so that it can do so in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import replace

import torch
from attention_cases import TOLERANCE, Case, Request, build, mistake, refusal

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.backends import triton_backend
from compiled_engine.kv_format import AUTO, FP8, INT8, is_coded

# The longest context of the three sizes, and the most tokens of a chunk.
SIZES = {"tiny": (240, 50), "small": (420, 150), "large": (3500, 2300)}


def random_case(seed: int, size: str) -> Case:
    """Return a random batch; equal seeds give equal batches."""
    draw = random.Random(seed)
    longest, most = SIZES[size]
    requests = [Request(draw.randint(1, longest), 1) for _ in range(draw.choice([0, 1, 1, 3, 7]))]
    kind = draw.choice(["decodes", "drafts", "chunks", "chunks", "chunks"])
    if kind == "drafts":
        query_len = draw.randint(2, 5)
        requests = [Request(draw.randint(query_len, longest), query_len) for _ in range(draw.randint(1, 4))]
    elif kind == "chunks":
        for _ in range(draw.randint(1, 4)):
            length = draw.randint(1, most)
            context = draw.choice([0, *(draw.randint(0, longest - length) for _ in range(3))])
            requests.append(Request(context + length, length))
    requests += [Request(0, draw.choice([1, 3]))] * draw.choice([0, 0, 2])
    if not requests:
        requests = [Request(draw.randint(1, longest), 1)]
    wide = draw.randrange(264, 577, 8)
    head_dims = {"tiny": [16, 32, 64, wide], "small": [16, 32, 64], "large": [64, 64, 80, 128, 128, 256, 512, wide]}
    heads, num_kv_heads = draw.choice([(1, 1), (2, 1), (4, 2), (7, 1), (6, 3)])
    return Case(
        f"seed {seed}, {kind}",
        tuple(requests),
        heads,
        num_kv_heads,
        draw.choice(head_dims[size]),
        draw.choice([0, 0, 0, 16, 32, 48, 256]),
        draw.choice([0, 1, 128, draw.randint(1, 40), draw.randint(1, longest // 2), draw.randint(1, longest)]),
        draw.choice([0, 0, 2 * longest, 4096]),
        draw.choice([0.0, 0.0, 0.0, 5.0]),
        draw.random() < 0.2,
        draw.choice([AUTO, INT8, FP8]),
    )


def verdict(backend_name: str, case: Case, device: str, dtype: torch.dtype, *, captured: bool = False) -> str:
    """Plan and run a batch. Returns "right", "refused" or the mistake. captured: in a graph."""
    case = case.sized(backend_name)
    asked = case.asked(device, dtype)
    if refusal(backend_name, asked):
        return "refused"
    backend, batch = get_backend(backend_name), build(case, dtype, device)
    slots_T, kv_scales_2K = batch.inputs.slot_mapping_T, batch.scoring.kv_scales_2K

    def run() -> torch.Tensor:
        length = backend.work_length(len(batch.q_THd), len(case.requests), asked)
        inputs = replace(batch.inputs, work_W=torch.empty(length, dtype=torch.int32, device=device))
        out_THd = torch.empty_like(batch.q_THd)
        backend.plan(inputs, asked)
        backend.write_kv(batch.k_TKd, batch.v_TKd, batch.kv_cache_N2PKd, slots_T, kv_scales_2K)
        backend.attend(batch.q_THd, batch.kv_cache_N2PKd, out_THd, inputs, batch.scoring)
        return out_THd

    out_THd = run()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_THd = run()
        graph.replay()
    # Decoded contexts are rounded once more.
    rounded = is_coded(batch.kv_cache_N2PKd.dtype) and backend_name == "triton" and dtype is not torch.float32
    return mistake(case, batch, out_THd, 3 * TOLERANCE[dtype] if rounded else None) or "right"


def is_poisoned() -> bool:
    return math.isnan(torch.empty(64).sum().item())


def main(first: int, count: int) -> None:
    """Print the mistakes in the interpreter, in 16-bit tiles.

    Contexts of 8-bit caches are decoded in every step with prompts, as large contexts are.
    """
    triton_backend.FEWEST_TOKENS = 1
    torch.set_num_threads(1)
    verdicts = {}
    for seed in range(first, first + count):
        case = random_case(seed, "tiny")
        verdicts[case.name] = verdict("triton", case, "cpu", torch.float16)
    wrong = {name: text for name, text in verdicts.items() if text not in ("right", "refused")}
    print(json.dumps({"poisoned": is_poisoned(), "right": [*verdicts.values()].count("right"), "wrong": wrong}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
