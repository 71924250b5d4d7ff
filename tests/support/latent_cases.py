"""Attention over a cache of latent rows: cases, a reference by definition in float64, and rows rounded in transformers.

`main` runs the cases on the CPU and prints the mistakes as JSON, so that it can run in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.case import AttentionCase, KVFormat
from compiled_engine.attention.inputs import attention_inputs_of, step_of
from compiled_engine.attention.latent_codes import CodedRows
from compiled_engine.kv_format import AUTO, BY_OPTION, CODED, cache_dtype, head_width

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
    own: int = 16  # elements of a head's key without the rotated part
    value_dim: int = 12
    captured: bool = False  # the host does not know which requests are decodes, as in a captured graph
    most_bytes: int = 0  # memory for expanded keys and values; 0: that of the backend
    storage: str = AUTO  # of rows, see kv_format
    latent_size: float = 1.0  # of latents' elements; those of the weight are as many times larger as these are smaller

    def asked(self, device_type: str, dtype: torch.dtype) -> AttentionCase:
        """Return the facts of the case by which a backend decides whether it supports it."""
        cache = KVFormat(cache_dtype(self.storage, dtype), BLOCK_SIZE)
        sizes = {"value_dim": self.value_dim, "latent_dim": self.latent_dim, "key_dim": self.own + self.rotated}
        return AttentionCase(device_type, dtype, self.num_heads, 1, self.latent_dim + self.rotated, cache, **sizes)


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
    LatentCase("prompts that are expanded, and short questions", (*DECODES, (33, 98), (200, 3), (0, 170)), 3),
    LatentCase("decodes that the host does not know", ((15, 1), (200, 1), (200, 3), (0, 260)), 3, captured=True),
    LatentCase("expanded for two heads, then for one", ((0, 256),), 3, most_bytes=2 * 256 * 36 * 4),
    LatentCase("prompts that do not fit", ((0, 130), (40, 140), (0, 60)), 3, most_bytes=256 * 36 * 4),
    LatentCase("expanded, DeepSeek-V3", ((0, 257),), 1, 512, 64, padding=2, own=128, value_dim=128, captured=True),
    LatentCase("DeepSeek-V3", ((90, 1), (3, 2)), 16, latent_dim=512, rotated=64, own=128, value_dim=128),
    LatentCase("MiniCPM3", ((90, 1), (3, 2)), 8, latent_dim=256, rotated=32, own=64, value_dim=64),
)
CODED_CASES = tuple(
    replace(case, name=f"{elements.name}: {case.name}", storage=elements.name) for elements in CODED for case in CASES
)
# Alternately in each format, without long latents, for Triton's interpreter, which is slow.
SOME_CODED_CASES = tuple(
    CODED_CASES[place + place % 2 * len(CASES)] for place, case in enumerate(CASES) if case.latent_dim < 256
)


def expected_of(q_THd: torch.Tensor, weight_Cr: torch.Tensor, row_Lw: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the attention of a request's last tokens, [T, H, v], in float64, with expanded keys and values."""
    q_HTd, row_Lw = q_THd.double().transpose(0, 1), row_Lw.double()
    (num_heads, num_queries, key_dim), length = q_HTd.shape, len(row_Lw)
    latent_Lr, rotated_Lp = row_Lw.tensor_split((weight_Cr.shape[1],), dim=1)
    expanded_HLe = latent_Lr @ weight_Cr.double().unflatten(0, (num_heads, -1)).transpose(1, 2)
    own_HLn, values_HLv = expanded_HLe.tensor_split((key_dim - rotated_Lp.shape[1],), dim=2)
    keys_HLd = torch.cat((own_HLn, rotated_Lp.expand(num_heads, -1, -1)), dim=2)
    positions_T1 = torch.arange(length - num_queries, length)[:, None]
    hidden_TL = (torch.arange(length) > positions_T1).to(q_HTd.device)
    weights_HTL = (q_HTd @ keys_HLd.transpose(1, 2) * scale).masked_fill(hidden_TL, -math.inf).softmax(-1)
    return (weights_HTL @ values_HLv).transpose(0, 1)


