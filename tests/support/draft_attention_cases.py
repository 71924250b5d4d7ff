"""Random batches of decodes with drafts for attention: a row for each token, of which those of a request follow one
another.

As a script it runs Triton's kernels in the interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from attention_cases import AUTO, CODED, Batch, Case, Request, build, mistake, step

# For backends with wide heads.
WIDE = ((8, 1, 512), (2, 1, 576), (4, 2, 320))
SHAPES = ((4, 2, 64), (8, 2, 128), (8, 8, 64), (16, 2, 80), (32, 1, 128), (2, 1, 256))
QUERY_LENS = (2, 3, 4, 6, 9)


def drafted(
    seed: int,
    dtype: torch.dtype,
    device: str,
    shapes: tuple[tuple[int, int, int], ...] = SHAPES,
    longest: int = 700,
    storages: tuple[str, ...] = (AUTO, AUTO, *(elements.name for elements in CODED)),
) -> tuple[Case, Batch]:
    """Return a batch in rows of one token. Some requests have fewer drafts, and the batch ends with padding."""
    random_ = random.Random(seed)
    heads, kv_heads, head_dim = random_.choice(shapes)
    query_len, count = random_.choice(QUERY_LENS), random_.randrange(1, 6)
    real = [random_.randrange(1, query_len + 1) for _ in range(count)] + [0] * random_.randrange(2)
    lens = [0 if n == 0 else random_.randrange(n, random_.choice((n + 1, 40, longest))) for n in real]
    case = Case(
        "",
        tuple(Request(seq_len, query_len if n == 0 else n) for n, seq_len in zip(real, lens, strict=True)),
        heads,
        kv_heads,
        head_dim,
        random_.choice((16, 64)),
        random_.choice((0, 0, 20, 200)),
        random_.choice((0, 0, 4096, 40_000)),
        random_.choice((0.0, 0.0, 5.0)),
        random_.random() < 0.3,
        storage=random_.choice(storages),
    )
    return case, in_rows(build(case, dtype, device, seed=seed), real, query_len)


def in_rows(batch: Batch, real: list[int], query_len: int) -> Batch:
    """Return the batch with a row for each token.

    real: how many of each request's rows are not padding; in `batch` a request's queries follow each other.
    """
    inputs, device = batch.inputs, batch.q_THd.device
    starts = inputs.query_start_loc_R1.tolist()
    source, seq_lens, table = [], [], []
    for request, n in enumerate(real):
        for query in range(query_len):
            exists = query < n
            source.append(starts[request] + (query if exists or n == 0 else 0))
            seq_lens.append(int(inputs.seq_lens_R[request]) - n + query + 1 if exists else 0)
            row = inputs.block_table_RB[request].clone()
            used = -(-seq_lens[-1] // batch.kv_cache_N2PKd.shape[2])
            # What stands behind a context is not attended to: 0, or in rows of padding the last block.
            row[used:] = 0 if exists else len(batch.kv_cache_N2PKd) - 1
            table.append(row)
    index_T, seq_lens_R = torch.tensor(source, device=device), torch.tensor(seq_lens, dtype=torch.int32, device=device)
    is_padding = seq_lens_R == 0
    tensors = {}
    for name in ("q_THd", "k_TKd", "v_TKd"):
        tensors[name] = getattr(batch, name)[index_T]
        tensors[name][is_padding] = float("nan")
    expected_THd = batch.expected_THd[index_T.cpu()]
    expected_THd[is_padding.cpu()] = 0
    bound = int(inputs.host_3[2])
    return replace(
        batch,
        **tensors,
        expected_THd=expected_THd,
        inputs=replace(
            inputs,
            query_start_loc_R1=torch.arange(len(source) + 1, dtype=torch.int32, device=device),
            seq_lens_R=seq_lens_R,
            block_table_RB=torch.stack(table),
            slot_mapping_T=torch.where(is_padding, -1, inputs.slot_mapping_T[index_T]),
            host_3=torch.tensor([len(source), query_len, bound], dtype=torch.int32),
        ),
    )


def wrong(backend: str, seed: int, dtype: torch.dtype, device: str, **limits: object) -> str | None:
    """Return the mistake of a backend in a random batch; None if there is none."""
    case, batch = drafted(seed, dtype, device, **limits)
    found = mistake(case, batch, step(backend, case, batch))
    return found and f"seed {seed}, {case}: {found}"


if __name__ == "__main__":
    for dtype, seeds in ((torch.float32, range(4)), (torch.float16, range(4, 6))):
        for shapes, some in ((SHAPES[:4], seeds), (WIDE, seeds[::2])):
            for seed in some:
                assert not (found := wrong("triton", seed, dtype, "cpu", shapes=shapes, longest=300)), found
    print("right")
