"""Views of values as views of their cores: the same elements, whatever was reshaped, transposed and squeezed before."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from compiled_engine.passes.layout.layout_form import Form, permuted, reshaped, squeezed, unsqueezed


def core_of(*shape: int) -> tuple[fx.Node, torch.Tensor]:
    value = torch.arange(math.prod(shape)).reshape(shape)
    node = fx.Graph().placeholder("core")
    node.meta["val"] = value
    return node, value


def value_of(form: Form) -> torch.Tensor:
    """What a form stands for, made from its core."""
    value = form.core.meta["val"].permute(form.order)
    for place, dim in enumerate(form.dims):
        if dim is None:
            value = value.unsqueeze(place)
    return value


@st.composite
def forms(draw: st.DrawFn) -> Form:
    node, _ = core_of(*draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)))
    form = Form.of(node)
    for _ in range(draw(st.integers(0, 2))):
        form = unsqueezed(form, draw(st.integers(0, form.rank)))
    return permuted(form, draw(st.permutations(range(form.rank))))


@given(forms(), st.data())
def test_a_reshape_is_that_of_the_value_or_not_known(form: Form, data: st.DataObject) -> None:
    count = math.prod(form.sizes())
    wanted: list[int] = []
    while count > 1 and len(wanted) < 4:
        size = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
        wanted.append(size)
        count //= size
    wanted.append(count)
    found = reshaped(form, wanted)
    if found is None:
        return
    sizes, dims = found
    core = form.core.meta["val"] if sizes is None else form.core.meta["val"].reshape(sizes)
    node = fx.Graph().placeholder("core")
    node.meta["val"] = core
    torch.testing.assert_close(value_of(Form(node, dims)), value_of(form).reshape(wanted))


@pytest.mark.parametrize(
    ("shape", "order", "wanted", "sizes"),
    [
        ((6, 32), None, (1, 6, 4, 8), [6, 4, 8]),
        ((6, 32), None, (1, 6, 1, 32), [6, 1, 32]),
        ((6, 4, 8), (1, 0, 2), (1, 4, 6, 4, 2), [6, 4, 4, 2]),
        ((6, 4, 8), None, (1, 6, 32), [6, 32]),
    ],
)
def test_what_models_do_costs_one_view(
    shape: tuple[int, ...], order: tuple[int, ...] | None, wanted: tuple[int, ...], sizes: list[int]
) -> None:
    node, _ = core_of(*shape)
    form = unsqueezed(permuted(Form.of(node), order or range(len(shape))), 0)
    found = reshaped(form, wanted)
    assert found is not None
    assert found[0] == sizes
    assert found[1][0] is None


def test_a_batch_of_one_comes_and_goes() -> None:
    node, value = core_of(3, 4)
    batch = unsqueezed(Form.of(node), 0)
    assert batch.dims == (None, 0, 1)
    assert squeezed(batch, 0) == Form.of(node)
    assert squeezed(batch, 1) is None
    turned = permuted(batch, (0, 2, 1))
    torch.testing.assert_close(value_of(turned), value.unsqueeze(0).transpose(1, 2))
    assert not turned.is_ordered
