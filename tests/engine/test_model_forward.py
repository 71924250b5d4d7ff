"""The model's forward: which one a number of tokens has, what it returns, and the threads that a step is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_engine.engine.forward import LEAST_WORK, ForwardOutput, ModelForward, threads_for_step
from compiled_engine.graphs.compiled_model import Forwards
from compiled_engine.passes.framework.graph_pass import CompileRange

HIDDEN_TD = torch.arange(10.0).view(5, 2)
SLOTS_T = torch.tensor([3, -1, 2, 0, 1], dtype=torch.int32)
SMALL = 4  # tokens, up to which forwards end at logits
CPU = torch.device("cpu")


def bind(
    parameters: Any, on_attention: object = None, received: object = None, *, distinct: bool = False, variant: str = ""
) -> Forwards:
    """Forwards that say how they were bound, in a tensor's place. Logits of hidden states are these, or where rows have
    slots these plus 100 times the slots."""
    bound = ["adapted"] * bool(variant) + ["distinct"] * distinct + ["parts"] * (on_attention is not None)

    def forward(*names: str) -> Callable[..., Any]:
        return lambda *arguments: [*names, *bound, *arguments]

    def logits(hidden_RD: torch.Tensor, slots_R: torch.Tensor | None = None) -> torch.Tensor:
        return hidden_RD.clone() if slots_R is None else hidden_RD + 100 * slots_R.view(-1, 1)

    return Forwards(forward("hidden"), logits, ((CompileRange(1, SMALL, small=True), forward("logits")),))


def made(on_attention: Any = None) -> ModelForward:
    compiled: Any = SimpleNamespace(received_row_bytes=0, variants=("adapted",), bind=bind)
    return ModelForward(torch.nn.Identity(), compiled, {}, on_attention)


@pytest.mark.parametrize("tokens", [slice(3), slice(1, 4), torch.tensor([4, 1])], ids=["first", "inner", "chosen"])
def test_rows_keep_their_own_slots(tokens: Any) -> None:
    model = made()
    hidden = ForwardOutput(HIDDEN_TD, False, variant="adapted", beside=(SLOTS_T,))
    expected = HIDDEN_TD[tokens] + 100 * SLOTS_T[tokens].view(-1, 1)
    assert torch.equal(model.logits_of(hidden.of_tokens(tokens)), expected)
    plain = ForwardOutput(HIDDEN_TD, is_logits=False)
    assert torch.equal(model.logits_of(plain.of_tokens(tokens)), HIDDEN_TD[tokens])
    logits = replace(hidden, is_logits=True)
    assert torch.equal(model.logits_of(logits.of_tokens(tokens)), HIDDEN_TD[tokens])


@pytest.mark.parametrize("variant", ["", "adapted"])
def test_few_tokens_end_at_logits_unless_hidden_states_are_wanted(variant: str) -> None:
    model, named = made(), [variant] * bool(variant)
    assert model.variants == ("", "adapted")
    for num_tokens, ends in ((1, True), (SMALL, True), (SMALL + 1, False)):
        assert model.ends_at_logits(num_tokens, variant) == ends
        found = model.run(num_tokens, ("inputs",), variant=variant)  # type: ignore[arg-type]
        assert (found.tensor, found.is_logits) == (["logits" if ends else "hidden", *named, "inputs"], ends)
        hidden = model.run(num_tokens, (), hidden_wanted=True, variant=variant)  # type: ignore[arg-type]
        assert (hidden.tensor, hidden.is_logits) == (["hidden", *named], False)


def test_a_capture_in_parts_and_a_call_of_each_kind_have_forwards_of_their_own() -> None:
    of_graphs, eager = made(on_attention=print), made()

    def run(model: ModelForward, **how: bool) -> Any:
        return model.run(1, (), **how).tensor  # type: ignore[arg-type]

    assert run(of_graphs) == ["logits"]
    assert run(of_graphs, around_attention=True) == ["logits", "parts"]
    assert run(of_graphs, distinct=True) == ["logits", "distinct"]
    assert run(of_graphs, distinct=True, around_attention=True) == ["logits", "distinct", "parts"]
    assert run(eager, around_attention=True) == ["logits"]


def test_the_inputs_of_layers_come_behind_the_result() -> None:
    compiled: Any = SimpleNamespace(
        received_row_bytes=0, variants=(), bind=lambda *a, **k: Forwards(lambda x: (x, x + 1, x + 2))
    )
    found = ModelForward(torch.nn.Identity(), compiled, {}, None).run(5, (HIDDEN_TD,))  # type: ignore[arg-type]
    assert torch.equal(found.tensor, HIDDEN_TD)
    assert [each[0, 0].item() for each in found.aux_hidden_states] == [1, 2]
    assert found.of_tokens(slice(1)).aux_hidden_states == ()


def test_a_step_has_the_threads_that_its_work_is_worth() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = []
        for num_tokens in (1, 2, 3, 4, 500):
            with threads_for_step(num_tokens, LEAST_WORK, CPU):
                found.append(torch.get_num_threads())
            assert torch.get_num_threads() == 4
        assert found == [1, 2, 3, 4, 4]
        with pytest.raises(ZeroDivisionError), threads_for_step(1, 1, CPU):
            raise ZeroDivisionError
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
