"""Programs that share the keys of a tile of queries: interpreted and on a GPU, and when they do."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, Request, build, decodes, mistake
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from random_batches import verdict

from compiled_engine.attention.backends.decode_splits import BatchFacts
from compiled_engine.attention.backends.triton_prefill import (
    FEWEST_SHARED,
    SHORT_CONTEXT,
    KeySplits,
    prefill,
    prefill_tiles,
)
from compiled_engine.attention.backends.triton_write_kv import write_kv
from compiled_engine.attention.backends.work_list import WorkLayout, write_lists
from compiled_engine.kv_format import AUTO, CODED, FP8

BOUND = SHORT_CONTEXT + 1
# A long context with few queries, contexts that are not split, and padding.
REQUESTS = (*decodes(3, 90), Request(203, 5), Request(97, 20), Request(30, 2), Request(0, 2))
CASES = (
    Case("plain", REQUESTS, bound=BOUND),
    Case("one tile", (Request(333, 4),), 2, 1, bound=BOUND),
    Case("window", REQUESTS, 2, 1, sliding_window=70, bound=BOUND),
    Case("images", REQUESTS, 2, 1, bound=BOUND, image=9),
    Case("soft cap, sinks, odd heads", REQUESTS, 6, 2, head_dim=24, soft_cap=5.0, sinks=True, bound=BOUND),
    Case("wide heads", REQUESTS, 2, 1, head_dim=320, bound=BOUND),
    Case("codes", REQUESTS, bound=BOUND, storage=CODED[0].name),
    Case("scaled codes", REQUESTS, bound=BOUND, storage=FP8),
    Case("padding alone", (Request(0, 1), Request(0, 9)), bound=BOUND),
)
# Heads with larger tiles on Hopper, in 16 bits.
LARGE = (
    Case("large tiles", REQUESTS, 2, 1, head_dim=256, bound=BOUND),
    Case("large tiles, window", REQUESTS, 2, 1, head_dim=192, sliding_window=70, bound=BOUND),
    Case("large tiles, wide heads", REQUESTS, 8, 1, head_dim=512, bound=BOUND),
    Case("large tiles, codes, tail", REQUESTS, 2, 1, head_dim=576, bound=BOUND, storage=CODED[0].name),
)
# With so many multiprocessors each tile has up to 1, 3 or 7 programs and more; all cases have the last.
FEW_SMS = {"plain": (4, 16), "one tile": (4,), "soft cap, sinks, odd heads": (16,), "scaled codes": (16,)}
MANY_SMS = 48


def shares(case: Case, num_sms: int, dtype: torch.dtype = torch.float32) -> tuple[str | None, int]:
    """Return the fault of the prompts' results of two launches, and how many tiles were shared in the second."""
    case = case.sized("triton")
    batch = build(case, dtype)
    cache_N2PKd, scoring = batch.kv_cache_N2PKd, batch.scoring
    write_kv(batch.k_TKd, batch.v_TKd, cache_N2PKd, batch.inputs.slot_mapping_T, scoring.kv_scales_2K, False)
    facts = BatchFacts.of(batch.inputs.sizes, case.num_kv_heads, num_sms)
    tiles = prefill_tiles(case.head_dim, dtype.itemsize, facts.max_seq_len, True)
    layout = WorkLayout(facts.num_requests, case.num_kv_heads, tiles.rows // (case.num_heads // case.num_kv_heads))
    work_W = torch.full((layout.length(facts.num_tokens),), 77, dtype=torch.int32)
    write_lists(batch.inputs, work_W, layout, facts.min_keys)
    found: Any = KeySplits.of(batch.q_THd, layout, tiles, 1000, facts.max_seq_len)
    splits = KeySplits(found.partials, min_keys=32)
    before = work_W.clone()
    for _ in range(2):  # two layers with one list
        splits.partials.acc.fill_(math.nan)
        splits.partials.sum.fill_(math.nan)
        out_THd = torch.full_like(batch.q_THd, math.nan)
        arguments = batch.q_THd, cache_N2PKd, out_THd, batch.inputs, work_W, layout, tiles, num_sms, scoring
        prefill(*arguments, splits=splits)
        if not torch.equal(work_W, before):
            return "the list was changed", 0
    stored = int((~splits.partials.sum.isnan()).sum())
    out_THd[: facts.num_decodes] = batch.expected_THd[: facts.num_decodes]
    return mistake(case, batch, out_THd, tolerance=None if dtype is torch.float32 else 5e-3), stored


def main() -> None:
    """Run by the next test in a process whose Triton interprets."""
    torch.set_num_threads(1)
    found = {
        f"{case.name}, {num_sms}": shares(case, num_sms)
        for case in CASES
        for num_sms in (*FEW_SMS.get(case.name, ()), MANY_SMS)
    }
    found |= {f"{case.name}, {MANY_SMS}": shares(case, MANY_SMS, torch.float16) for case in LARGE}
    print(json.dumps(found))


@loops_to_a_loaded_bound
def test_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", "import test_key_splits; test_key_splits.main()")
    found = json.loads(run.stdout or "{}")
    assert {name: text for name, (text, _) in found.items() if text} == {}, run.stderr[-2000:]
    shared = {name for name, (_, stored) in found.items() if stored}
    assert shared >= {f"{case.name}, {MANY_SMS}" for case in (*CASES[:-1], *LARGE)}
    assert "one tile, 4" in shared
    assert "plain, 4" not in shared


def test_only_few_tiles_of_long_contexts_are_shared() -> None:
    tiles, layout = prefill_tiles(128, 2, 8000, True), WorkLayout(9, 8, 32)

    def rows(num_tokens: int, max_seq_len: int) -> int:
        out_THd = torch.empty(num_tokens, 32, 128, dtype=torch.bfloat16, device="meta")
        splits = KeySplits.of(out_THd, layout, tiles, 132, max_seq_len)
        return 0 if splits is None else len(splits.partials.acc)

    assert rows(24, 8000) == rows(256, 1 << 20) == 132 * tiles.rows
    assert rows(288, 8000) == rows(24, SHORT_CONTEXT) == 0
    assert FEWEST_SHARED <= SHORT_CONTEXT


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "storage"),
    [
        *(((32, 8, 128, 0), storage) for storage in (AUTO, *(elements.name for elements in CODED))),
        *((heads, AUTO) for heads in ((4, 1, 128, 0), (6, 2, 80, 900), (8, 1, 256, 0), (2, 1, 512, 0))),
    ],
)
def test_on_a_gpu(heads: tuple[int, int, int, int], storage: str) -> None:
    num_heads, num_kv_heads, head_dim, window = heads
    requests = (*decodes(700, 3), Request(5011, 16), Request(1030, 2), Request(40, 33), Request(0, 4))
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "sliding_window": window}
    case = Case("shared", requests, **sizes, bound=8192, storage=storage)
    images = replace(case, name="shared, images", image=9)
    for each, captured in ((case, False), (case, True), (images, False)):
        assert verdict("triton", each, "cuda", torch.bfloat16, captured=captured) == "right"
