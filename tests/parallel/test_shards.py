"""Shards of parameters, the sums that divided layers need, and the push buffers of fused sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import ThreadGroup, on_ranks
from torch import nn

from compiled_engine.parallel.group import (
    FakeGroup,
    PushBuffer,
    buffer_bytes,
    current_group,
    data_offset,
    fake_group_for,
    in_group,
    num_slots_for,
    num_tagged_slots,
    tagged_offset,
)
from compiled_engine.parallel.shards import Section, Shard, add_collectives, compare_shapes, shard_of
from compiled_engine.parallel.vocabulary import embedding_part


@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(0, 1),
)
def test_shares_are_whole_together(num_ranks: int, parts: list[tuple[int, int]], dim: int) -> None:
    """Each section is cut by itself; where it has fewer parts than ranks, neighbours have the same one."""
    sections = tuple(Section(min(count, num_ranks) * size, min(count, num_ranks)) for count, size in parts)
    length = sum(section.length for section in sections)
    whole = torch.arange(3.0 * length).view(length, 3) if dim == 0 else torch.arange(3.0 * length).view(3, length)
    shard = Shard(tuple(whole.shape), dim, sections)
    shares = [shard.of(whole, rank, num_ranks) for rank in range(num_ranks)]
    begin = local = 0
    for section in sections:
        size = section.length // section.parts
        own = [share.narrow(dim, local, size) for share in shares]
        several = num_ranks // section.parts
        assert torch.equal(torch.cat(own[::several], dim), whole.narrow(dim, begin, section.length))
        for rank, part in enumerate(own):
            assert torch.equal(part, own[rank // several * several])
        begin, local = begin + section.length, local + size
    assert {share.shape[dim] for share in shares} == {local}
    for rank, share in enumerate(shares):
        places = shard.places(rank, num_ranks)
        assert sum(place.length for place in places) == local
        for place in places:
            assert torch.equal(
                share.narrow(dim, place.local, place.length), whole.narrow(dim, place.start, place.length)
            )
        is_view = share.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert is_view == (len(sections) == 1)


def test_what_is_not_divided_is_on_every_rank_or_on_the_first() -> None:
    tensor = torch.ones(4)
    for rank in range(2):
        assert Shard((4,)).of(tensor, rank, 2) is tensor
    alone = Shard((4,), first_only=True)
    assert [alone.of(tensor, rank, 3).tolist() for rank in range(3)] == [[1.0] * 4, [0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize(
    ("shape", "dim", "divides"),
    [
        ((4,), None, False),
        ((4,), 0, False),
        ((4, 6), 0, False),
        ((4, 6), 1, True),
        ((2, 4, 6), 1, False),
        ((2, 4, 6), 2, True),
    ],
)
def test_a_divided_input_is_the_last_dimension(shape: tuple[int, ...], dim: int | None, divides: bool) -> None:
    assert Shard(shape, dim).divides_input == divides


@pytest.mark.parametrize(
    ("shape", "dim", "divides"),
    [((2, 6, 4), 1, True), ((2, 6, 4), 2, False), ((2, 4), 1, False), ((2, 4), None, False)],
)
def test_a_divided_input_comes_before_the_outputs(shape: tuple[int, ...], dim: int | None, divides: bool) -> None:
    """Matrices [E, inputs, outputs] and biases [E, outputs] of experts."""
    assert Shard(shape, dim, outputs_last=True).divides_input == divides


def test_shards_follow_from_shapes() -> None:
    assert shard_of("w", (8, 6), (8, 6)) == Shard((8, 6))
    assert shard_of("w", (8, 6), (4, 6)) == Shard((8, 6), 0, (Section(8, 2),))
    assert shard_of("w", (8, 6), (8, 2)) == Shard((8, 6), 1, (Section(6, 3),))
    packed = shard_of("w", (12, 6), (4, 6), (8, 2, 2), (2, 1, 1))
    assert packed == Shard((12, 6), 0, (Section(8, 4), Section(2, 2), Section(2, 2)))
    with pytest.raises(ValueError, match=r"w would be cut along dimensions \[0, 1\]"):
        shard_of("w", (8, 6), (4, 3))


class Layer(nn.Module):
    """An embedding of six tokens, a divided product, and a product with a divided input; both with a bias."""

    def __init__(self, share: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(6 // share, 4)
        self.up = nn.Linear(4, 8 // share)
        self.up.packed = {"weight": (6 // share, 2 // share), "bias": (6 // share, 2 // share)}  # type: ignore[assignment]
        self.down = nn.Linear(8 // share, 4)
        self.down.packed = {"weight": (6 // share, 2 // share)}  # type: ignore[assignment]
        self.tied = self.embed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.embed(ids)))) + self.tied(ids)


def test_ranks_compute_together_what_one_computes() -> None:
    """With sums after the products of divided inputs and after divided embeddings."""
    torch.manual_seed(0)
    whole = Layer(1)
    shards = compare_shapes(whole, Layer(2))
    assert shards["up.weight"] == Shard((8, 4), 0, (Section(6, 2), Section(2, 2)))
    assert shards["down.weight"] == Shard((4, 8), 1, (Section(6, 2), Section(2, 2)))
    assert shards["down.bias"] == Shard((4,), first_only=True)
    assert shards["up.bias"] == Shard((8,), 0, (Section(6, 2), Section(2, 2)))
    assert shards["tied.weight"] == shards["embed.weight"] == Shard((6, 4), 0, (Section(6, 2),))
    ids = torch.tensor([[0, 2, 3, 5], [5, 4, 1, 0]])
    given = dict(whole.named_parameters(remove_duplicate=False))

    def work(group: ThreadGroup) -> torch.Tensor:
        with torch.no_grad(), in_group(group):
            own = Layer(2)
            for name, parameter in own.named_parameters(remove_duplicate=False):
                parameter.copy_(shards[name].of(given[name], group.rank, 2))
            add_collectives(own, shards)
            return own(ids)

    with torch.no_grad():
        expected = whole(ids)
    for found in on_ranks(2, work):
        torch.testing.assert_close(found, expected)


class RowNorm(nn.Module):
    """An RMSNorm of rows of eight channels."""

    def __init__(self, share: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8 // share))
        self.norms_row = ("weight",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.weight


def test_a_norm_of_a_divided_row_averages_over_the_ranks() -> None:
    torch.manual_seed(0)
    whole, x = nn.Sequential(RowNorm(1)), torch.randn(3, 8)
    shards = compare_shapes(whole, nn.Sequential(RowNorm(4)))
    assert shards["0.weight"] == Shard((8,), 0, (Section(8, 4),), norms_row=True)
    expected = whole(x)

    def work(group: ThreadGroup) -> torch.Tensor:
        with torch.no_grad(), in_group(group):
            own = nn.Sequential(RowNorm(4))
            weight: torch.Tensor = own[0].weight  # type: ignore[assignment]
            weight.copy_(shards["0.weight"].of(whole[0].weight, group.rank, 4))  # type: ignore[arg-type]
            add_collectives(own, shards)
            return own(x.chunk(4, -1)[group.rank])

    torch.testing.assert_close(torch.cat(on_ranks(4, work), -1), expected)


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(0, 19), max_size=8))
def test_each_token_is_looked_up_by_one_rank(num_ranks: int, num_rows: int, ids: list[int]) -> None:
    table = torch.arange(1.0, 1 + 3 * num_ranks * num_rows).view(-1, 3)
    ids_T = torch.tensor([each % len(table) for each in ids], dtype=torch.int64)
    parts = [embedding_part(part, ids_T, rank) for rank, part in enumerate(table.split(num_rows))]
    assert torch.equal(torch.stack(parts).sum(0), table[ids_T])
    assert torch.equal((torch.stack(parts) != 0).any(-1).sum(0), torch.ones_like(ids_T))


def buffer(num_slots: int, num_ranks: int, row_bytes: int, num_tagged: int = 2) -> PushBuffer:
    return PushBuffer(
        own=torch.zeros(buffer_bytes(num_slots, num_ranks, row_bytes), dtype=torch.uint8),
        addresses=torch.arange(num_ranks),
        epochs=torch.full((num_slots,), 7, dtype=torch.int32),
        tagged_epochs=torch.full((num_tagged,), 9, dtype=torch.int32),
        rank=num_ranks - 1,
        num_ranks=num_ranks,
        row_bytes=row_bytes,
    )


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 40).map(lambda count: 16 * count))
def test_parts_of_a_push_buffer_do_not_overlap(num_slots: int, num_ranks: int, row_bytes: int) -> None:
    """Flags, rows for odd and even epochs, and rows of twice the size for the first slots; each aligned."""
    rows, tagged = data_offset(num_slots, num_ranks), tagged_offset(num_slots, num_ranks, row_bytes)
    assert rows % 1024 == tagged % 1024 == 0
    assert 0 <= rows - 4 * num_slots * num_ranks < 1024
    assert 0 <= tagged - rows - 2 * num_slots * num_ranks * row_bytes < 1024
    most = min(num_slots, 64)
    assert num_tagged_slots(num_slots) == most
    assert buffer_bytes(num_slots, num_ranks, row_bytes) == tagged + 2 * most * num_ranks * 2 * row_bytes
    made = buffer(num_slots, num_ranks, row_bytes)
    assert (made.num_slots, made.num_tagged_slots) == (num_slots, 2)
    assert (made.data_offset, made.tagged_offset) == (rows, tagged)


def test_rows_that_a_push_buffer_takes() -> None:
    """As wide as its own, which are aligned, and no more than it has slots for; tagged: few, in bfloat16."""
    made = buffer(4, 2, 32)
    assert [made.takes(torch.zeros(rows, 8)) for rows in (1, 4, 5)] == [True, True, False]
    assert [made.takes(torch.zeros(1, width)) for width in (7, 9)] == [False, False]
    assert made.takes(torch.zeros(1, 16).bfloat16())
    assert not buffer(4, 2, 40).takes(torch.zeros(1, 10))
    assert [made.tags(torch.zeros(rows, 16).bfloat16()) for rows in (1, 2, 3)] == [True, True, False]
    assert not made.tags(torch.zeros(1, 16).half())


@pytest.mark.parametrize(
    ("num_ranks", "row_bytes", "most_rows", "num_slots"),
    [
        (2, 64, 2048, 2048),
        (4, 64, 2048, 128),
        (8, 64, 2048, 64),
        (8, 64, 16, 16),
        (2, 1 << 20, 2048, 128),
        (2, 1 << 30, 8, 1),
    ],
)
def test_slots_are_for_rows_that_all_ranks_write_at_once(
    num_ranks: int, row_bytes: int, most_rows: int, num_slots: int
) -> None:
    """Within bounds of memory; two ranks send as much either way."""
    assert num_slots_for(num_ranks, row_bytes, most_rows) == num_slots


def test_a_stand_in_runs_without_peers() -> None:
    """A fake group has the shapes of the group's results, and a push buffer of its own."""
    made = buffer(4, 3, 32)
    group: Any = type("Group", (), {"size": 3, "rank": 2, "pushed": made})()
    alone = fake_group_for(group)
    assert (alone.size, alone.rank, alone.kind) == (3, 0, "none")
    own = alone.pushed
    assert own is not None
    assert (own.rank, own.num_ranks, own.row_bytes) == (0, 1, 32)
    assert own.addresses.tolist() == [own.own.data_ptr()]
    assert own.own.nbytes == buffer_bytes(4, 1, 32)
    assert (own.epochs.tolist(), own.tagged_epochs.tolist()) == ([0] * 4, [0] * 2)
    assert made.epochs.tolist() == [7] * 4
    x_TD = torch.arange(6.0).view(2, 3)
    assert alone.gather_columns(x_TD).shape == (2, 9)
    for found in (alone.all_reduce(x_TD), alone.reduce_scatter(x_TD)):
        assert torch.equal(found, x_TD)
        assert found.data_ptr() != x_TD.data_ptr()
    assert alone.rows(5) == slice(0, 5)
    assert torch.equal(alone.gather_rows(x_TD, 2), x_TD)
    assert alone.all_reduce_min(3) == 3
    assert FakeGroup(all_reduce_min=lambda value: value - 1).all_reduce_min(3) == 2
    group.pushed = None
    assert fake_group_for(group).pushed is None


def fail_in(group: FakeGroup) -> None:
    with in_group(group):
        assert current_group() is group
        raise KeyError


def test_collectives_go_to_the_innermost_group() -> None:
    """A group applies until it is left, by whatever way."""
    outer, inner = FakeGroup(), FakeGroup(2)
    with pytest.raises(RuntimeError, match="a collective was called outside of a group of ranks"):
        current_group()
    with in_group(outer):
        with pytest.raises(KeyError):
            fail_in(inner)
        assert current_group() is outer
    with pytest.raises(RuntimeError, match="outside of a group"):
        current_group()
