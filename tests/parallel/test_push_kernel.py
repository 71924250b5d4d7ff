"""The kernel that sums over ranks, adds the residual and normalises, in Triton's interpreter and compiled for Hopper.

One rank runs; what the others' kernels would write into its memory is put there before.
"""

from __future__ import annotations

import threading

import pytest
import torch
from hopper_compilation import compiled_for_hopper
from interpreting_process import interpret

from compiled_engine.parallel import vocabulary
from compiled_engine.parallel.group import PushBuffer, buffer_bytes, num_slots_for
from compiled_engine.parallel.push_kernels import tagged_sum_kernel
from compiled_engine.passes.norm import residual_rms_norm
from compiled_engine.passes.parallel import all_reduce_residual_rms_norm as fused
from compiled_engine.passes.parallel import sequence_parallel_op as divided

D, NUM_SLOTS, EPS = 104, 4, 1e-5
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 3e-2}


class Ranks:
    """Memory of all ranks, one of which is `own`. epoch, tagged_epoch: last exchange of each kind."""

    def __init__(self, num_ranks: int, rank: int, dtype: torch.dtype, epoch: int = 0, tagged_epoch: int = 0):
        self.num_ranks, self.rank, self.dtype = num_ranks, rank, dtype
        row_bytes = D * dtype.itemsize
        size = buffer_bytes(NUM_SLOTS, num_ranks, row_bytes)
        self.memories = [torch.zeros(size, dtype=torch.uint8) for _ in range(num_ranks)]
        addresses = torch.tensor([memory.data_ptr() for memory in self.memories])
        epochs = torch.full((NUM_SLOTS,), epoch, dtype=torch.int32)
        tagged_epochs = torch.full((NUM_SLOTS,), tagged_epoch, dtype=torch.int32)
        self.own = PushBuffer(self.memories[rank], addresses, epochs, tagged_epochs, rank, num_ranks, row_bytes)
        for peer in range(num_ranks):
            self.flags(peer).fill_(epoch)

    def flags(self, rank: int) -> torch.Tensor:
        return self.memories[rank][: NUM_SLOTS * self.num_ranks * 4].view(torch.int32).view(NUM_SLOTS, -1)

    def rows(self, rank: int) -> torch.Tensor:
        rows = self.memories[rank][self.own.data_offset :].view(self.dtype)
        return rows[: 2 * NUM_SLOTS * self.num_ranks * D].view(2, NUM_SLOTS, self.num_ranks, D)

    def tagged(self, rank: int) -> torch.Tensor:
        rows = self.memories[rank][self.own.tagged_offset :].view(torch.int64)
        return rows.view(2, NUM_SLOTS, self.num_ranks, D // 2)

    def others_write(self, parts: list[torch.Tensor], with_tags: bool = False) -> None:
        for slot in range(len(parts[0])):
            epoch = after(self.own.tagged_epochs[slot] if with_tags else self.own.epochs[slot])
            for peer in set(range(self.num_ranks)) - {self.rank}:
                if with_tags:
                    self.tagged(self.rank)[epoch & 1, slot, peer] = tagged(parts[peer][slot], epoch)
                    continue
                self.rows(self.rank)[epoch & 1, slot, peer] = parts[peer][slot]
                self.flags(self.rank)[slot, peer] = epoch

    def others_find(self, part: torch.Tensor, with_tags: bool = False) -> None:
        for slot, row in enumerate(part):
            epoch = int(self.own.tagged_epochs[slot] if with_tags else self.own.epochs[slot])
            for peer in set(range(self.num_ranks)) - {self.rank}:
                if with_tags:
                    assert torch.equal(self.tagged(peer)[epoch & 1, slot, self.rank], tagged(row, epoch))
                    continue
                assert int(self.flags(peer)[slot, self.rank]) == epoch
                assert torch.equal(self.rows(peer)[epoch & 1, slot, self.rank], row)


def after(epoch: torch.Tensor) -> int:
    """Return the epoch after an int32 one, which wraps around."""
    return int(epoch + 1)


def tagged(row_D: torch.Tensor, epoch: int) -> torch.Tensor:
    """Pack two elements per word, the first in the lowest bits, the epoch in the highest: [D / 2]."""
    pairs = row_D.view(torch.int32)
    return torch.stack([pairs, torch.full_like(pairs, epoch)], 1).view(torch.int64).squeeze(1)


def check(num_ranks: int, rank: int, dtype: torch.dtype) -> None:
    """Check batches of several sizes in a row: each slot counts its own epochs."""
    generator = torch.Generator().manual_seed(rank)
    ranks, weight = Ranks(num_ranks, rank, dtype), torch.randn(D, generator=generator).to(dtype)
    for num_tokens in (3, 1, 4, 2, 2):
        check_whole_rows(ranks, weight, num_tokens, generator)


def check_whole_rows(ranks: Ranks, weight: torch.Tensor, num_tokens: int, generator: torch.Generator) -> None:
    """Check whole rows; in bfloat16 they are sent in tagged words."""
    dtype, with_tags = ranks.dtype, ranks.dtype == torch.bfloat16
    *parts, residual = (torch.randn(num_tokens, D, generator=generator).to(dtype) for _ in range(ranks.num_ranks + 1))
    ranks.others_write(parts, with_tags)
    found = fused.push(ranks.own, parts[ranks.rank], residual, weight, EPS)
    total = torch.stack(parts).float().sum(0).to(dtype)
    expected = residual_rms_norm.reference(total, residual, weight, EPS)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    ranks.others_find(parts[ranks.rank], with_tags)


def check_divided(ranks: Ranks, inner: bool = False) -> None:
    """Check this rank's rows of the sum, alternating with exchanges of whole rows in the same slots."""
    num_ranks, rank, dtype = ranks.num_ranks, ranks.rank, ranks.dtype
    generator = torch.Generator().manual_seed(rank)
    weight, inner_weight = torch.randn(2, D, generator=generator).to(dtype)
    norm = (weight, EPS, 1.0, True, inner_weight) if inner else (weight, EPS)
    for num_tokens in (3, 1, 4, 2):
        *parts, residual = (torch.randn(num_tokens, D, generator=generator).to(dtype) for _ in range(num_ranks + 1))
        normed, total = residual_rms_norm.reference(torch.stack(parts).float().sum(0).to(dtype), residual, *norm)
        owners = [slot % num_ranks for slot in range(num_tokens)]
        # To the owner of a row the others hand their parts; from it they get what is normed.
        ranks.others_write(
            [
                torch.stack([part if owners[slot] == rank else normed[slot] for slot, part in enumerate(rows)])
                for rows in parts
            ]
        )
        own = [slot for slot, owner in enumerate(owners) if owner == rank]
        residual[[slot for slot, owner in enumerate(owners) if owner != rank]] = torch.nan
        found, found_total = divided.push(ranks.own, parts[rank], residual, *norm)
        torch.testing.assert_close(found, normed, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(found_total[own], total[own], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for slot, owner in enumerate(owners):
            epoch = int(ranks.own.epochs[slot])
            for peer in set(range(num_ranks)) - {rank} if owner == rank else {owner}:
                assert int(ranks.flags(peer)[slot, rank]) == epoch
                handed = found[slot] if owner == rank else parts[rank][slot]
                assert torch.equal(ranks.rows(peer)[epoch & 1, slot, rank], handed)
        check_whole_rows(ranks, weight, num_tokens, generator)


def check_waits() -> None:
    """Check that the kernel waits for a late rank's flag, although 2 ** 31 - 1 tagged exchanges in between, and one
    more, raised none."""
    generator = torch.Generator().manual_seed(0)
    ranks, weight = Ranks(2, 0, torch.bfloat16, 0, 2**31 - 1), torch.ones(D, dtype=torch.bfloat16)
    check_whole_rows(ranks, weight, 1, generator)
    part, late, residual = torch.randn(3, 1, D, generator=generator).bfloat16()
    writer = threading.Timer(0.5, ranks.others_write, ([part, late],))
    writer.start()
    _, total = divided.push(ranks.own, part, residual, weight, EPS)
    writer.join()
    expected = (part + late) + residual
    torch.testing.assert_close(total, expected, rtol=TOLERANCE[torch.bfloat16], atol=TOLERANCE[torch.bfloat16])


INTERPRETED = """
import torch
import test_push_kernel
from compiled_engine.parallel.vocabulary import reference
for dtype in (torch.float32, torch.float16):
    for num_ranks, rank in ((1, 0), (2, 0), (2, 1), (3, 1)):
        test_push_kernel.check(num_ranks, rank, dtype)
        test_push_kernel.check_divided(test_push_kernel.Ranks(num_ranks, rank, dtype))
test_push_kernel.check_divided(test_push_kernel.Ranks(2, 1, torch.float32), inner=True)
for num_ranks, rank in ((1, 0), (2, 0), (2, 1), (3, 1)):
    test_push_kernel.check(num_ranks, rank, torch.bfloat16)
    for epochs in ((2**31 - 2, 2**31 - 2), (2**31 - 2, 7), (7, 2**31 - 2)):
        test_push_kernel.check_divided(test_push_kernel.Ranks(num_ranks, rank, torch.bfloat16, *epochs))
test_push_kernel.check_waits()
print("right")
"""


def test_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", INTERPRETED)
    assert run.stdout.strip() == "right", run.stderr[-2000:]


KERNELS = (
    fused.all_reduce_residual_rms_norm_kernel,
    divided.sequence_parallel_kernel,
    vocabulary.embedding_part_kernel,
)
TYPES = {"eps": "fp32", "addresses_ptr": "*i64", "ids_ptr": "*i64", "epochs_ptr": "*i32"}


@pytest.mark.parametrize(("kernel", "rounds"), [*((kernel, False) for kernel in KERNELS), (KERNELS[0], True)])
def test_compiled_for_hopper(kernel: object, rounds: bool) -> None:
    """Needs no GPU. What goes to other GPUs is released, and acquired from them, for the whole system."""
    names = kernel.arg_names  # type: ignore[attr-defined]
    constants = {"D": 4096, "BLOCK_D": 4096, "DEPENDENT_LAUNCH": 1}
    if "OFFSET" in names:
        constants |= {"OFFSET": 0.0, "WIDE": False, "inner_weight_ptr": None}
    types = dict(TYPES)
    if "COLUMNS" in names:
        constants |= {"static_ptr": None, "COLUMNS": 128, "GROUPS": 32, "LARGEST": 448.0, "SMALLEST": 1e-12}
        constants |= {} if rounds else {"scales_ptr": None}
        types |= {"scales_ptr": "*fp32"} | ({"normed_ptr": "*fp8e4nv"} if rounds else {})
    ptx = compiled_for_hopper(kernel, constants, types, aligned=()).asm["ptx"]
    assert "griddepcontrol.wait" in ptx
    if "epochs_ptr" in names:
        assert "sys.release" in ptx or "release.sys" in ptx
        assert "sys.acquire" in ptx or "acquire.sys" in ptx
        assert "st.global.v4" in ptx  # rows of other ranks, sixteen bytes at a time


def test_tagged_words_are_compiled_for_hopper() -> None:
    """Needs no GPU. A word goes out and is read as a whole, never by halves, and each time from where others write."""
    constants = {"W": 2048, "BLOCK_W": 2048, "DEPENDENT_LAUNCH": 1}
    ptx = compiled_for_hopper(tagged_sum_kernel, constants, TYPES, aligned=(), pointers="*i32").asm["ptx"]
    stored = {word for word in ptx.split() if word.startswith("st.") and "64" in word and "shared" not in word}
    assert stored == {"st.global.v2.b64"}
    assert "ld.volatile.global.v2.b64" in ptx


def test_two_ranks_have_slots_for_any_batch_and_more_ranks_for_small_ones() -> None:
    assert num_slots_for(2, 8192, 8192) == 8192
    assert num_slots_for(8, 8192, 8192) == 64
    assert num_slots_for(2, 16384, 1 << 20) == 8192  # as many as the memory for them holds
    assert num_slots_for(4, 8192, 3) == 3


def test_a_part_of_the_vocabulary() -> None:
    weight, ids = torch.arange(24.0).view(12, 2), torch.tensor([0, 5, 6, 11])
    parts = [vocabulary.embedding_part(weight[start : start + 4], ids, rank) for rank, start in enumerate((0, 4, 8))]
    assert torch.equal(torch.stack(parts).sum(0), weight[ids])
