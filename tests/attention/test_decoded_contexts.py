"""Contexts decoded before prefill kernels read them: interpreted, on a GPU, and how many fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from attention_cases import Case, Request, build, decodes, mistake, outcome, step
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret

from compiled_engine.attention.backends import triton_tile
from compiled_engine.attention.backends.decode_splits import BatchFacts
from compiled_engine.attention.backends.decoded_contexts import (
    FEWEST_TOKENS,
    MOST_CONTEXT_PER_TOKEN,
    decode_contexts,
    prefill_sources,
    workspace_blocks,
)
from compiled_engine.attention.backends.triton_backend import MAX_HEAD_DIM
from compiled_engine.attention.backends.triton_prefill import SHORT_CONTEXT, fewest_rows, prefill, prefill_tiles
from compiled_engine.attention.backends.triton_write_kv import write_kv
from compiled_engine.attention.backends.work_list import WorkLayout, write_lists
from compiled_engine.kv_format import CODED

NAMES = [elements.name for elements in CODED]
REQUESTS = (*decodes(1, 33), Request(50, 50), Request(61, 20), Request(5, 5), Request(0, 3))
CASES = (
    Case("plain", REQUESTS),
    Case("window, large blocks", REQUESTS, block_size=32, sliding_window=20),
    Case("soft cap, sinks, odd heads", REQUESTS, 6, 2, head_dim=24, soft_cap=5.0, sinks=True),
    Case("wide heads", REQUESTS, 2, 1, head_dim=576, sliding_window=20),
    Case("padding alone", (Request(0, 1), Request(0, 20), Request(0, 3))),
    Case("contexts that do not fit", (Request(300, 3), Request(40, 20))),
)
NUM_SMS = 16
# Windows that begin inside a block, at its border and at a tile's, of prompts that begin anywhere.
CHUNKS = (*decodes(1, 33), Request(400, 140), Request(333, 70), Request(150, 149), Request(257, 2), Request(21, 21))
WINDOWED = tuple(
    Case(f"window of {window}, blocks of {block_size}", CHUNKS, 2, 1, 16, block_size, window)
    for window, block_size in ((1, 16), (20, 16), (128, 16), (130, 48), (200, 256))
)
# Keys of the tiles in 16 bits: short and long contexts, and Hopper's, whose kernel the interpreter does not run.
TILES_OF_KEYS = 32, 64, 128


def difference(case: Case, dtype: torch.dtype = torch.float32, keys: int = 0) -> str | None:
    """Return the fault of the prompts' results, which come from the workspace, or from codes if contexts do not fit.

    keys: of a tile; 0: as many as the kernel chooses.
    """
    case = case.sized("triton")
    batch = build(case, dtype)
    cache_N2PKd, scoring = batch.kv_cache_N2PKd, batch.scoring
    write_kv(batch.k_TKd, batch.v_TKd, cache_N2PKd, batch.inputs.slot_mapping_T, scoring.kv_scales_2K, False)
    facts = BatchFacts.of(batch.inputs.sizes, case.num_kv_heads, NUM_SMS)
    tiles = prefill_tiles(case.head_dim, dtype.itemsize, facts.max_seq_len, False)
    tiles = replace(tiles, keys=keys or tiles.keys)
    layout = WorkLayout(facts.num_requests, case.num_kv_heads, tiles.rows // (case.num_heads // case.num_kv_heads))
    work_W = torch.full((layout.length(facts.num_tokens),), 77, dtype=torch.int32)
    write_lists(batch.inputs, work_W, layout, facts.min_keys)
    contexts = decode_contexts(batch.q_THd, cache_N2PKd, batch.inputs, work_W, facts, scoring)
    all_tiles, fits = int(work_W[1]), case.name != CASES[-1].name
    if contexts.num_tiles_2.tolist() != ([all_tiles, 0] if fits else [0, all_tiles]):
        return f"tiles {contexts.num_tiles_2.tolist()} of {all_tiles}"
    out_THd = torch.full_like(batch.q_THd, math.nan)
    for cache, inputs, how, num_tiles in prefill_sources(contexts, cache_N2PKd, batch.inputs, scoring):
        prefill(batch.q_THd, cache, out_THd, inputs, work_W, layout, tiles, NUM_SMS, how, num_tiles)
    out_THd[: facts.num_decodes] = batch.expected_THd[: facts.num_decodes]
    return mistake(case, batch, out_THd, tolerance=None if dtype is torch.float32 else 5e-3)


def main(every: bool) -> None:
    """Run by the next test in a process whose Triton interprets. every: each window with tiles of each
    size; else three windows, each with tiles of one size."""
    torch.set_num_threads(1)
    cases = [replace(case, storage=NAMES[number % 2]) for number, case in enumerate(CASES)]
    wrong = {f"{case.name}, {case.storage}": difference(case) for case in cases}
    pairs = product(WINDOWED, TILES_OF_KEYS) if every else zip(WINDOWED[1:4], cycle(TILES_OF_KEYS), strict=False)
    for number, (windowed, keys) in enumerate(pairs):
        case = replace(windowed, storage=NAMES[number % 2])
        wrong[f"{case.name}, {case.storage}, tiles of {keys}"] = difference(case, torch.float16, keys)
    print(json.dumps({name: text for name, text in wrong.items() if text}))


@loops_to_a_loaded_bound
def test_prompts_read_them_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    every: bool = pytestconfig.getoption("--all")
    run = interpret(__file__, "-c", f"import test_decoded_contexts; test_decoded_contexts.main({every})")
    assert run.stdout.strip() == "{}", run.stdout[-2000:] + run.stderr[-2000:]


def test_the_workspace_is_bounded_by_the_tokens_of_the_step() -> None:
    """With a bound of the contexts that may not fit, whatever the host knows of the number of prompts."""
    few = BatchFacts(1000, 3, 1, max_seq_len=500, listed=True, min_keys=128)
    assert workspace_blocks(few, 16) == (2 * 32, 2 * 32)
    blocks, most = workspace_blocks(replace(few, max_seq_len=100_000), 16)
    assert blocks == MOST_CONTEXT_PER_TOKEN * 1000 // 16 + 2
    assert most == 2 * 6250
    assert workspace_blocks(replace(few, max_seq_len=0), 16) == (1, 0)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("bound", [1, SHORT_CONTEXT, SHORT_CONTEXT + 1])
def test_tiles_fit_what_others_compute_for_them(element_size: int, bound: int, large: bool) -> None:
    """Decoded contexts begin at a border of every tile of keys, and lists have room for tiles of the fewest rows."""
    for head_dim in range(16, MAX_HEAD_DIM + 1, 8):
        tiles = prefill_tiles(head_dim, element_size, bound, large)
        assert triton_tile.TILES_OF_KEYS.value % tiles.keys == 0
        most_heads = 32 if element_size == 2 or head_dim <= 256 else 16
        assert tiles.rows >= fewest_rows(head_dim, element_size, large) >= most_heads


@pytest.mark.parametrize(
    ("head_dim", "bound", "small", "large"),
    [(128, 4096, 128, 128), (136, 1024, 64, 64), (256, 4096, 64, 128), (264, 1, 32, 64), (576, 4096, 32, 64)],
)
def test_tiles_of_long_heads_are_larger_on_hopper(head_dim: int, bound: int, small: int, large: int) -> None:
    assert [prefill_tiles(head_dim, 2, bound, hopper).rows for hopper in (False, True)] == [small, large]


# Steps that are large enough, in which contexts fit and do not.
LONG = (*decodes(1, 500), Request(700, 700), Request(900, 300), Request(5, 5), Request(0, 3))
LONG_CASES = (
    Case("fits", LONG, head_dim=128),
    Case("fits, as the device knows", LONG, head_dim=128, bound=60_000),
    Case("window", LONG, head_dim=128, sliding_window=200),
    Case("window of a chunk", (*decodes(300), Request(1700, 700)), head_dim=128, sliding_window=200),
    Case("window, Hopper's tiles", (Request(3100, 2100), Request(900, 333)), head_dim=128, sliding_window=200),
    Case("window, heads of 64", (*decodes(5, 300), Request(1700, 700), Request(2222, 1333)), sliding_window=77),
    Case("soft cap and sinks", LONG, soft_cap=5.0, sinks=True),
    Case("head size 256", LONG, head_dim=256),
    Case("does not fit", (Request(9000, 600), Request(9000, 20)), head_dim=128),
    Case("Hopper's tiles", (Request(2500, 2500), Request(900, 300), Request(60, 1)), head_dim=128),
)


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("case",))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", LONG_CASES, ids=[case.name for case in LONG_CASES])
def test_prompts_read_them_on_a_gpu(case: Case, name: str) -> None:
    assert sum(request.query_len for request in case.requests) >= FEWEST_TOKENS
    # Keys and values are rounded once more, to 16 bits.
    assert outcome("triton", replace(case, storage=name), "cuda", torch.bfloat16, tolerance=1.5e-2) == "right"


@pytest.mark.gpu
@pytest.mark.product(one_in=4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", LONG_CASES, ids=[case.name for case in LONG_CASES])
def test_prompts_read_them_in_a_graph(case: Case, name: str) -> None:
    case = replace(case, storage=name).sized("triton")
    batch = build(case, torch.bfloat16, "cuda")
    step("triton", case, batch)  # kernels are compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THd = step("triton", case, batch)
    graph.replay()
    assert mistake(case, batch, out_THd, tolerance=1.5e-2) is None
