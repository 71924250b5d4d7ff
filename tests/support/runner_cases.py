"""Random batches for the runner's kernels: each kernel against its reference on the CPU.

`main` runs them on the CPU, so that it can do so in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from compiled_engine.engine.input_batch import LAST_NUMBER, RING, InputBuffers, launch_prepare, prepare_reference
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_sampling import advance_reference, launch_advance
from compiled_engine.sampling.sampled_tokens import NOT_A_NUMBER

MADE = (
    "input_ids_T",
    "positions_T",
    "slot_mapping_T",
    "seq_lens_R",
    "logits_index_R",
    "sample_positions_R",
    "num_steps_1",
    "tokens_KR1",
)
STATES = ("num_computed_S", "prefill_len_S", "last_token_S", "block_table_SB")


class Case:
    """States and buffers with random content, equal for equal seeds on any device."""

    def __init__(self, seed: int, device: torch.device):
        random_ = random.Random(seed)
        generator = np.random.default_rng(seed)
        self.num_state_rows, max_model_len = random_.choice([3, 17, 256]), random_.choice([40, 300, 2000])
        block_size = random_.choice([4, 16, 256])
        self.states = RequestStates(self.num_state_rows, max_model_len, block_size, device)
        blocks = self.states.block_table_SB.shape[1]
        self.decodes_only = random_.random() < 0.4
        count = random_.randrange(1, self.num_state_rows + 1)
        self.num_rows = count + random_.randrange(0, 2 if not self.decodes_only else self.num_state_rows - count + 2)
        lens = np.ones(self.num_rows, np.int32)
        if not self.decodes_only:
            lens[:count] = generator.integers(1, random_.choice([2, 9, 39]), count)
            lens[count:] = 3
        self.num_tokens = int(lens.sum()) + (0 if self.decodes_only else random_.choice([0, 0, 5, 70]))
        self.buffers = InputBuffers(
            self.num_tokens + 8, self.num_state_rows + 1, blocks, self.states.writes, torch.device(device)
        )

        def fill(tensor: torch.Tensor, values: np.ndarray) -> None:
            tensor.copy_(torch.from_numpy(values.astype(np.int64)).to(tensor.dtype).view(tensor.shape))

        known = generator.integers(1, max_model_len + 1, self.num_state_rows)
        computed = np.minimum(known - 1 + generator.integers(-60, 60, self.num_state_rows), max_model_len - 40)
        fill(self.states.prefill_len_S, known)
        fill(self.states.num_computed_S, np.maximum(computed, 0))
        fill(self.states.last_token_S, generator.integers(0, 150_000, self.num_state_rows))
        fill(self.states.block_table_SB, generator.integers(0, 9999, (self.num_state_rows, blocks)))
        fill(self.states.token_row_S, generator.permutation(2 * self.num_state_rows)[: self.num_state_rows])
        fill(self.states.all_token_ids_KL, generator.integers(0, 150_000, self.states.all_token_ids_KL.shape))
        rows = np.full(self.num_rows, -1)
        rows[:count] = generator.permutation(self.num_state_rows)[:count]
        fill(self.buffers.rows_R[: self.num_rows], rows)
        fill(self.buffers.query_start_loc_R1[: self.num_rows + 1], np.concatenate(([0], np.cumsum(lens))))
        for name in MADE[:6]:
            getattr(self.buffers, name).fill_(77)  # whatever is not written stays that
        token_ids_R = generator.integers(0, 150_000, self.num_rows)
        token_ids_R[generator.random(self.num_rows) < 0.2] = NOT_A_NUMBER
        self.token_ids_R = torch.from_numpy(token_ids_R).to(device)
        self.again = random_.random() < 0.3
        self.buffers.num_steps_1.fill_(random_.choice([0, RING - 1, LAST_NUMBER]))

    def same_as(self, other: Case) -> None:
        for owner, names in (("buffers", MADE), ("states", STATES)):
            for name in names:
                mine, theirs = getattr(getattr(self, owner), name), getattr(getattr(other, owner), name)
                torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=0, atol=0, msg=name)
        # The table's blocks past a context stay what they were.
        for row in range(self.num_rows):
            used = -(-int(self.buffers.seq_lens_R[row]) // self.states.block_size)
            mine, theirs = self.buffers.block_table_RB[row, :used], other.buffers.block_table_RB[row, :used]
            torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=0, atol=0, msg="block_table_RB")


def check(seed: int, device: torch.device) -> None:
    """Check the kernels prepare and advance on `device` against their references on the CPU."""
    case, reference = Case(seed, device), Case(seed, torch.device("cpu"))
    launch_prepare(case.states, case.buffers, case.num_rows, case.num_tokens, case.decodes_only)
    prepare_reference(
        reference.states, reference.buffers, reference.num_rows, reference.num_tokens, reference.decodes_only
    )
    case.same_as(reference)
    launch_advance(case.states, case.buffers, case.token_ids_R, case.num_rows, case.decodes_only, case.again)
    advance_reference(
        reference.states,
        reference.buffers,
        reference.token_ids_R,
        reference.num_rows,
        decodes_only=reference.decodes_only,
        again=reference.again,
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    case.same_as(reference)
    assert (reference.states.last_token_S >= 0).all(), "a step may be under way that looks it up"


def main() -> None:
    for seed in range(20):
        check(seed, torch.device("cpu"))
    print("equal")
