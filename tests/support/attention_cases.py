"""The table of attention cases, the batches they stand for, and an independent reference.

`main` runs the table on the CPU and prints the outcomes as one JSON object, by type and case, so that it can run in a
process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace

import torch

from compiled_engine.attention.backend import get_backend
from compiled_engine.attention.case import AttentionCase, KVFormat, Refused
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.attention.kv_codes import decode, encode, planes, scale_of
from compiled_engine.kv_format import AUTO, CODED, FP8, cache_dtype, head_width, is_coded

# Largest error allowed, absolute plus relative: fp32 sums in another order; bf16 and fp16 round weights and output.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Request:
    """A request's `query_len` new tokens, with which its context is seq_len long; seq_len 0 is a padding row."""

    seq_len: int
    query_len: int


@dataclass(frozen=True)
class Case:
    """The shape of a batch for attention; `build` makes the tensors. Leading requests with one query are decodes."""

    name: str
    requests: tuple[Request, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 0  # 0: the backend's default
    sliding_window: int = 0
    bound: int = 0  # of the contexts, as the host knows it
    soft_cap: float = 0.0
    sinks: bool = False
    storage: str = AUTO  # of keys and values, see kv_format
    image: int = 0  # so many new tokens of each request, after the first, see each other

    def sized(self, backend_name: str) -> Case:
        """Return the case with a block size: its own, or the default one of the backend."""
        return replace(self, block_size=self.block_size or get_backend(backend_name).default_block_size)

    def asked(self, device_type: str, dtype: torch.dtype) -> AttentionCase:
        """Return the facts of the case by which a backend decides whether it supports it."""
        return AttentionCase(
            device_type,
            dtype,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            KVFormat(cache_dtype(self.storage, dtype), self.block_size),
            self.sliding_window,
            self.soft_cap,
            self.sinks,
        )


@dataclass(frozen=True)
class Batch:
    """The tensors of a case, with garbage wherever a backend must neither read nor write.

    expected_THd: float64, from the dense reference. expected_cache_N2PKd: the cache after the step.
    """

    q_THd: torch.Tensor
    k_TKd: torch.Tensor
    v_TKd: torch.Tensor
    kv_cache_N2PKd: torch.Tensor
    inputs: AttentionInputs
    scoring: Scoring
    expected_THd: torch.Tensor
    expected_cache_N2PKd: torch.Tensor


def decodes(*seq_lens: int) -> tuple[Request, ...]:
    return tuple(Request(seq_len, 1) for seq_len in seq_lens)


PADDING = Request(0, 1)
PREFILLS = tuple(Request(length, length) for length in (1, 2, 15, 16, 17, 70))
# Several tiles of keys, and contexts that end inside a block, at its end, and at a tile's.
LONG_PREFILLS = (Request(300, 1), Request(260, 260), Request(421, 100), Request(256, 70), Request(0, 5))
MIXED = (*decodes(1, 33, 150), Request(5, 5), Request(61, 20), Request(32, 1), Request(47, 16), Request(0, 3))

CHUNKS = (Request(96, 16), Request(97, 16), Request(95, 16), Request(130, 1), Request(200, 2))
# A token and three drafted ones for each request.
DRAFTS = (Request(300, 4), Request(33, 4), Request(4, 4), Request(17, 4), Request(0, 4))
# Windows of Gemma 3, Phi-3, Gemma 2 and StarCoder 2, and Mistral 7B 0.1.
WINDOWS = (512, 1024, 2047, 2048, 4096)


def around(window: int) -> tuple[int, ...]:
    """Return context lengths below, at, just above and far above a window."""
    return window - 1, window, window + 1, window + 31, window * 3 // 2


def windowed(window: int, name: str = "") -> Case:
    """Return a case of decodes around a window, with a prompt and a chunk that are longer than the window."""
    requests = (*decodes(*around(window)), Request(3, 3), Request(window + 20, 37))
    return Case(name or f"window of {window}, mixed", requests, 2, 1, sliding_window=window)


CASES = (
    Case("one token", decodes(1)),
    Case("one decode", decodes(300)),
    Case("decodes", decodes(1, 16, 17, 31, 32, 33, 64, 100, 257)),
    Case("decodes with padding rows", (*decodes(40, 7), PADDING, PADDING)),
    Case("decodes of long contexts", decodes(1200, 1203), 4, 4, head_dim=256),
    Case("padding rows alone", (PADDING, PADDING)),
    Case("a prefill", (Request(100, 100),)),
    Case("prefills", PREFILLS),
    Case("chunks after context", CHUNKS),
    Case("chunk borders on block borders", (Request(32, 16), Request(64, 32), Request(48, 48))),
    Case("four queries a request", DRAFTS),
    Case("four queries a request, bound of 4096", DRAFTS, bound=4096),
    Case("mixed", MIXED),
    # Bounds of long contexts choose other tiles.
    Case("mixed, bound of 4096", MIXED, bound=4096),
    Case("prefills, bound of 4096", PREFILLS, bound=4096),
    Case("long prefills, bound of 4096", LONG_PREFILLS, bound=4096),
    Case("long prefills, head size 128, bound of 4096", LONG_PREFILLS, 2, 1, head_dim=128, bound=4096),
    *(Case(f"mixed, block size {size}", MIXED, block_size=size) for size in (24, 32, 64, 256)),
    Case("mixed, block size 256, bound of 4096", MIXED, block_size=256, bound=4096),
    Case("prefill over two large blocks", (Request(290, 40), Request(257, 257)), block_size=256),
    Case("decodes over two large blocks", (*decodes(256, 257, 300), PADDING), block_size=256),
    *(Case(f"heads {heads}:{kv}", MIXED, heads, kv) for heads, kv in ((2, 2), (6, 1), (14, 2), (16, 2), (32, 1))),
    Case("heads 14:2, bound of 4096", MIXED, 14, 2, bound=4096),
    *(Case(f"head size {size}", MIXED, head_dim=size) for size in (16, 20, 32, 80, 96, 112, 128, 160, 192, 256)),
    # Wide heads: of one tile that is padded or not, and of two, of which the second may be padded too.
    *(Case(f"head size {size}", MIXED, head_dim=size) for size in (264, 320, 384, 448, 512, 576)),
    Case("head size 512, heads 16:1", MIXED, 16, 1, head_dim=512),
    Case("head size 512, window, soft cap", MIXED, 2, 1, head_dim=512, sliding_window=20, soft_cap=20.0),
    Case("head size 576, decodes in splits, sinks", (*decodes(1, 40, 700), PADDING), 2, 1, head_dim=576, sinks=True),
    Case("head size 576, chunks, block size 32", CHUNKS, 2, 1, head_dim=576, block_size=32),
    Case("head size 80, bound of 4096", MIXED, head_dim=80, bound=4096),
    Case("head size 128, bound of 4096", MIXED, head_dim=128, bound=4096),
    Case("window, decodes", (*decodes(5, 20, 21, 100, 300), PADDING), sliding_window=20),
    Case("window, mixed", MIXED, sliding_window=20),
    Case("window, mixed, bound of 4096", MIXED, sliding_window=20, bound=4096),
    Case("window of one", MIXED, sliding_window=1),
    Case("window above every context", MIXED, sliding_window=4096),
    Case("window, block size 256", (*decodes(290, 30), Request(290, 40)), block_size=256, sliding_window=32),
    Case("window, long prefills, bound of 4096", LONG_PREFILLS, 2, 1, sliding_window=200, bound=4096),
    Case("window of 2048, decodes", decodes(*around(2048)), 2, 1, sliding_window=2048),
    *map(windowed, WINDOWS),
    Case("soft cap, one decode", decodes(300), soft_cap=5.0),
    Case("soft cap, mixed", MIXED, soft_cap=5.0),
    Case("soft cap, decodes in splits", (*decodes(1, 40, 700), PADDING), soft_cap=5.0),
    Case("soft cap, window, head size 256", MIXED, head_dim=256, soft_cap=20.0, sliding_window=20),
    Case("soft cap, bound of 4096", MIXED, soft_cap=5.0, bound=4096),
    Case("sinks, one decode", decodes(300), sinks=True),
    Case("sinks, mixed", MIXED, sinks=True),
    Case("sinks, decodes in splits", (*decodes(1, 40, 700), PADDING), num_heads=16, sinks=True),
    Case("sinks, heads 14:2, window", MIXED, num_heads=14, sinks=True, sliding_window=20),
    Case("sinks, bound of 4096", MIXED, sinks=True, bound=4096),
    Case("sinks and soft cap", MIXED, sinks=True, soft_cap=5.0),
    Case("padding rows alone, sinks", (PADDING, PADDING), sinks=True),
)
# Batches with images whose tokens see each other.
IMAGES = (
    Case("images of 19", MIXED, image=19),
    Case("images of 40, chunks and prefills", (*PREFILLS, *CHUNKS), image=40),
    Case("images of 40, window, soft cap", (*PREFILLS, *CHUNKS), image=40, sliding_window=40, soft_cap=5.0),
    Case("images of 90, bound of 4096", LONG_PREFILLS, 2, 1, image=90, bound=4096),
    Case("images of 90, window of 200", LONG_PREFILLS, 2, 1, image=90, sliding_window=200),
)
WIDE_IMAGES = Case("images of 40, head size 576", PREFILLS[3:], 2, 1, head_dim=576, image=40)
# In the interpreter, which takes its time for each tile: windows a sixteenth as long, which are still tiles, or one
# key less than one, and heads of which each does the same.
_SMALLER = (
    *(windowed(window // 16, f"window of {window}, mixed") for window in WINDOWS),
    Case("window of 2048, decodes", decodes(*around(128)), 2, 1, sliding_window=128),
    Case("decodes of long contexts", decodes(1200, 1203), 1, 1, head_dim=256),
    Case("window, long prefills, bound of 4096", LONG_PREFILLS[:2], 1, 1, sliding_window=200, bound=4096),
    Case("long prefills, bound of 4096", LONG_PREFILLS, 2, 1, bound=4096),
    Case("prefill over two large blocks", (Request(290, 40), Request(257, 257)), 1, 1, block_size=256),
)
# Cases that the interpreter runs with `--all` alone. In fp32 one tile serves every head size and bound, so the shorter
# of the long prefills take each branch of the longer, head sizes of 80, 256, 320 and 576 those of the sizes between,
# and "mixed" those of a bound with other heads or scores; windows of 20 and 128 keys take those of the others.
_WITH_ALL = (
    "long prefills, head size 128, bound of 4096",
    *(f"head size {size}" for size in (96, 112, 160, 192, 264, 384, 448)),
    *("heads 16:2", "heads 14:2, bound of 4096", "soft cap, bound of 4096", "sinks, bound of 4096"),
    *("head size 80, bound of 4096", "head size 128, bound of 4096", "window, mixed, bound of 4096"),
    *("prefills, bound of 4096", "mixed, block size 256, bound of 4096", "heads 6:1"),
    *(f"window of {size}, mixed" for size in (512, 1024, 2047, 4096)),
)
_BY_NAME = {case.name: case for case in _SMALLER}


def interpreted(*cases: Case, every: bool = True) -> tuple[Case, ...]:
    """Return the cases as Triton's interpreter runs them. every: also those that only `--all` runs."""
    return tuple(_BY_NAME.get(case.name, case) for case in cases if every or case.name not in _WITH_ALL)


# Batches of layers with and without a window that attend with one plan: decodes beside a prompt, and so many of them
# that they have a list of their own.
LAYERS = tuple(
    (window, requests)
    for window in WINDOWS
    for requests in ((*decodes(*around(window)), Request(40, 3)), decodes(*around(window) * 4))
)
SOME_LAYERS = next(layers for layers in LAYERS if layers[0] == 2048)
# Tiles depend on the type too, but not on what is masked or added to scores.
PLAIN = tuple(
    case
    for case in CASES
    if case.head_dim in (80, 128, 256, 512, 576)
    or (case.head_dim, case.block_size, case.sliding_window, case.soft_cap, case.sinks) == (64, 0, 0, 0, False)
)
# Caches of 8 bits: of the table what has to do with the cache, and of the rest a few.
CODED_CASES = tuple(
    replace(case, name=f"{elements.name}: {case.name}", storage=elements.name) for elements in CODED for case in CASES
)
SOME_CODED_CASES = tuple(
    case
    for case in CODED_CASES
    if case.name.split(": ", 1)[1]
    in (
        *("one token", "decodes", "decodes with padding rows", "padding rows alone", "chunks after context", "mixed"),
        *("mixed, bound of 4096", "mixed, block size 32", "heads 14:2", "heads 2:2", "head size 80", "head size 128"),
        *("head size 256", "window, mixed", "soft cap, mixed", "sinks, mixed", "sinks, decodes in splits"),
        *("head size 320", "head size 512", "head size 576, chunks, block size 32"),
    )
)
# A case for each tile of 16 bits: tiles depend on the head size, the bound and, of decodes, the number of programs;
# they hold whole groups of heads.
TILES = tuple(
    case
    for case in PLAIN
    if case.name
    in (
        "one decode",
        "decodes",
        "decodes with padding rows",
        "decodes of long contexts",
        "mixed",
        "mixed, bound of 4096",
        "heads 14:2",
        "head size 80",
        "head size 256",
        "head size 576",
        "long prefills, head size 128, bound of 4096",
    )
)
# Cases with padding rows, partly filled blocks and unused blocks.
WITH_GARBAGE = tuple(
    case
    for case in CASES
    if case.name
    in ("decodes with padding rows", "mixed", "mixed, bound of 4096", "window, decodes", "sinks and soft cap")
)


def build(
    case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", garbage: float = math.nan, seed: int = 0
) -> Batch:
    """Return random tensors for a case, with blocks in random order. Real values follow from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    block_size, num_kv_heads, head_dim = case.block_size or 16, case.num_kv_heads, case.head_dim
    blocks_of = [-(-request.seq_len // block_size) for request in case.requests]
    num_blocks = sum(blocks_of) + 3
    num_tokens = sum(request.query_len for request in case.requests)
    free_blocks = torch.randperm(num_blocks, generator=generator).tolist()
    # Scores that a cap bends, and sinks that take a good part of the weight.
    scale = (4 if case.soft_cap else 1) * head_dim**-0.5
    sinks_H = torch.randn(case.num_heads, generator=generator).add(2).to(dtype) if case.sinks else None
    # With sinks, as without: scales of an FP8 cache are optional.
    has_scales = case.storage == FP8 and not case.sinks
    kv_scales_2K = torch.rand(2, num_kv_heads, generator=generator).add(0.5) if has_scales else None
    scoring = Scoring(scale, case.sliding_window, case.soft_cap, sinks_H, kv_scales_2K)

    stored = cache_dtype(case.storage, dtype)
    cache_N2PKd = filled((num_blocks, 2, block_size, num_kv_heads, head_width(stored, head_dim)), stored, garbage)
    expected_cache_N2PKd = cache_N2PKd.clone()
    most_blocks = max(*blocks_of, -(-case.bound // block_size), 0)
    block_table_RB = torch.zeros(len(case.requests), most_blocks + 2, dtype=torch.int32)
    q_THd = torch.full((num_tokens, case.num_heads, head_dim), garbage, dtype=dtype)
    k_TKd = torch.full((num_tokens, num_kv_heads, head_dim), garbage, dtype=dtype)
    v_TKd = k_TKd.clone()
    slot_mapping_T = torch.full((num_tokens,), -1)
    expected_THd = torch.zeros(num_tokens, case.num_heads, head_dim, dtype=torch.float64)
    keys_ahead_T = torch.zeros(num_tokens, dtype=torch.int32)
    starts = [0]
    for row, request in enumerate(case.requests):
        tokens = slice(starts[-1], starts[-1] + request.query_len)
        starts.append(tokens.stop)
        if request.seq_len == 0:
            continue
        blocks = torch.tensor([free_blocks.pop() for _ in range(blocks_of[row])])
        block_table_RB[row, : len(blocks)] = blocks
        positions_L = torch.arange(request.seq_len)
        context = request.seq_len - request.query_len
        slots_L = blocks[positions_L // block_size] * block_size + positions_L % block_size
        k_LKd, v_LKd = torch.randn(2, request.seq_len, num_kv_heads, head_dim, generator=generator).to(dtype)
        q_QHd = torch.randn(request.query_len, case.num_heads, head_dim, generator=generator).to(dtype)
        q_THd[tokens], k_TKd[tokens], v_TKd[tokens] = q_QHd, k_LKd[context:], v_LKd[context:]
        slot_mapping_T[tokens] = slots_L[context:]
        read_LKd = []
        for index, values_LKd in enumerate((k_LKd, v_LKd)):
            block_L, offset_L = slots_L // block_size, slots_L % block_size
            if is_coded(stored):
                scale_K = scale_of(kv_scales_2K, index)
                new = encode(values_LKd, stored, scale_K)
                for number, plane in enumerate(planes(cache_N2PKd)):
                    plane[2 * block_L[:context] + index, offset_L[:context]] = new[number][:context]
                    planes(expected_cache_N2PKd)[number][2 * block_L + index, offset_L] = new[number]
                read_LKd.append(decode(new[0], new[1] if len(new) > 1 else scale_K, stored))
                continue
            cache_N2PKd[block_L[:context], index, offset_L[:context]] = values_LKd[:context]
            expected_cache_N2PKd[block_L, index, offset_L] = values_LKd
            read_LKd.append(values_LKd)
        k_LKd, v_LKd = read_LKd
        length = max(0, min(case.image, request.query_len - 1))
        keys_ahead_T[tokens.start + 1 : tokens.start + 1 + length] = torch.arange(length).flip(0)
        operands = (values.to(device) for values in (q_QHd, k_LKd, v_LKd))
        expected_THd[tokens] = dense(*operands, scoring, keys_ahead_T[tokens].to(device)).cpu()

    queries = [request.query_len for request in case.requests]
    num_decodes = next((row for row, query_len in enumerate(queries) if query_len != 1), len(queries))
    inputs = AttentionInputs(
        query_start_loc_R1=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens_R=torch.tensor([r.seq_len for r in case.requests], dtype=torch.int32, device=device),
        block_table_RB=block_table_RB.to(device),
        slot_mapping_T=slot_mapping_T.to(device),
        host_3=torch.tensor(
            [num_decodes, max(queries), max(case.bound, *(request.seq_len for request in case.requests), 0)],
            dtype=torch.int32,
        ),
        backend="",
        keys_ahead_T=keys_ahead_T.to(device) if case.image else None,
    )
    tensors = (tensor.to(device) for tensor in (q_THd, k_TKd, v_TKd, cache_N2PKd))
    scoring = scoring._replace(
        sinks_H=None if sinks_H is None else sinks_H.to(device),
        kv_scales_2K=None if kv_scales_2K is None else kv_scales_2K.to(device),
    )
    return Batch(*tensors, inputs, scoring, expected_THd, expected_cache_N2PKd)


def filled(shape: tuple[int, ...], dtype: torch.dtype, garbage: float) -> torch.Tensor:
    """Return a cache full of garbage. In 8 bits that is codes of 1, and scales that are NaN or large."""
    if not is_coded(dtype):
        return torch.full(shape, garbage, dtype=dtype)
    return torch.full(shape, 0xFF if math.isnan(garbage) else 0x46, dtype=torch.uint8).view(dtype)


def dense(
    q_QHd: torch.Tensor,
    k_LKd: torch.Tensor,
    v_LKd: torch.Tensor,
    scoring: Scoring,
    keys_ahead_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention by its definition, in float64: the queries are the last Q of L positions."""
    group = q_QHd.shape[1] // k_LKd.shape[1]
    k_LHd, v_LHd = (values.double().repeat_interleave(group, dim=1) for values in (k_LKd, v_LKd))
    scores_HQL = torch.einsum("qhd,lhd->hql", q_QHd.double(), k_LHd) * scoring.scale
    if scoring.soft_cap:
        scores_HQL = scoring.soft_cap * torch.tanh(scores_HQL / scoring.soft_cap)
    keys_L = torch.arange(k_LKd.shape[0], device=k_LKd.device)
    queries_Q1 = keys_L[-q_QHd.shape[0] :].unsqueeze(1)
    ahead_Q1 = 0 if keys_ahead_Q is None else keys_ahead_Q.unsqueeze(1)
    hidden_QL = keys_L > queries_Q1 + ahead_Q1
    if scoring.sliding_window:
        hidden_QL |= keys_L <= queries_Q1 - scoring.sliding_window
    weights_HQL = scores_HQL.masked_fill(hidden_QL, -math.inf).exp()
    totals_HQ1 = weights_HQL.sum(-1, keepdim=True)
    if scoring.sinks_H is not None:
        totals_HQ1 += scoring.sinks_H.to(totals_HQ1).exp().view(-1, 1, 1)
    return torch.einsum("hql,lhd->qhd", weights_HQL / totals_HQ1, v_LHd)


def step(backend_name: str, case: Case, batch: Batch) -> torch.Tensor:
    """Write K and V to the cache, then attend into an output full of NaN, which is returned."""
    backend = get_backend(backend_name)
    out_THd = torch.full_like(batch.q_THd, math.nan)
    slots_T, kv_scales_2K = batch.inputs.slot_mapping_T, batch.scoring.kv_scales_2K
    backend.write_kv(batch.k_TKd, batch.v_TKd, batch.kv_cache_N2PKd, slots_T, kv_scales_2K)
    backend.attend(batch.q_THd, batch.kv_cache_N2PKd, out_THd, batch.inputs, batch.scoring)
    return out_THd


def refusal(backend_name: str, case: AttentionCase) -> str | None:
    """Return why the backend refuses the case; None if it accepts it."""
    try:
        get_backend(backend_name).accept(case)
    except (Refused, ImportError) as error:
        return str(error)
    return None


def mistake(case: Case, batch: Batch, out_THd: torch.Tensor, tolerance: float | None = None) -> str | None:
    """Return the mistake in the cache or the output after a step, as text; None if both are right.

    tolerance: None for that of the output's dtype.
    """
    tolerance = tolerance or TOLERANCE[out_THd.dtype]
    cache_N2PKd, out_THd = batch.kv_cache_N2PKd.cpu(), out_THd.cpu()
    if not same_cache(cache_N2PKd, batch.expected_cache_N2PKd):
        return "the cache is not what was to be written"
    padding_T = batch.inputs.slot_mapping_T.cpu() < 0
    if out_THd[padding_T].any():
        return "padding rows are not zeros"
    error_THd = (out_THd.double() - batch.expected_THd).abs() / (1 + batch.expected_THd.abs())
    if not bool((error_THd <= tolerance).all()):
        return f"largest error {error_THd.max().item():.2g}, not at most {tolerance}"
    return None


def same_cache(one_N2PKd: torch.Tensor, other_N2PKd: torch.Tensor) -> bool:
    """Return whether two caches are equal, except for a few codes that are neighbours: devices divide differently."""
    if not is_coded(one_N2PKd.dtype):
        return torch.allclose(one_N2PKd, other_N2PKd, rtol=0, atol=0, equal_nan=True)
    (codes, *scales), (other_codes, *other_scales) = planes(one_N2PKd), planes(other_N2PKd)
    difference = (codes.int() - other_codes.int()).abs()
    same_scales = all(
        torch.allclose(mine, others, rtol=0, atol=0, equal_nan=True)
        for mine, others in zip(scales, other_scales, strict=True)
    )
    return same_scales and int(difference.max()) <= 1 and int(difference.sum()) <= difference.numel() // 500


def near_cache(one_N2PKd: torch.Tensor, other_N2PKd: torch.Tensor) -> bool:
    """Return whether two 8-bit caches are equal, except for codes that are neighbours."""
    one, other = (values_in(cache.cpu()) for cache in (one_N2PKd, other_N2PKd))
    largest = other.abs().amax(-1, keepdim=True)
    nearest = torch.where(other.isnan(), 0, largest / 60 if one_N2PKd.dtype is torch.uint8 else other.abs() / 7 + 0.01)
    return torch.equal(one.isnan(), other.isnan()) and bool(((one - other).nan_to_num().abs() <= nearest).all())


def values_in(cache_N2PKd: torch.Tensor) -> torch.Tensor:
    """Return the values that the codes of a cache stand for, those of an FP8 cache without their scales."""
    codes, *scales = planes(cache_N2PKd)
    return decode(codes, scales[0] if scales else None, cache_N2PKd.dtype)


def outcome(backend_name: str, case: Case, device: str, dtype: torch.dtype, tolerance: float | None = None) -> str:
    """Run a case. Returns "right", "refused: " and the reason, or "wrong: " and the mistake. tolerance: see mistake."""
    case = case.sized(backend_name)
    reason = refusal(backend_name, case.asked(torch.device(device).type, dtype))
    if reason:
        return f"refused: {reason}"
    batch = build(case, dtype, device)
    wrong = mistake(case, batch, step(backend_name, case, batch), tolerance)
    return f"wrong: {wrong}" if wrong else "right"


def wrong_layers(
    backend_name: str,
    window: int,
    requests: tuple[Request, ...],
    device: str,
    dtype: torch.dtype,
    captured: bool = False,
) -> list[str]:
    """Return the mistakes of layers with and without a window that attend with the same plan.

    captured: attend also in a CUDA graph.
    """
    backend = get_backend(backend_name)
    heads = 8 if len(requests) > 16 else 1
    block_size = backend.default_block_size
    cases = [Case("", requests, heads, heads, 64, block_size, size, 8192) for size in (window, 0, window)]
    batches = [build(case, dtype, device) for case in cases]
    facts = cases[0].asked(torch.device(device).type, dtype)
    length = backend.work_length(len(batches[0].q_THd), len(requests), facts)
    work_W = torch.full((length,), 77, dtype=torch.int32, device=device)
    batches = [replace(batch, inputs=replace(batches[0].inputs, work_W=work_W)) for batch in batches]

    def run() -> list[torch.Tensor]:
        backend.plan(batches[0].inputs, facts)
        return [step(backend_name, *layer) for layer in zip(cases, batches, strict=True)]

    def mistakes(outputs: list[torch.Tensor]) -> list[str]:
        each = (mistake(*layer) for layer in zip(cases, batches, outputs, strict=True))
        return [wrong for wrong in each if wrong]

    wrong = mistakes(run())
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
        graph.replay()
        wrong += mistakes(outputs)
    return wrong


def depends_on_garbage(backend_name: str, case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32) -> bool:
    """Return whether any bit of a real row depends on padding rows, unused slots or unused blocks."""
    outputs = []
    for garbage in (math.nan, 1e4):
        batch = build(case, dtype, device, garbage=garbage)
        outputs.append(step(backend_name, case, batch)[batch.inputs.slot_mapping_T >= 0])
    return not torch.equal(*outputs)


def depends_on_neighbours(backend_name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> bool:
    """Return whether any bit of a decode or a prompt's chunk depends on the batch's other requests.

    The batch's size stays the same. The host knows of no decodes, as when a graph of any batch is captured.
    """
    first, others = (Request(700, 1), Request(90, 40)), (*decodes(900, 300), Request(400, 37), Request(500, 50))
    case = Case("", (*first, *others), num_heads=4, num_kv_heads=1, bound=4096)
    batch = build(case, dtype, device)
    host_3 = torch.tensor([0, 129, 4096], dtype=torch.int32)
    starts_R1, seq_lens_R = batch.inputs.query_start_loc_R1, batch.inputs.seq_lens_R
    outputs = []
    for lens, seq_lens in (((1, 1, 37, 50), (900, 300, 400, 500)), ((1, 86, 1, 1), (1, 299, 330, 33))):
        ends = torch.tensor((1, 40, *lens), dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        seq_lens_R[2:] = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        starts_R1[1:] = ends
        changed = replace(batch, inputs=replace(batch.inputs, host_3=host_3))
        outputs.append(step(backend_name, case, changed)[:41])
    return not torch.equal(*outputs)


def listed_work(
    device: str, lens: list[int], seq_lens: list[int], num_kv_heads: int, queries: int, min_keys: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], bool]:
    """Return the splits and the tiles in a batch's work list, and whether all counts of arrived splits are 0."""
    from compiled_engine.attention.backends.decode_splits import MAX_LISTED_SPLITS
    from compiled_engine.attention.backends.work_list import WorkLayout, write_lists

    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    layout = WorkLayout(len(lens), num_kv_heads, queries)
    work_W = torch.full((layout.length(sum(lens)),), 77, dtype=torch.int32, device=device)
    inputs = AttentionInputs(
        query_start_loc_R1=starts.to(device),
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table_RB=torch.zeros(len(lens), 1, dtype=torch.int32, device=device),
        slot_mapping_T=torch.zeros(sum(lens), dtype=torch.int64, device=device),
        host_3=torch.zeros(3, dtype=torch.int32),
        backend="triton",
    )
    write_lists(inputs, work_W, layout, min_keys)
    work = work_W.tolist()
    splits = [divmod(entry, MAX_LISTED_SPLITS) for entry in work[layout.splits :][: work[0]]]
    length = layout.tile_length
    tiles = [work[start : start + length] for start in range(layout.tiles, layout.tiles + length * work[1], length)]
    arrived = work[layout.arrived : layout.splits] + [count for tile in tiles for count in tile[2:]]
    return splits, [(tile[0], tile[1]) for tile in tiles], not any(arrived)


def wrong_lists(device: str = "cpu", batches: int = 12) -> list[int]:
    """Return the seeds of random batches whose work list is wrong."""
    from compiled_engine.attention.backends.decode_splits import MAX_LISTED_SPLITS

    wrong = []
    for seed in range(batches):
        generator = random.Random(seed)
        count = generator.choice([1, 5, 20]) if seed else 300
        lens = [generator.choice([0, 1, 1, 2, 31, 32, 33, 700]) for _ in range(count)]
        seq_lens = [generator.choice([0, n, n + 5, n + 127, n + 3000]) for n in lens]
        queries, min_keys = generator.choice([1, 16, 64]), generator.choice([32, 128])
        most = [min(max(1, math.ceil(n / min_keys)), MAX_LISTED_SPLITS) for n in seq_lens]
        expected_splits = [(row, split) for row, n in enumerate(lens) if n == 1 for split in range(most[row])]
        expected_tiles = [
            (row, first) for row, n in enumerate(lens) if n > 1 for first in reversed(range(0, n, queries))
        ]
        if listed_work(device, lens, seq_lens, 3, queries, min_keys) != (expected_splits, expected_tiles, True):
            wrong.append(seed)
    return wrong


def run_in_the_interpreter(every: bool) -> dict[torch.dtype, tuple[Case, ...]]:
    """Return the cases by dtype: all in fp32, and tiles in fp16; the interpreter computes other dtypes wrongly."""
    return {
        torch.float32: interpreted(*CASES, every=every),
        torch.float16: interpreted(*(PLAIN if every else TILES)),
    }


def wrong_images(backend_name: str, device_type: str, dtype: torch.dtype) -> dict[str, str]:
    """Return the mistake in each case with images that is wrong, by the case's name."""
    cases = IMAGES if backend_name == "cpp" else (*IMAGES, WIDE_IMAGES)  # which has no such heads
    found = {case.name: outcome(backend_name, case, device_type, dtype) for case in cases}
    return {name: said for name, said in found.items() if said != "right"}


def main_of_images(backend_name: str) -> None:
    """Print the mistakes in cases with images as JSON."""
    print(json.dumps(wrong_images(backend_name, "cpu", torch.float32)))


def main(backend_name: str, every: bool) -> None:
    """Print the outcomes of all cases as JSON. every: also of the cases that only `--all` runs."""
    outcomes: dict[str, object] = {
        str(dtype): {case.name: outcome(backend_name, case, "cpu", dtype) for case in cases}
        for dtype, cases in run_in_the_interpreter(every).items()
    }
    outcomes["wrong lists"] = wrong_lists(batches=12 if every else 6)
    just_above = (Request(2049, 1), Request(3, 3))
    outcomes["wrong layers"] = wrong_layers(backend_name, 2048, just_above, "cpu", torch.float32)
    outcomes["neighbours"] = depends_on_neighbours(backend_name)
    outcomes["garbage"] = {case.name: depends_on_garbage(backend_name, case) for case in WITH_GARBAGE}
    print(json.dumps(outcomes))
