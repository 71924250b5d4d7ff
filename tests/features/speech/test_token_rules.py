"""The rules of a transcription's tokens, and the cuts of its windows, compared with those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speech_models import FIRST_TIME, GENERATION, IDS, NUM_TIMES, rules_of
from transformers import WhisperForConditionalGeneration

from compiled_engine.features.speech.frontend.timed_windows import cut_at_timestamps
from compiled_engine.features.speech.token_rules import TokenRules
from compiled_engine.rows.row_fields import RowFields
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.speech import SpeechRules

TIMED = {"transcription": "timestamps"}


RULES = SpeechRules(
    start=IDS["<|startoftranscript|>"],
    no_timestamps=IDS["<|notimestamps|>"],
    eos=IDS["<|endoftext|>"],
    most_tokens=28,
    languages={},
    tasks={},
    suppressed=tuple(GENERATION["suppress_tokens"]),
    suppressed_first=tuple(GENERATION["begin_suppress_tokens"]),
    before_context=None,
    latest_first=None,
)
ROWS = 3
TOKENS = st.lists(st.one_of(st.integers(0, 255), st.integers(FIRST_TIME, FIRST_TIME + 50)), max_size=6)


@settings(max_examples=30)
@given(st.lists(TOKENS, min_size=ROWS, max_size=ROWS), st.integers(0, 6), st.integers(0, 99), st.booleans())
def test_rules_are_those_of_transformers(
    tokens: Sequence[Sequence[int]], resumed: int, seed: int, has_limit: bool
) -> None:
    """Any tokens, of which the first `resumed` are known when the row is taken, and random logits."""
    prompt, fields = [5, 6, 7], RowFields(ROWS + 1, "cpu")
    rules = replace(RULES, latest_first=20 if has_limit else None)
    mine = TokenRules(rules, fields)
    for row, output in enumerate(tokens):
        fields.start(row)
        assert mine.add_row(row, SamplingParams(extra_args=TIMED), [*prompt, *output[:resumed]], len(prompt))
    fields.start(ROWS)
    assert mine.add_row(ROWS, SamplingParams(extra_args={"transcription": "text"}), prompt, len(prompt))
    fields.writes.apply()
    for number in range(resumed, 6):
        rows = [row for row in range(ROWS) if len(tokens[row]) > number]
        last_token_S = torch.zeros(ROWS + 1, dtype=torch.int32)
        last_token_S[rows] = torch.tensor([tokens[row][number] for row in rows], dtype=torch.int32)
        mine.took(np.array([*rows, ROWS]), last_token_S)
    logits_RV = torch.randn(ROWS + 1, FIRST_TIME + NUM_TIMES, generator=torch.Generator().manual_seed(seed)) * 3
    expected = []
    for row, output in enumerate([*tokens, []]):
        ids, scores = torch.tensor([[*prompt, *output]]), logits_RV[row : row + 1]
        for rule in rules_of(len(prompt), timestamps=row < ROWS, max_initial_timestamp_index=rules.latest_first):
            scores = rule(ids, scores)
        expected.append(scores)
    positions_R = torch.tensor([len(prompt) + len(output) for output in (*tokens, [])])
    mine.apply(logits_RV, torch.arange(ROWS + 1, dtype=torch.int32), positions_R)
    assert torch.equal(logits_RV, torch.cat(expected))


@settings(max_examples=60)
@given(TOKENS.filter(len), st.integers(1, 50))
def test_cuts_are_those_of_transformers(token_ids: list[int], positions: int) -> None:
    """Also of tokens that the rules do not allow, if a segment begins with a timestamp."""
    borders = [a >= FIRST_TIME and b >= FIRST_TIME for a, b in pairwise(token_ids)]
    if any(borders):
        token_ids = [FIRST_TIME, 7, *token_ids]
    segments, advance = WhisperForConditionalGeneration._retrieve_segment(
        seek_sequence=torch.tensor(token_ids),
        seek_outputs=[{}],
        time_offset=torch.zeros(1, dtype=torch.float64),
        timestamp_begin=FIRST_TIME,
        seek_num_frames=torch.tensor([2 * positions]),
        time_precision=0.5,  # so that numbers are exact
        time_precision_features=0.25,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    parts, frames = cut_at_timestamps(token_ids, FIRST_TIME, 2 * positions)
    assert frames == int(advance)
    found = [(each.start / 2, each.end / 2, list(each.token_ids)) for each in parts]
    assert found == [(float(each["start"]), float(each["end"]), each["tokens"].tolist()) for each in segments]
