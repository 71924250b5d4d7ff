"""The model's forward: which one a number of tokens has, what it returns, and the threads that a step is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from plain_config import BASE

from compiled_engine.engine.forward import LEAST_WORK, ForwardOutput, ModelForward, threads_for_step
from compiled_engine.engine.load_model import EagerModel, LoadedModel, RankWeights
from compiled_engine.graphs.compiled_model import BoundRange
from compiled_engine.models.checkpoint.parameters import Weights
from compiled_engine.passes.framework.graph_pass import CompileRange

HIDDEN_TD = torch.arange(10.0).view(5, 2)
SLOTS_T = torch.tensor([3, -1, 2, 0, 1], dtype=torch.int32)
SMALL = 4  # tokens, up to which forwards end at logits
CPU = torch.device("cpu")
NO_WEIGHTS = RankWeights(Weights((), {}), torch.nn.Identity(), BASE.model, rank=0, num_ranks=1, cache_dir=None)


def logits(hidden_RD: torch.Tensor, slots_R: torch.Tensor | None = None) -> torch.Tensor:
    return hidden_RD.clone() if slots_R is None else hidden_RD + 100 * slots_R.view(-1, 1)


@dataclass(frozen=True)
class Bindable:
    """A compiled model whose functions return, in place of a tensor, how they were bound.

    Logits of hidden states are these; with slots, these plus 100 times the slots.
    """

    small_end: str = "logits"  # the end of forwards of few tokens
    variants: Sequence[str] = ("adapted",)
    ends: Sequence[str] = ("logits", "adapted_logits")
    received: torch.Tensor | None = None

    def bind(
        self, name: str, parameters: Any, on_attention: object = None, *, distinct: bool = False
    ) -> tuple[BoundRange, ...]:
        if name in self.ends:
            return (BoundRange(CompileRange(1, 64), logits),)
        bound = [name] * (name != "forward") + ["distinct"] * distinct + ["parts"] * (on_attention is not None)

        def forward(end: str) -> Callable[..., Any]:
            return lambda *arguments: [end, *bound, *arguments]

        return (
            BoundRange(CompileRange(1, SMALL, small=True), forward(self.small_end), self.small_end == "logits", 4),
            BoundRange(CompileRange(1, 64), forward("hidden"), received_row_bytes=8),
        )


def made(on_attention: Any = None, **bindable: Any) -> ModelForward:
    callables: Any = Bindable(**bindable)
    return ModelForward(BASE, LoadedModel(torch.nn.Identity(), callables, NO_WEIGHTS), on_attention)


@pytest.mark.parametrize("tokens", [slice(3), slice(1, 4), torch.tensor([4, 1])], ids=["first", "inner", "chosen"])
def test_rows_keep_their_own_slots(tokens: Any) -> None:
    model = made()
    hidden = ForwardOutput(HIDDEN_TD, False, variant="adapted", logits_inputs=(SLOTS_T,))
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
        found = model.run(num_tokens, ("inputs",), variant=variant)
        assert (found.tensor, found.is_logits) == (["logits" if ends else "hidden", *named, "inputs"], ends)
        hidden = model.run(num_tokens, (), hidden_wanted=True, variant=variant)
        assert (hidden.tensor, hidden.is_logits) == (["hidden", *named], False)


def test_a_model_without_logits_has_a_forward_of_few_tokens_too() -> None:
    model = made(small_end="pooled", ends=("pooler",))
    assert [model.ends_at_logits(num_tokens) for num_tokens in (1, SMALL, SMALL + 1)] == [False] * 3
    for hidden_wanted in (False, True):
        found = [model.run(count, (), hidden_wanted=hidden_wanted).tensor for count in (1, SMALL, SMALL + 1)]
        assert found == [["pooled"], ["pooled"], ["hidden"]]
    assert model.ends == {"pooler": logits}


def test_a_capture_in_parts_and_a_call_of_each_kind_have_forwards_of_their_own() -> None:
    model = made(on_attention=print)

    def run(**how: bool) -> Any:
        return model.run(1, (), **how).tensor  # type: ignore[arg-type]

    assert run() == ["logits"]
    assert run(around_attention=True) == ["logits", "parts"]
    assert run(distinct=True) == ["logits", "distinct"]
    assert run(distinct=True, around_attention=True) == ["logits", "distinct", "parts"]


def test_received_values_have_the_rows_of_the_forward_that_reads_them() -> None:
    assert made().received(1) is None
    model = made(received=torch.zeros(64 * 8, dtype=torch.uint8))
    sizes = [model.received(2), model.received(2, hidden_wanted=True), model.received(5)]
    assert [received.shape for received in sizes if received is not None] == [(8,), (16,), (40,)]


def eager(call: Callable[..., Any], **callables: Any) -> ModelForward:
    model = EagerModel({"forward": call, "logits": logits, **callables})
    return ModelForward(BASE, LoadedModel(torch.nn.Identity(), model, NO_WEIGHTS), None)


def test_further_tensors_come_behind_the_result() -> None:
    found = eager(lambda x: (x, x + 1, x + 2)).run(5, (HIDDEN_TD,))
    assert torch.equal(found.tensor, HIDDEN_TD)
    assert [each[0, 0].item() for each in found.further] == [1, 2]
    assert found.of_tokens(slice(1)).further == ()


def test_an_eager_model_has_the_variants_that_features_add() -> None:
    model = eager(lambda x: x, adapted=lambda x: x + 1, adapted_logits=lambda x: x * 10)
    assert model.variants == ("", "adapted")
    found = {variant: model.run(1, (HIDDEN_TD,), variant=variant) for variant in model.variants}
    assert not any(output.is_logits for output in found.values())
    assert torch.equal(model.logits_of(found[""]), HIDDEN_TD)
    assert torch.equal(model.logits_of(found["adapted"]), (HIDDEN_TD + 1) * 10)


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
