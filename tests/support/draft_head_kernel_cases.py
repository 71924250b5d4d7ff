"""Random batches for the kernels of heads: each kernel against its reference on the CPU.

As a script it runs them in Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import numpy as np
import torch
from draft_kernel_cases import ROWS, WORDS, DraftCase

from compiled_engine.engine.input_batch import prepare_reference
from compiled_engine.features.speculation.draft_head import (
    begin_drafts,
    following_tokens,
    keep_hidden,
    launch_begin_drafts,
    launch_following_tokens,
    launch_keep_hidden,
)
from compiled_engine.features.speculation.draft_rows import HeadInputs, keep_drafts, launch_keep_drafts

SIZE = 1030  # more than a tile


class HeadCase(DraftCase):
    """A batch whose inputs are prepared, with hidden states, and rows that draft.

    shifted: positions are less than the tokens' numbers, as behind images.
    """

    def __init__(self, seed: int, device: torch.device, *, shifted: bool = False):
        super().__init__(seed, torch.device("cpu"))
        generator = np.random.default_rng(seed)
        batch = self.batch
        if shifted:
            self.states.position_shift_S = torch.arange(ROWS, dtype=torch.int32) * -3
        shape = batch.num_rows, batch.padded_tokens, batch.decodes_only
        prepare_reference(self.states, self.buffers, *shape, has_offsets=True)
        # Some requests have taken tokens of the step.
        computed_S = self.states.num_computed_S.numpy()
        for row, end in zip(batch.rows.tolist(), self.buffers.sample_positions_R.tolist(), strict=False):
            if row >= 0 and end > 0 and generator.random() < 0.5:
                computed_S[row] = end
        self.states.history_SL.numpy()[:, -1] = WORDS  # type: ignore[union-attr]
        moved: list[tuple[object, str]] = [
            *((self.states, name) for name in ("num_computed_S", "ahead_SK", "history_SL")),
            *(
                (self.buffers, name)
                for name in ("rows_R", "query_start_loc_R1", "positions_T", "sample_positions_R", "logits_index_R")
            ),
            (self.buffers, "offsets_R"),
        ]
        if shifted:
            moved.append((self.states, "position_shift_S"))
        for owner, name in moved:
            setattr(owner, name, getattr(owner, name).to(device))

        def random_(*shape: int) -> torch.Tensor:
            return torch.from_numpy(generator.normal(size=shape).astype(np.float32)).to(device)

        self.hidden_TD, self.kept_SD = random_(batch.padded_tokens, SIZE), random_(ROWS, SIZE)
        self.token_ids_T = torch.full((200,), 77, dtype=torch.int64, device=device)
        rows = generator.permutation(ROWS).astype(np.int32)
        rows[generator.random(ROWS) < 0.2] = -1
        self.drafting_R = torch.from_numpy(rows).to(device)
        self.begun_RD = random_(ROWS, SIZE)
        self.positions_R = torch.full((ROWS,), 77, dtype=torch.int64, device=device)
        room = generator.integers(0, self.num_drafts + 1, 80).astype(np.int32)
        self.room_R = torch.from_numpy(room).to(device)
        self.tokens_R = torch.from_numpy(generator.integers(-2, WORDS, ROWS)).to(device)
        self.draft = int(generator.integers(self.num_drafts))
        self.inputs = HeadInputs(torch.full((80,), 77, device=device), torch.full((80,), 5, device=device))

    def results(self) -> list[torch.Tensor]:
        inputs = self.inputs
        found = [self.token_ids_T, self.kept_SD, self.begun_RD, self.positions_R, self.states.ahead_SK]
        found += [self.buffers.offsets_R, inputs.token_ids_T, inputs.positions_R]
        return [each.cpu() for each in found if each is not None]


def check(seed: int, device: torch.device) -> None:
    """Check the kernels of heads on `device` against their references on the CPU: follow a step, begin drafts."""
    shifted = seed % 2 == 1
    case, reference = HeadCase(seed, device, shifted=shifted), HeadCase(seed, torch.device("cpu"), shifted=shifted)
    unshifted = HeadCase(seed, torch.device("cpu"))
    following_tokens(unshifted.states, unshifted.batch, unshifted.buffers, unshifted.token_ids_T)
    steps = (
        (case, launch_following_tokens, launch_keep_hidden, launch_begin_drafts, launch_keep_drafts),
        (reference, following_tokens, keep_hidden, begin_drafts, keep_drafts),
    )
    for each, follow, keep, begin, keep_draft in steps:
        batch, states, buffers = each.batch, each.states, each.buffers
        follow(states, batch, buffers, each.token_ids_T)
        keep(states, buffers, batch.num_rows, each.hidden_TD, each.kept_SD)
        begin(states, each.drafting_R, each.kept_SD, each.begun_RD, each.positions_R)
        buffers.rows_R[:ROWS] = each.drafting_R
        keep_draft(states, buffers, each.room_R, each.tokens_R, each.draft, each.inputs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    is_real_T = unshifted.buffers.slot_mapping_T >= 0
    assert torch.equal(reference.token_ids_T[is_real_T], unshifted.token_ids_T[is_real_T])
    for mine, theirs in zip(case.results(), reference.results(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


if __name__ == "__main__":
    for seed in range(16):
        check(seed, torch.device("cpu"))
    print("equal")