def random_case(generator: torch.Generator, storage: str) -> LatentCase:
    """Return a case of random requests and sizes: decodes, then chunks and prompts."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    decodes = [(draw(0, 300), 1) for _ in range(draw(0, 6))]
    others = [(draw(0, 2) * draw(1, 100), draw(2, 150)) for _ in range(draw(0 if decodes else 1, 4))]
    heads, latent, rotated, own, value = draw(1, 20), 8 * draw(1, 12), 8 * draw(1, 4), 8 * draw(1, 4), 4 * draw(1, 6)
    spans = (*decodes, *others)
    return LatentCase(
        f"{storage}: {spans}, {heads} heads of {latent} + {rotated}, {own}, {value}",
        *(spans, heads, latent, rotated, draw(0, 3), own, value, bool(draw(0, 2))),
        storage=storage,
    )


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
    if case.captured:
        step["attention_inputs.host_3"][0] = 0
    inputs = attention_inputs_of(step, backend_name)
    assert inputs.seq_lens_R.numel() == num_rows
    # Rotated parts, which are not normalised, are larger than latents.
    sizes_w = torch.tensor([case.latent_size] * case.latent_dim + [3.0] * case.rotated).to(device, dtype)
    contexts = [random(sum(span), width) * sizes_w for span in case.spans]
    cache = _cache_with(case, contexts, tables, dtype, new=False)
    expected_cache = _cache_with(case, contexts, tables, dtype, new=True)
    q_THd = random(total, case.num_heads, case.own + case.rotated)
    weight_Cr = random(case.num_heads * (case.own + case.value_dim), case.latent_dim) * (
        case.latent_dim**-0.5 / case.latent_size
    )
    new_T1w = torch.cat([*(x[before:] for x, (before, _) in zip(contexts, case.spans, strict=True))])[:, None]
    new_T1w = torch.cat((new_T1w, new_T1w.new_full((case.padding, 1, width), math.nan)))
    out_THv = torch.full((total, case.num_heads, case.value_dim), math.nan, dtype=dtype, device=device)
    backend = get_backend(backend_name)
    backend.accept(case.asked(torch.device(device).type, dtype))
    backend.write_latents(new_T1w, cache, inputs.slot_mapping_T, case.latent_dim)
    if not torch.equal(cache.view(torch.uint8), expected_cache.view(torch.uint8)):
        return "the cache does not have the rows of all tokens, and nothing else"
    scale = (case.own + case.rotated) ** -0.5
    if case.most_bytes and backend_name == "triton":
        from compiled_engine.attention.backends.latent_step import attend_latents

        attend_latents(q_THd, weight_Cr, cache, out_THv, inputs, scale, case.most_bytes)
    else:
        backend.attend_latents(q_THd, weight_Cr, cache, out_THv, inputs, scale)
    if case.storage != AUTO:
        coded = (CodedRows.of(row_Lw, cache.dtype, case.latent_dim) for row_Lw in contexts)
        contexts = [rows.decoded(cache.dtype, torch.float64) for rows in coded]
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    for row_Lw, (start, end) in zip(contexts, pairwise(starts), strict=True):
        expected = expected_of(q_THd[start:end], weight_Cr, row_Lw, scale)
        error = (out_THv[start:end].double() - expected).abs()
        if not bool((error <= TOLERANCE[dtype] * (1 + expected.abs())).all()):
            return f"off by {float(error.max()):.3g} in the tokens from {start} to {end}"
    if not bool((out_THv[sum(lens) :] == 0).all()):
        return "the results of padding are not zero"
    return None


def _cache_with(
    case: LatentCase, contexts: list[torch.Tensor], tables: list[list[int]], dtype: torch.dtype, *, new: bool
) -> torch.Tensor:
    """Return a cache with the rows of earlier tokens, and with `new` of all tokens; bytes of other slots are 255.

    As numbers of a float type they are NaN. Block 0 belongs to no request.
    """
    stored, num_blocks = cache_dtype(case.storage, dtype), 1 + sum(map(len, tables[: len(contexts)]))
    width = head_width(stored, case.latent_dim + case.rotated, case.latent_dim)
    size = num_blocks * BLOCK_SIZE * width * stored.itemsize
    cache = torch.full((size,), 255, dtype=torch.uint8, device=contexts[0].device)
    cache = cache.view(stored).view(num_blocks, 1, BLOCK_SIZE, 1, width)
    for row_Lw, table, (before, _) in zip(contexts, tables, case.spans, strict=False):
        count = len(row_Lw) if new else before
        places = torch.tensor(table).to(cache.device).repeat_interleave(BLOCK_SIZE)[:count]
        places = places, torch.arange(count, device=cache.device) % BLOCK_SIZE
        if case.storage == AUTO:
            cache[places[0], 0, places[1], 0] = row_Lw[:count]
            continue
        rows = CodedRows.of(row_Lw[:count], stored, case.latent_dim)
        for plane, values in zip(CodedRows.planes(cache, case.latent_dim), rows, strict=True):
            plane[places] = values
    return cache


def round_rows(oracle: Any, dtype: str) -> None:
    """Have transformers' modules expand rows as a cache of 8 bits holds them. dtype: the option kv_cache_dtype."""
    stored = cache_dtype(BY_OPTION[dtype], torch.float32)

    def expand_kv(expand: Any, latents: torch.Tensor, rotated: torch.Tensor) -> Any:
        rows = CodedRows.of(torch.cat((latents, rotated), -1), stored, latents.shape[-1])
        return expand(*rows.decoded(stored, latents.dtype).split([latents.shape[-1], rotated.shape[-1]], -1))

    for module in oracle.modules():
        if hasattr(module, "expand_kv"):
            module.expand_kv = partial(expand_kv, module.expand_kv)


def main(backend_name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = tuple(random_case(generator, elements.name) for elements in CODED for _ in range(3))
    found = {
        f"{case.name} {dtype}": wrong
        for dtype, cases in (
            (torch.float32, (*CASES, *SOME_CODED_CASES, *drawn)),
            (torch.float16, (*CASES[3::5], *CODED_CASES[3::5])),
        )
        for case in cases
        if (wrong := mistake(backend_name, case, "cpu", dtype))
    }
    print(json.dumps(found))
