"""The data that features keep about requests in rows, and their work around a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_engine.config import Recurrences, RowState
from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.messages import NewRequest, SchedulerOutput
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.runner import update_rows
from compiled_engine.engine.step_hooks import StepFeature, StepHooks
from compiled_engine.features.adapters.slots import AdapterSlots
from compiled_engine.features.adapters.step_adapters import StepAdapters
from compiled_engine.features.pooling.step_pooling import ByToken, TokenTypes
from compiled_engine.features.prompt_logprobs.step_prompt_logprobs import StepPromptLogprobs
from compiled_engine.features.recurrence.state_rows import StateRows
from compiled_engine.sampling.params import SamplingParams

NUM_ROWS, NUM_SNAPSHOTS = 3, 2
CPU = torch.device("cpu")


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
    rows = StateRows(Recurrences(declared, NUM_ROWS, NUM_SNAPSHOTS), tensors, states)
    plain, begins = request("plain"), request("begins", snapshot=1)
    for new in (plain, begins):
        states.add(new, 0)

    def content() -> list[int]:
        found = [[int(row.flatten()[0]) for row in tensor] for tensor in tensors.values()]
        assert found[0] == found[1] == found[2]
        assert all((tensor.flatten(1) == tensor.flatten(1)[:, :1]).all() for tensor in tensors.values())
        return found[0]

    assert content() == [0, 1, 2, 3, 4]
    rows.begin(step((plain, begins)))
    assert content() == [0, 4, 2, 3, 4]
    for tensor in tensors.values():
        tensor[states.row("plain")] = 9
    rows.end(step(snapshots={"plain": 1, "begins": 0}))
    assert content() == [9, 4, 2, 4, 9]
    of_row = 2 * 4 + 4 * 2 + 4
    assert rows.metrics() == {"state_bytes": 5 * of_row, "snapshot_bytes": 2 * of_row}


@pytest.mark.parametrize(
    ("start", "owes"), [(0, True), (1, True), (2, False), (3, False)]
)  # of three tokens the last has none behind it
def test_a_step_owes_log_probabilities_as_long_as_it_computes_the_prompt(start: int, owes: bool) -> None:
    states = RequestStates(NUM_ROWS, 32, 4, CPU)
    parts: Any = SimpleNamespace(states=states, model=None, vocabulary=None)
    feature = StepPromptLogprobs(parts, computes=True)
    take(states, [feature], request("asks", prompt_logprobs=0), request("other", prompt=9))

    def owed(*starts: tuple[str, int]) -> bool:
        names, begins = map(list, zip(*starts, strict=True))
        count = len(names)
        return feature.wants_hidden(SchedulerOutput(1, (), (), names, begins, [1] * count, [True] * count, {}))

    assert owed(("other", 0), ("asks", start)) == owes
    assert not owed(("other", 0))
    take(states, [feature], removed=("asks",))
    assert not owed(("other", 0))


def take(states: RequestStates, features: list[StepFeature], *new: NewRequest, removed: tuple[str, ...] = ()) -> None:
    """Give these requests rows, and take those of the removed ones."""
    names = [each.request_id for each in new]
    scheduled = SchedulerOutput(1, removed, new, names, [0] * len(new), [1] * len(new), [True] * len(new), {})
    update_rows(scheduled, states, None, StepHooks(features))


def test_a_row_has_what_its_request_asks_for_and_loses_it() -> None:
    states = RequestStates(2, 32, 4, CPU, num_ahead=2, has_history=True)
    assert states.history_SL is not None
    assert states.history_SL.shape[-1] == 33
    slots: Any = object.__new__(AdapterSlots)
    adapters, by_token, types = StepAdapters(slots, states), ByToken(), TokenTypes(states.fields)
    features: list[StepFeature] = [adapters, by_token, types]
    params = SamplingParams(seed=0)
    extras = {"pooling": True, "token_types": 1, "adapters": 1}
    asks = NewRequest("asks", (5, 6), 2, params, frozenset(), ((0,),), extras=extras)
    generations = [states.generation]
    take(states, features, asks)
    row = states.row("asks")
    generations.append(states.generation)
    states.writes.apply()
    take(states, features, request("other"))
    states.writes.apply()
    other = states.row("other")

    def variant(*names: str) -> str:
        return adapters.variant(SchedulerOutput(1, (), (), [*names], [0], [1], [True], {}))

    assert by_token.rows == {row}
    assert (variant("other", "asks"), variant("other")) == ("adapted", "")
    assert [states.fields["adapter_slot"][each].item() for each in (row, other)] == [1, -1]
    assert [states.fields["second_text"][each].item() for each in (row, other)] == [1, (1 << 31) - 1]
    assert states.history_SL[row, :2].tolist() == [5, 6]
    assert states.all_token_ids(row)[:2].tolist() == [5, 6]
    assert other != row
    generations.append(states.generation)
    take(states, features, removed=("asks",))
    generations.append(states.generation)
    assert variant("other") == ""
    assert len(set(generations)) == 4
    take(states, features, request("again"))
    assert (states.row("again"), by_token.rows, variant("again")) == (row, set(), "")


def test_only_hooks_that_a_feature_overrides_are_called() -> None:
    class Begins(StepFeature):
        def begin(self, step: SchedulerOutput) -> None:
            pass

    nothing, begins = StepFeature(), Begins()
    hooks = StepHooks([nothing, begins])
    assert hooks.begin == (begins.begin,)
    others = (hooks.added, hooks.removed, hooks.end, hooks.receive, hooks.after_sample)
    assert others == ((),) * 5
    assert (hooks.wanting_hidden, hooks.choosing_variant, hooks.reading_hidden) == ((), (), ())


def test_one_feature_at_most_edits_the_logits_of_a_step() -> None:
    class Edits(StepFeature):
        def edits(self, batch: InputBatch, late: Any) -> None:
            return None

    class EditsToo(Edits):
        """Inherits the hook."""

    edits = Edits()
    assert StepHooks([StepFeature(), edits]).editing is edits
    with pytest.raises(ValueError, match=r"^Edits and EditsToo override StepFeature\.edits; allowed: one"):
        StepHooks([edits, EditsToo()])


def test_features_choose_the_variant_in_their_order() -> None:
    class Chooses(StepFeature):
        def variant(self, step: SchedulerOutput) -> str:
            return "its own"

    one, other = Chooses(), Chooses()
    assert StepHooks([StepFeature(), one, other]).choosing_variant == (one, other)


def test_a_name_is_of_one_feature() -> None:
    class Named(StepFeature):
        name = "its own"

    class NamedToo(Named):
        pass

    StepHooks([StepFeature(), StepFeature(), Named()])
    with pytest.raises(ValueError, match=r"^Named and NamedToo have the name 'its own'; allowed: one feature"):
        StepHooks([Named(), NamedToo()])


def test_a_feature_with_results_has_a_name() -> None:
    class Nameless(StepFeature):
        def read_hidden(self, batch: Any, output: Any) -> None:
            return None

    with pytest.raises(ValueError, match="Nameless has results, so it must have a name"):
        StepHooks([Nameless()])
