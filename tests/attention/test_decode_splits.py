"""How decode splits contexts between programs: a pure function, and what must hold of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.attention.backends.decode_splits import (
    GRAIN,
    LONG_SPLIT,
    MAX_SPLITS,
    SMALL,
    Splits,
    one_kernel_pays,
    plan_splits,
    short_contexts_of,
    short_splits,
)
from compiled_engine.attention.backends.short_decode import ShortTiles
from compiled_engine.config import GraphConfig, GraphMode
from compiled_engine.engine.warm_up import start_up_batches
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve

H200_SMS = 132
requests = st.integers(1, 1024)
kv_heads = st.integers(1, 64)
lengths = st.integers(1, 1 << 20)
sms = st.integers(1, 200)


@pytest.mark.parametrize(
    ("num_requests", "num_kv_heads", "max_seq_len", "expected"),
    [
        (1, 8, 4096, Splits(33, GRAIN, programs=2)),
        (2, 8, 4096, Splits(16, GRAIN, programs=2)),
        (3, 8, 4096, Splits(8, GRAIN, programs=SMALL)),
        (16, 8, 4096, Splits(8, GRAIN, programs=SMALL)),
        (16, 8, 200, Splits(7, GRAIN, programs=SMALL)),
        (17, 8, 4096, Splits(1, GRAIN)),
        (256, 8, 4096, Splits(1, GRAIN)),
        (1, 2, 4096, Splits(MAX_SPLITS, GRAIN, programs=2)),
        (1, 8, 33, Splits(2, GRAIN, programs=2)),
        (1, 8, 32, Splits(1, GRAIN, programs=2)),
        (256, 8, 40960, Splits(3, LONG_SPLIT // 16)),
        (1, 8, 40960, Splits(33, GRAIN, programs=2)),
    ],
)
def test_plans_for_an_h200(num_requests: int, num_kv_heads: int, max_seq_len: int, expected: Splits) -> None:
    assert plan_splits(num_requests, num_kv_heads, max_seq_len, H200_SMS) == expected


@given(requests, kv_heads, lengths, sms)
def test_splits_are_few_and_never_wanting(num_requests: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> None:
    splits = plan_splits(num_requests, num_kv_heads, max_seq_len, num_sms)
    assert 1 <= splits.count <= MAX_SPLITS
    assert splits.min_keys % GRAIN == 0
    # Splits are there to fill the device, to even out few programs or to cut long contexts, not otherwise.
    if splits.count > 1 and max_seq_len <= LONG_SPLIT:
        assert num_requests * num_kv_heads * splits.count <= 8 * num_sms
        assert (splits.count - 1) * splits.min_keys < max_seq_len
    # No program reads more than LONG_SPLIT keys unless there is no split left.
    assert splits.count == MAX_SPLITS or splits.count * LONG_SPLIT >= max_seq_len


@pytest.mark.parametrize(
    ("num_requests", "expected"),
    [
        (1, (256, 512)),
        (16, (256, 512)),
        (17, (512,)),
        (33, (512,)),
        (34, (512, LONG_SPLIT)),
        (66, (512, LONG_SPLIT)),
        (67, (LONG_SPLIT,)),
    ],
)
def test_short_contexts_of_an_h200(num_requests: int, expected: tuple[int, ...]) -> None:
    assert short_contexts_of(num_requests, 8, H200_SMS) == expected


def test_short_contexts_are_read_whole_unless_requests_are_few() -> None:
    assert short_contexts_of(17, 4, H200_SMS) == ()
    whole, split = Splits(1, GRAIN), Splits(16, GRAIN, programs=SMALL)
    found = {
        (count, longest): short_splits(count, longest, (256, 512)) for count in (2, 3) for longest in (256, 257, 513)
    }
    assert found == {
        (2, 256): whole,
        (2, 257): split,
        (2, 513): None,
        (3, 256): whole,
        (3, 257): whole,
        (3, 513): None,
    }
    assert short_splits(2, 257, (512,)) == whole
    assert short_splits(2, 1, ()) is None


@pytest.mark.parametrize("captured", [(), (1, 2), (1, 8), (1, 48)], ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_decodes_are_split_in_ways_that_the_warm_up_has_met(num_kv_heads: int, captured: tuple[int, ...]) -> None:
    """The bound is the longest context, or that of a graph if there is one for so many; the kernel that combines is
    compiled for powers of two of splits."""
    config = resolve(EngineOptions(device="cpu", mode="eager", max_num_seqs=48, max_model_len=2048))
    contexts = {size: short_contexts_of(size, num_kv_heads, H200_SMS) for size in captured}
    short_decodes = tuple((size, each) for size in captured for each in contexts[size] if each < 2048)
    graph = GraphConfig(GraphMode.FULL_DECODE_ONLY, captured, (), short_decodes) if captured else config.graph
    shapes = start_up_batches(replace(config, device=torch.device("cuda"), graph=graph))
    dispatcher = Dispatcher(graph, config.scheduler)

    def of(kernel: str, splits: Splits) -> set[tuple[str, int]]:
        combined = {("combined", (splits.count - 1).bit_length())} if splits.count > 1 else set()
        return {(kernel, splits.programs)} | combined

    def kernels(num_requests: int, max_seq_len: int) -> set[tuple[str, int]]:
        """With and without the pass that rotates and attends at once."""
        splits = plan_splits(num_requests, num_kv_heads, max_seq_len, H200_SMS)
        found = of("attend", splits)
        short = short_splits(num_requests, max_seq_len, short_contexts_of(num_requests, num_kv_heads, H200_SMS))
        if short is not None and short.count == 1:
            return found | {("keys", ShortTiles.of(num_requests * num_kv_heads, H200_SMS, max_seq_len).keys)}
        if one_kernel_pays(short or splits, max_seq_len):
            found |= of("rotate and attend", short or splits)
        return found

    warm = set().union(*(kernels(s.num_requests, s.max_seq_len) for s in shapes if s.host_3[0]))
    for num_requests in range(1, 49):
        for max_seq_len in range(1, 2049, 31):
            key = dispatcher.dispatch(num_requests, num_requests, 1, max_seq_len)
            launched = (num_requests, max_seq_len) if key is None else (key.num_rows, key.max_seq_len)
            assert kernels(*launched) <= warm, launched
