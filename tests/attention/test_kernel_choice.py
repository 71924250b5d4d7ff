"""The choice of an attention kernel: the table in docs/architecture.md is the code's."""

from __future__ import annotations

import re
from itertools import pairwise, product

import pytest
import torch
from folders import REPOSITORY
from test_step_inputs import H200_SMS, batch

from compiled_engine.attention.backends.decode_splits import BatchFacts, few_short_contexts
from compiled_engine.attention.backends.kernel_choice import (
    ROTATING,
    Kernel,
    LayerFacts,
    Plan,
    choice_of,
    choose,
    layer_facts,
)
from compiled_engine.attention.backends.short_decode import ShortTiles

NUM_HEADS, NUM_KV_HEADS = 16, 8
MOST_REQUESTS, MOST_QUERIES, LONGEST = 100, 12, 100_000
CACHES = {"bf16": [torch.bfloat16], "8-bit": [torch.uint8, torch.float8_e4m3fn]}
DEVICES = {"Hopper": [True], "others": [False], "any": [True, False]}


def facts(num_requests: int, query_len: int, max_seq_len: int) -> BatchFacts:
    """The facts of decodes."""
    rows = num_requests * query_len
    return BatchFacts.of(batch(rows, query_len, max_seq_len, rows, rows).sizes, NUM_KV_HEADS, H200_SMS)


def layer(cache: torch.dtype, on_hopper: bool) -> LayerFacts:
    return LayerFacts(NUM_HEADS, NUM_KV_HEADS, cache, H200_SMS, on_hopper)


def numbers(cell: str, most: int) -> range:
    """The numbers of a cell: `4`, `1 to 16` or `from 17`."""
    first, *last = (int(number) for number in re.findall(r"\d+", cell))
    return range(first, most + 1 if cell.startswith("from") else last[0] + 1 if last else first + 1)


def table() -> list[list[str]]:
    """The rows of the table, its head first."""
    _, _, text = (REPOSITORY / "docs" / "architecture.md").read_text().partition("| device | cache |")
    lines = ("| device | cache |" + text).split("\n\n")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def bounds(head: list[str]) -> list[int]:
    return [int(re.sub(r"\D", "", cell)) for cell in head if cell.startswith(("context up", "up to"))] + [LONGEST]


def expected_kernels(row: list[str]) -> dict[tuple[torch.dtype, bool, int, int], list[str]]:
    """The kernels of a row's batches, one for each column of contexts."""
    device, cache, queries, requests, *kernels = row
    caches = [dtype for name, dtypes in CACHES.items() if cache in (name, "any") for dtype in dtypes]
    batches = product(caches, DEVICES[device], numbers(queries, MOST_QUERIES), numbers(requests, MOST_REQUESTS))
    return dict.fromkeys(batches, kernels)


def test_the_table_in_the_documents_names_the_kernel_of_each_batch() -> None:
    """At both ends of each column's contexts. The first row that matches applies."""
    head, *rows = table()
    limits = [0, *bounds(head)]
    expected: dict[tuple[torch.dtype, bool, int, int], list[str]] = {}
    for row in reversed(rows):
        expected |= expected_kernels(row)
    caches = [dtype for dtypes in CACHES.values() for dtype in dtypes]
    everything = product(caches, (True, False), range(1, MOST_QUERIES + 1), range(1, MOST_REQUESTS + 1))
    assert expected.keys() == set(everything)
    for (cache, on_hopper, query_len, num_requests), kernels in expected.items():
        for (below, longest), kernel in zip(pairwise(limits), kernels, strict=True):
            for bound in (below + 1, longest):
                plan = choose(facts(num_requests, query_len, bound), layer(cache, on_hopper), 0, unrotated=True)
                assert plan.kernel.value == kernel, (cache, on_hopper, query_len, num_requests, bound)


def test_rotated_queries_have_the_kernels_that_do_not_rotate() -> None:
    for cache, on_hopper, query_len in product((torch.bfloat16, torch.uint8), (True, False), (1, 4)):
        for num_requests, bound in product((1, 16, 17, 34, 67), (256, 4096)):
            given = facts(num_requests, query_len, bound), layer(cache, on_hopper), 0
            rotated, unrotated = choose(*given), choose(*given, unrotated=True)
            coded = cache is torch.uint8 and on_hopper and query_len == 1
            assert rotated.kernel in (ROTATING if coded else set(Kernel) - ROTATING)
            assert unrotated == rotated or unrotated.kernel in ROTATING


