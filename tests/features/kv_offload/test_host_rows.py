"""Rows come back from host memory as they were, whatever slots and rows are copied at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.features.kv_offload.host_rows import HostRows

ROWS, SLOTS, WIDTH, LAYERS = 12, 10, 6, 2
ROW_BYTES = LAYERS * WIDTH

pairs = st.tuples(st.permutations(range(SLOTS)), st.permutations(range(ROWS)), st.integers(1, SLOTS)).map(
    lambda drawn: (drawn[0][: drawn[2]], drawn[1][: drawn[2]])
)


@given(
    st.sampled_from([1, ROW_BYTES, 3 * ROW_BYTES, 100 * ROW_BYTES]),
    st.lists(st.tuples(pairs, st.booleans()), max_size=5),
)
def test_rows_are_those_of_their_slots(
    staging_bytes: int, copies: list[tuple[tuple[list[int], list[int]], bool]]
) -> None:
    """Copies out and in, some of more rows than the staging buffer has, against lists of rows."""
    tensors = [
        torch.arange(layer, layer + ROWS * WIDTH, dtype=torch.uint8).view(ROWS, WIDTH) for layer in range(LAYERS)
    ]
    host = HostRows(lambda: tensors, SLOTS, torch.device("cpu"), staging_bytes)
    host.allocate_staging()
    host.allocate_slots()
    assert 1 <= host.num_at_once <= SLOTS
    on_device = torch.cat(tensors, 1).clone()
    in_host = torch.zeros(SLOTS, ROW_BYTES, dtype=torch.uint8)
    for (slots, rows), is_out in copies:
        if is_out:
            host.copy_out(slots, rows)
            in_host[slots] = on_device[rows]
        else:
            host.copy_in(slots, rows)
            on_device[rows] = in_host[slots]
    assert torch.equal(torch.cat(tensors, 1), on_device)
    assert host.stored == sum(len(rows) for (_, rows), is_out in copies if is_out)
    assert host.loaded == sum(len(rows) for (_, rows), is_out in copies if not is_out)
    host.close()
