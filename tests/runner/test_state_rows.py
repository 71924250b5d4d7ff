"""Rows of recurrent states: what snapshots are copied from and to, and who owes log-probabilities of its prompt."""

from __future__ import annotations

import pytest
import torch

from compiled_engine.config import Recurrences, RowState
from compiled_engine.messages import NewRequest, SchedulerOutput
from compiled_engine.runner.request_states import RequestStates
from compiled_engine.runner.state_rows import StateRows
from compiled_engine.runner.step_sampling import owes_prompt_logprobs
from compiled_engine.sampling.params import SamplingParams

NUM_ROWS, NUM_SNAPSHOTS = 3, 2


def request(name: str, snapshot: int = -1, prompt: int = 3, prompt_logprobs: int | None = None) -> NewRequest:
    params = SamplingParams(prompt_logprobs=prompt_logprobs, seed=0)
    extras = {} if snapshot < 0 else {"recurrence": snapshot}
    return NewRequest(name, (1,) * prompt, prompt, params, frozenset(), ((0,),), extras=extras)


def step(new: tuple[NewRequest, ...] = (), snapshots: dict[str, int] | None = None) -> SchedulerOutput:
    return SchedulerOutput(1, (), new, [], [], [], [], {}, extras={"recurrence": snapshots} if snapshots else {})


def test_states_come_from_snapshots_and_go_to_them() -> None:
    """All states of a request together, whatever their dtypes, and nobody else's."""
    declared = (RowState("a", (2,), "float32"), RowState("b", (2, 2), "bfloat16"), RowState("c", (1,), "float32"))
    tensors = {
        state.name: torch.arange(NUM_ROWS + NUM_SNAPSHOTS).reshape(-1, *[1] * len(state.shape))
        .expand(-1, *state.shape).to(getattr(torch, state.dtype)).clone()
        for state in declared
    }  # fmt: skip
    states = RequestStates(NUM_ROWS, 32, 4, torch.device("cpu"))
    rows = StateRows(Recurrences(declared, NUM_ROWS, NUM_SNAPSHOTS), tensors)
    plain, begins = request("plain"), request("begins", snapshot=1)
    for new in (plain, begins):
        states.add(new, 0)

    def content() -> list[int]:
        found = [[int(row.flatten()[0]) for row in tensor] for tensor in tensors.values()]
        assert found[0] == found[1] == found[2]
        assert all((tensor.flatten(1) == tensor.flatten(1)[:, :1]).all() for tensor in tensors.values())
        return found[0]

    assert content() == [0, 1, 2, 3, 4]
    rows.begin(step((plain, begins)), states)
    assert content() == [0, 4, 2, 3, 4]
    for tensor in tensors.values():
        tensor[states.row("plain")] = 9
    rows.end(step(snapshots={"plain": 1, "begins": 0}), states)
    assert content() == [9, 4, 2, 4, 9]
    of_row = 2 * 4 + 4 * 2 + 4
    assert rows.metrics() == {"state_bytes": 5 * of_row, "snapshot_bytes": 2 * of_row}


@pytest.mark.parametrize(
    ("start", "owes"), [(0, True), (1, True), (2, False), (3, False)]
)  # of three tokens the last has none behind it
def test_who_owes_log_probabilities_of_its_prompt(start: int, owes: bool) -> None:
    states = RequestStates(NUM_ROWS, 32, 4, torch.device("cpu"))
    states.add(request("asks", prompt_logprobs=0), 0)
    states.add(request("other", prompt=9), 0)

    def owed(*starts: tuple[str, int]) -> bool:
        names, begins = map(list, zip(*starts, strict=True))
        count = len(names)
        scheduled = SchedulerOutput(1, (), (), names, begins, [1] * count, [True] * count, {})
        return owes_prompt_logprobs(scheduled, states)

    assert owed(("other", 0), ("asks", start)) == owes
    assert not owed(("other", 0))
    states.remove("asks")
    assert not owed(("other", 0))


def test_a_row_has_what_its_request_asks_for_and_loses_it() -> None:
    device = torch.device("cpu")
    states = RequestStates(2, 32, 4, device, num_drafts=2, has_history=True, has_token_types=True, has_adapters=True)
    assert states.history_SL is not None
    assert states.history_SL.shape[-1] == 33
    params = SamplingParams(seed=0)
    asks = NewRequest(
        "asks", (5, 6), 2, params, frozenset(), ((0,),), extras={"pooling": True, "token_types": 1, "adapters": 1}
    )
    generations = [states.generation]
    row = states.add(asks, 0)
    generations.append(states.generation)
    states.writes.apply()
    other = states.add(request("other"), 0)
    states.writes.apply()
    assert (states.by_token, states.adapted) == ({row}, {row})
    assert states.has_adapter(["other", "asks"])
    assert not states.has_adapter(["other"])
    assert states.history_SL[row, :2].tolist() == [5, 6]
    assert states.all_token_ids(row)[:2].tolist() == [5, 6]
    assert other != row
    generations.append(states.generation)
    states.remove("asks")
    generations.append(states.generation)
    assert (states.by_token, states.adapted, states.has_adapter(["other"])) == (set(), set(), False)
    assert len(set(generations)) == 4
    plain = RequestStates(2, 32, 4, device)
    assert (plain.history_SL, plain.drafts_SK) == (None, None)
    plain.add(asks, 0)
    assert plain.adapted == set()
