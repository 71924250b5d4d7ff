"""Which slots the logits of a step's rows are computed with, from its forward or from what a graph has left."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_engine.engine.forward import ForwardOutput, ModelForward, _Variant
from compiled_engine.engine.step_graphs import ModelStep
from compiled_engine.graphs.compiled_model import Forwards
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, decode_key, mixed_key

HIDDEN_TD = torch.arange(10.0).view(5, 2)
SLOTS_T = torch.tensor([3, -1, 2, 0, 1], dtype=torch.int32)
SMALL = 4  # tokens, up to which forwards end at logits


def model() -> ModelForward:
    """Logits of hidden states are these, or where rows have slots these plus 100 times the slots."""
    made = object.__new__(ModelForward)
    usual = Forwards(torch.nn.Identity(), logits=lambda hidden: hidden.clone())
    adapted = Forwards(torch.nn.Identity(), logits=lambda hidden, slots: hidden + 100 * slots.view(-1, 1))
    made._variants = {"": _Variant.of(usual), "adapted": _Variant.of(adapted)}
    return made


@pytest.mark.parametrize("tokens", [slice(3), slice(1, 4), torch.tensor([4, 1])], ids=["first", "inner", "chosen"])
def test_rows_keep_their_own_slots(tokens: Any) -> None:
    hidden = ForwardOutput(HIDDEN_TD, False, variant="adapted", beside=(SLOTS_T,))
    expected = HIDDEN_TD[tokens] + 100 * SLOTS_T[tokens].view(-1, 1)
    assert torch.equal(model().logits_of(hidden.of_tokens(tokens)), expected)
    plain = ForwardOutput(HIDDEN_TD, is_logits=False)
    assert torch.equal(model().logits_of(plain.of_tokens(tokens)), HIDDEN_TD[tokens])
    logits = replace(hidden, is_logits=True)
    assert torch.equal(model().logits_of(logits.of_tokens(tokens)), HIDDEN_TD[tokens])


def step() -> ModelStep:
    """One whose buffers have slots of more tokens than a graph has."""
    slots_T = torch.cat((SLOTS_T, torch.full((9,), 7, dtype=torch.int32)))
    buffers = SimpleNamespace(beside=lambda variant, num_tokens: (slots_T[:num_tokens],))
    of_model = SimpleNamespace(ends_at_logits=lambda num_tokens, variant: num_tokens <= SMALL)
    forward: Any = SimpleNamespace(model=of_model, buffers=buffers, kv_caches=[])
    nothing: Any = None
    return ModelStep(forward, nothing, nothing, 64)


@pytest.mark.parametrize(
    ("key", "is_logits"),
    [(decode_key(5, 64), True), (mixed_key(SMALL, 2, 64), True), (mixed_key(5, 2, 64), False)],
    ids=["decodes", "few tokens", "many tokens"],
)
def test_what_a_graph_leaves_has_the_slots_of_its_batch(key: GraphKey, is_logits: bool) -> None:
    padded_TD, slots_T = HIDDEN_TD[: key.num_tokens], SLOTS_T[: key.num_tokens]
    plain = step().output(key, padded_TD)
    assert (plain.is_logits, plain.beside) == (is_logits, ())
    adapted = step().output(replace(key, extra=(("adapted", 1),)), padded_TD, "adapted")
    assert (adapted.is_logits, [each.tolist() for each in adapted.beside]) == (is_logits, [slots_T.tolist()])
    logits = model().logits_of(adapted)
    assert torch.equal(logits, padded_TD if is_logits else padded_TD + 100 * slots_T.view(-1, 1))
