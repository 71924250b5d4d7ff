"""From a step's hidden states to its tokens: logits of the rows that sample, further parameters, masks, and what the
states and the host get."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compiled_engine.engine.forward import ForwardOutput
from compiled_engine.engine.input_batch import InputBatch, InputBuffers, make_batch, prepare
from compiled_engine.engine.messages import NewRequest, RunnerOutput, SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_sampling import StepAdvance, StepSampling, TokenRing
from compiled_engine.features.structured.extras import TokenMasks
from compiled_engine.features.structured.step_masks import MaskedSteps
from compiled_engine.process.profiling import StepClock
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.sampler import Sampler, StepEdits

CPU = torch.device("cpu")
VOCABULARY = 40
GREEDY = SamplingParams(temperature=0.0, seed=1)


class Steps:
    """Requests, each with a prompt of three tokens, and steps of them whose hidden states are their logits."""

    def __init__(self, **params: SamplingParams) -> None:
        self.states = RequestStates(4, 32, 4, CPU)
        self.buffers = InputBuffers(16, 5, self.states.block_table_SB.shape[1], self.states.writes, CPU)
        self.sampler = Sampler(self.states.fields, VOCABULARY)
        self.ring = TokenRing(self.buffers, CPU, StepClock(CPU))
        self.rows_of_logits: list[int] = []
        advance = StepAdvance(self.states, self.buffers)
        model: Any = SimpleNamespace(logits_of=self._logits_of)
        self.sampling = StepSampling(model, self.sampler, self.buffers, self.ring, advance)
        self.names = list(params)
        for name, each in params.items():
            row = self.states.add(NewRequest(name, (1, 2, 3), 3, each, frozenset(), ((0,),)), 0)
            masked = name == "masked"
            self.sampler.add_row(row, each, each.seed or 0, (1, 2, 3), 3, (), edited_late=masked)

    def _logits_of(self, output: ForwardOutput) -> torch.Tensor:
        self.rows_of_logits.append(len(output.tensor))
        return output.tensor

    def begin(self, start: int, count: int, samples: list[bool] | None = None) -> InputBatch:
        num = len(self.names)
        asked = samples or [True] * num
        step = SchedulerOutput(1, (), (), self.names, [start] * num, [count] * num, asked, {})
        batch = make_batch(step, self.states, self.buffers, None)
        self.states.writes.apply()
        prepare(batch, self.states, self.buffers)
        return batch

    def run(self, batch: InputBatch, logits_TV: torch.Tensor, edits: StepEdits | None = None) -> RunnerOutput:
        self.ring.catch_up()
        logits_RV = self.sampling.launch_rest(batch, ForwardOutput(logits_TV, is_logits=False), {})
        self.ring.launched()
        found = None if logits_RV is None else self.sampling.complete(batch, logits_RV, edits)
        return self.ring.pending_step(batch, found, {}).result()

    def last_tokens(self) -> list[int]:
        return [int(self.states.last_token_S[self.states.row(name)]) for name in self.names]


def peaks(*tokens: int) -> torch.Tensor:
    """Logits [T, V] that are largest at one token each, and second at the one before."""
    logits_TV = torch.zeros(len(tokens), VOCABULARY)
    for place, token in enumerate(tokens):
        logits_TV[place, token], logits_TV[place, token - 1] = 9.0, 8.0
    return logits_TV


def test_tokens_are_those_of_the_last_token_of_each_request() -> None:
    """Logits are computed of the rows that sample alone; the states and the host have the tokens."""
    steps = Steps(a=GREEDY, b=GREEDY)
    found = steps.run(steps.begin(0, 3), peaks(11, 12, 13, 21, 22, 23))
    assert found.token_ids == [13, 23]
    assert steps.rows_of_logits == [2]
    assert steps.last_tokens() == [13, 23]
    following = steps.begin(3, 1)
    assert steps.buffers.input_ids_T[:2].tolist() == [13, 23]
    assert steps.run(following, peaks(5, 6)).token_ids == [5, 6]


def test_a_chunk_of_a_prompt_computes_no_logits() -> None:
    steps = Steps(a=GREEDY, b=GREEDY)
    found = steps.run(steps.begin(0, 2, [False, False]), peaks(11, 12, 21, 22))
    assert (found.token_ids, steps.rows_of_logits) == ([], [])
    assert steps.run(steps.begin(2, 1), peaks(13, 23)).token_ids == [13, 23]


def test_rows_that_do_not_sample_keep_what_they_have() -> None:
    steps = Steps(a=GREEDY, b=GREEDY)
    assert steps.run(steps.begin(0, 3, [True, False]), peaks(11, 12, 13, 21, 22, 23)).token_ids == [13]
    assert steps.last_tokens()[0] == 13


def test_what_has_more_than_a_temperature_is_sampled_again() -> None:
    """The tokens of the second time replace those of the first everywhere; others stay."""
    penalised = SamplingParams(temperature=0.0, seed=1, repetition_penalty=100.0)
    steps = Steps(plain=GREEDY, penalised=penalised)
    logits_TV = peaks(11, 12, 3, 21, 22, 3)  # 3 and 2 are in the prompt
    logits_TV[5, 30] = 1.0
    assert steps.run(steps.begin(0, 3), logits_TV).token_ids == [3, 30]
    assert steps.last_tokens() == [3, 30]
    assert steps.run(steps.begin(3, 1), peaks(7, 8)).token_ids == [7, 8]


def test_a_mask_is_its_requests_alone() -> None:
    steps = Steps(free=GREEDY, masked=GREEDY)
    words = np.zeros(-(-VOCABULARY // 32), np.int32)
    words[33 // 32] = 1 << 33 % 32
    batch = steps.begin(0, 3)
    late = TokenMasks(["masked"], memoryview(words.tobytes()))
    edits = MaskedSteps(steps.sampler.vocabulary, torch.device("cpu")).edits(batch, late)
    assert steps.run(batch, peaks(11, 12, 13, 21, 22, 23), edits).token_ids == [13, 33]
    assert steps.last_tokens() == [13, 33]


@pytest.mark.parametrize("again", [False, True], ids=["by temperature", "again"])
def test_log_probabilities_are_those_of_the_tokens(again: bool) -> None:
    params = SamplingParams(temperature=0.0, seed=1, logprobs=1, repetition_penalty=1.5 if again else 1.0)
    steps = Steps(a=params, b=GREEDY)
    logits_TV = peaks(11, 12, 13, 21, 22, 23)
    found = steps.run(steps.begin(0, 3), logits_TV)
    assert found.logprobs is not None
    (of_a, *_) = found.logprobs
    expected = 9.0 - math.log(math.exp(9.0) + math.exp(8.0) + VOCABULARY - 2)
    assert (found.token_ids, of_a.token_ids[0], of_a.rank) == ([13, 23], 13, 1)
    assert of_a.logprobs[0] == pytest.approx(expected, abs=1e-5)
    assert steps.run(steps.begin(3, 1), peaks(5, 6)).token_ids == [5, 6]
