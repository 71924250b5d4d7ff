"""How decode splits contexts between programs: a pure function, and what must hold of it."""

from __future__ import annotations

import pytest
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
)

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
    ("num_requests", "max_seq_len", "expected"),
    [(1, 4096, False), (2, 4096, False), (3, 4096, True), (16, 4096, True), (16, 8193, False), (17, 4096, False)],
)
def test_one_kernel_rotates_and_attends_for_a_few_short_contexts(
    num_requests: int, max_seq_len: int, expected: bool
) -> None:
    splits = plan_splits(num_requests, 8, max_seq_len, H200_SMS)
    assert one_kernel_pays(splits, max_seq_len) == expected