def test_prompts_have_the_list() -> None:
    mixed = BatchFacts.of(batch(3, 40, 900, 5, 80).sizes, NUM_KV_HEADS, H200_SMS)
    for cache, on_hopper, unrotated in product((torch.bfloat16, torch.uint8), (True, False), (True, False)):
        assert choose(mixed, layer(cache, on_hopper), 0, unrotated=unrotated) == Plan(Kernel.LISTED_DECODE)


def test_a_layer_finds_the_choice_of_its_own_batch() -> None:
    """Whatever was chosen before for other batches, layers and windows."""
    q_THd = torch.empty(0, NUM_HEADS, 128)
    caches = [torch.empty(0, 2, 16, NUM_KV_HEADS, 128, dtype=dtype) for dtype in (torch.float32, torch.uint8)]
    batches = [batch(1, 1, 900, 1, 1), batch(1, 1, 5000, 1, 1), batch(4, 4, 900, 4, 4), batch(3, 40, 900, 5, 80)]
    asked = list(product(batches, caches, (0, 100), (True, False)))
    for inputs, cache, window, unrotated in [*asked, *reversed(asked)]:
        layer, facts, plan = choice_of(q_THd, cache, inputs, window, unrotated=unrotated)
        assert layer == layer_facts(NUM_HEADS, NUM_KV_HEADS, 128, torch.float32, cache.dtype, torch.device("cpu"))
        assert facts == BatchFacts.of(inputs.sizes, NUM_KV_HEADS, layer.num_sms)
        assert plan == choose(facts, layer, window, unrotated=unrotated)


def test_a_window_bounds_the_keys_that_are_split() -> None:
    """Each of several queries sees a window that ends at its own position."""
    plain = layer(torch.bfloat16, False)
    for query_len, window in ((1, 100), (4, 100)):
        windowed = choose(facts(1, query_len, 5000), plain, window)
        assert windowed == choose(facts(1, query_len, window + query_len - 1), plain, 0)
        assert windowed != choose(facts(1, query_len, 5000), plain, 0)


@pytest.mark.parametrize(
    ("num_requests", "query_len", "context", "keys"),
    [
        (8, 4, 512, 512),
        (9, 4, 512, 0),
        (8, 4, 4096, 0),
        (8, 9, 512, 0),
        (2, 4, 256, 256),
        (2, 4, 257, 512),
        (3, 4, 256, 256),
        (3, 4, 257, 512),
    ],
)
def test_drafts_over_short_contexts_are_one_tile(num_requests: int, query_len: int, context: int, keys: int) -> None:
    """On 16 multiprocessors, with two K/V heads of two heads each: with tiles of these keys."""
    rows = num_requests * query_len
    drafts = BatchFacts.of(batch(rows, query_len, context, rows, rows).sizes, 2, 16)
    plan = choose(drafts, LayerFacts(4, 2, torch.bfloat16, 16, True), 0, unrotated=True)
    if keys:
        assert plan == Plan(Kernel.SHORT_DRAFTS, ShortTiles(keys))
    else:
        assert plan.kernel is Kernel.DECODE


def test_wide_heads_are_rotated_by_a_kernel_of_its_own() -> None:
    """No kernel that rotates exists for them, and none for short contexts."""
    for cache, context in product((torch.bfloat16, torch.uint8, torch.float8_e4m3fn), (1, 256, 900, 20_000)):
        wide = layer(cache, False)._replace(wide=True)
        assert wide.short_contexts(1) == ()
        for decodes in (1, 4, 60):
            plans = [choose(facts(decodes, 1, context), wide, 0, unrotated=unrotated) for unrotated in (True, False)]
            assert plans[0] == plans[1]
            assert plans[0].kernel in (Kernel.DECODE, Kernel.LISTED_DECODE)
    sizes = (256, 264, 512, 576)
    found = [layer_facts(4, 2, size, torch.float32, torch.float32, torch.device("cpu")).wide for size in sizes]
    assert found == [False, True, True, True]


def test_only_gpus_have_kernels_for_short_contexts() -> None:
    for cache in (torch.bfloat16, torch.uint8):
        assert layer_facts(16, 8, 128, torch.bfloat16, cache, torch.device("cpu")).short_contexts(1) == ()
    coded = layer(torch.uint8, False)
    assert coded.short_contexts(1) == few_short_contexts(1, NUM_KV_HEADS, H200_SMS) != ()
    assert coded._replace(on_gpu=False).short_contexts(1) == ()
