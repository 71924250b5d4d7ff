"""Random batches for the kernels of drafts: each kernel against its reference on the CPU.

As a script it runs them in Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from runner_cases import MADE, STATES

from compiled_engine.config import SpeculationConfig
from compiled_engine.engine.input_batch import (
    LAST_NUMBER,
    RING,
    InputBatch,
    InputBuffers,
    launch_prepare,
    prepare_reference,
)
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.features.speculation.draft_rows import (
    keep_drafts,
    launch_keep_drafts,
    stage_with_offsets,
)
from compiled_engine.features.speculation.ngram import Ngrams, ngram_drafts
from compiled_engine.features.speculation.verification import Acceptance, launch_verify, verify_reference
from compiled_engine.rows.row_fields import RowField
from compiled_engine.sampling.sampled_tokens import NOT_A_NUMBER

ROWS, BLOCK_SIZE, WORDS = 9, 4, 5


class DraftCase:
    """States and a batch with random content, of few different tokens; equal for equal seeds, whatever the device."""

    def __init__(self, seed: int, device: torch.device):
        random_, generator = random.Random(seed), np.random.default_rng(seed)
        self.num_drafts = random_.choice([1, 3, 4, 7])
        max_model_len = random_.choice([60, 300])
        self.states = RequestStates(ROWS, max_model_len, BLOCK_SIZE, device, 2, self.num_drafts, has_history=True)
        self.states.fields.declare(RowField("seed", torch.int64))
        blocks = self.states.block_table_SB.shape[1]
        self.buffers = InputBuffers(200, 80, blocks, self.states.writes, device, has_offsets=True)
        self.lookup = random_.randrange(1, 3), random_.randrange(3, 7)

        def fill(tensor: torch.Tensor, values: np.ndarray) -> None:
            tensor.copy_(torch.from_numpy(values.astype(np.int64)).to(tensor.dtype).view(tensor.shape))

        states = self.states
        assert states.ahead_SK is not None
        assert states.history_SL is not None
        known = generator.integers(1, 20, ROWS)
        computed = np.maximum(known + generator.integers(-2, 25, ROWS), 0)
        fill(states.prefill_len_S, known)
        fill(states.num_computed_S, computed)
        fill(states.last_token_S, generator.integers(0, WORDS, ROWS))
        fill(states.block_table_SB, generator.integers(0, 999, (ROWS, blocks)))
        fill(states.token_row_S, generator.permutation(2 * ROWS)[:ROWS])
        fill(states.all_token_ids_KL, generator.integers(0, WORDS, states.all_token_ids_KL.shape))
        fill(states.history_SL, generator.integers(0, WORDS, states.history_SL.shape))
        fill(states.fields["seed"], generator.integers(0, 1 << 62, ROWS))
        drafts = generator.integers(0, WORDS, (ROWS, self.num_drafts))
        for row in range(ROWS):
            drafts[row, random_.randrange(self.num_drafts + 1) :] = -1
        fill(states.ahead_SK, drafts)

        entries = []  # of a row of the batch: row, number, tokens
        for row in generator.permutation(ROWS)[: random_.randrange(1, ROWS + 1)].tolist():
            if computed[row] >= known[row]:
                entries += [(row, number, 1) for number in range(random_.randrange(1, self.num_drafts + 2))]
            elif computed[row] + 1 == known[row] or random_.random() < 0.5:
                entries.append((row, 0, 1))
            else:
                entries.append((row, 0, random_.randrange(1, int(known[row] - computed[row]) + 1)))
        self.is_first_pass = random_.random() < 0.3  # of a draft model, which is not verified
        if self.is_first_pass:
            entries = [(row, -1, 1) for row in range(ROWS) if computed[row] > 0] + entries
        entries.sort(key=lambda entry: entry[2] > 1)
        if random_.random() < 0.5:
            entries += [(-1, 0, 1)] * random_.randrange(4) if all(n == 1 for *_, n in entries) else []
        rows, numbers, lens = (np.array(values, np.int32) for values in zip(*entries, strict=True))
        self.batch: InputBatch = stage_with_offsets(
            self.buffers, [""] * len(rows), rows, numbers, lens, np.zeros(len(rows), np.int32), rows >= 0
        )
        states.writes.apply()
        for name in MADE[:6]:
            getattr(self.buffers, name).fill_(77)
        self.taken_R = torch.full_like(self.buffers.rows_R, 77)
        self.buffers.num_steps_1.fill_(random_.choice([0, RING - 1, LAST_NUMBER]))
        token_ids_R = generator.integers(0, 2, len(rows))
        token_ids_R[generator.random(len(rows)) < 0.1] = NOT_A_NUMBER
        follows_R = (numbers[1:] > 0) & (generator.random(len(rows) - 1) < 0.7)
        token_ids_R[:-1][follows_R] = drafts[rows[1:], np.maximum(numbers[1:] - 1, 0)][follows_R]
        self.token_ids_R = torch.from_numpy(token_ids_R).to(device)
        rates = sorted((random_.random() for _ in range(self.num_drafts)), reverse=True)
        self.acceptance = Acceptance(tuple(rates) if random_.random() < 0.4 else (), device)

    def same_as(self, other: DraftCase) -> None:
        for owner, names in (
            ("buffers", MADE),
            ("states", (*STATES, "ahead_SK", "history_SL")),
        ):
            for name in names:
                mine, theirs = getattr(getattr(self, owner), name), getattr(getattr(other, owner), name)
                torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=0, atol=0, msg=name)
        assert self.taken_R.tolist() == other.taken_R.tolist()


def check(seed: int, device: torch.device) -> None:
    """Check the kernels of drafts on `device` against their references on the CPU: prepare, verify, draft."""
    for has_offsets in (False, True):
        case, reference = DraftCase(seed, device), DraftCase(seed, torch.device("cpu"))
        batch = reference.batch
        shape = batch.num_rows, batch.padded_tokens, batch.decodes_only
        launch_prepare(case.states, case.buffers, *shape, has_offsets=has_offsets)
        prepare_reference(reference.states, reference.buffers, *shape, has_offsets=has_offsets)
        case.same_as(reference)
    for add in () if case.is_first_pass else (0, 1):
        launch_verify(case.states, case.buffers, case.token_ids_R + add, batch.num_rows, case.acceptance, case.taken_R)
        tokens_R = reference.token_ids_R + add
        given = reference.states, reference.buffers, tokens_R, batch.num_rows
        verify_reference(*given, reference.acceptance, reference.taken_R)
        if device.type == "cuda":
            torch.cuda.synchronize()
        case.same_as(reference)
    shortest, longest = case.lookup
    config = SpeculationConfig("ngram", case.num_drafts, longest, shortest)
    Ngrams(config, case.states, case.buffers).launch(case.batch)
    states = reference.states
    assert states.history_SL is not None
    assert states.ahead_SK is not None
    for row, number in zip(batch.rows.tolist(), reference.buffers.offsets_R.tolist(), strict=False):
        computed = int(states.num_computed_S[row])
        if row >= 0 and number == 0 and computed >= int(states.prefill_len_S[row]):
            found = ngram_drafts(states.history_SL[row, : computed + 1].numpy(), longest, shortest, case.num_drafts)
            states.ahead_SK[row] = -1
            states.ahead_SK[row, : len(found)] = torch.from_numpy(found)
    case.same_as(reference)


def check_kept(seed: int, device: torch.device) -> None:
    """Check the kernel that keeps a pass's drafts on `device` against its reference on the CPU."""
    case, reference = DraftCase(seed, device), DraftCase(seed, torch.device("cpu"))
    generator = np.random.default_rng(seed)
    num_rows = int(generator.integers(1, ROWS + 1))
    rows = generator.permutation(ROWS)[:num_rows].astype(np.int32)
    rows[generator.random(num_rows) < 0.2] = -1
    room_R = torch.from_numpy(generator.integers(0, case.num_drafts + 1, 80).astype(np.int32))
    token_ids_R = torch.from_numpy(generator.integers(-2, WORDS, num_rows))
    draft = int(generator.integers(case.num_drafts))
    for each in (case, reference):
        each.buffers.rows_R[:num_rows].copy_(torch.from_numpy(rows))
        assert each.buffers.offsets_R is not None
        each.buffers.offsets_R.fill_(77)
    launch_keep_drafts(case.states, case.buffers, room_R.to(device), token_ids_R.to(device), draft)
    keep_drafts(reference.states, reference.buffers, room_R, token_ids_R, draft)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for mine, theirs in (
        (case.states.ahead_SK, reference.states.ahead_SK),
        (case.buffers.offsets_R, reference.buffers.offsets_R),
    ):
        assert mine is not None
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=0)


if __name__ == "__main__":
    for seed in range(16):
        check(seed, torch.device("cpu"))
        check_kept(seed, torch.device("cpu"))
    print("equal")
