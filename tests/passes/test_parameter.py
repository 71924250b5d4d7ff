"""Descriptions of parameters: packed, made of others, renamed, divided, as JSON; and their values."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from compiled_engine.parallel.shards import Section, Shard
from compiled_engine.passes.framework.parameter import (
    BUFFER,
    CODES,
    SCALES,
    STEPS,
    WEIGHT,
    Parameter,
    Scales,
    compute,
    made,
    packed,
)

A = Parameter("layer.a", (2, 4), "float32", shard=Shard((4, 4), 0, (Section(4, 2),)))
B = Parameter("layer.b", (3, 4), "float32")
VALUES = {"layer.a": torch.arange(8.0).view(2, 4), "layer.b": -torch.arange(12.0).view(3, 4)}
BOTH = torch.cat(list(VALUES.values()))


def value(leaf: Parameter) -> torch.Tensor:
    return VALUES[leaf.name]


def test_a_tensor_is_described() -> None:
    shard = Shard((4, 4))
    found = Parameter.of("a", torch.empty(2, 3, dtype=torch.bfloat16, device="meta"), BUFFER, shard)
    assert found == Parameter("a", (2, 3), "bfloat16", BUFFER, (), (), shard, "")
    assert (found.torch_dtype, found.nbytes) == (torch.bfloat16, 12)
    assert Parameter.of("a", torch.empty(3)) == Parameter("a", (3,), "float32", WEIGHT)
    assert Parameter("b", (), "float64").nbytes == 8


def test_packed_members_are_one_below_the_other() -> None:
    both = packed("layer.{a,b}", (A, B))
    assert (both.name, both.shape, both.dtype, both.role) == ("layer.{a,b}", (5, 4), "float32", WEIGHT)
    assert list(both.leaves()) == [A, B]
    assert list(packed("more", (both, A)).leaves()) == [A, B, A]
    assert list(A.leaves()) == [A]
    assert torch.equal(compute(both, value), BOTH)
    assert packed("codes", (replace(A, role=CODES), replace(B, role=CODES))).role == CODES


@pytest.mark.parametrize(
    ("members", "got"),
    [
        ((), "none"),
        ((A, replace(B, shape=(3, 5))), r"\(2, 4\) float32, \(3, 5\) float32"),
        ((A, replace(B, dtype="bfloat16")), r"\(2, 4\) float32, \(3, 4\) bfloat16"),
        ((A, replace(B, shape=(3, 4, 1))), r"\(3, 4, 1\)"),
    ],
)
def test_members_agree_in_all_but_their_rows(members: tuple[Parameter, ...], got: str) -> None:
    with pytest.raises(ValueError, match=f"the members of it must agree in all but their rows, got .*{got}"):
        packed("it", members)


def test_steps_follow_one_another() -> None:
    first = made(A, "add", 1.0, torch.empty(2, 4))
    second = made(first, "to", "bfloat16", torch.empty(2, 4, dtype=torch.bfloat16))
    third = made(second, "repeat_rows", 3, torch.empty(6, 4, dtype=torch.bfloat16))
    assert third.name == "layer.a.add(1.0).to(bfloat16).repeat_rows(3)"
    assert (third.shape, third.dtype) == ((6, 4), "bfloat16")
    assert third.make == (("add", 1.0), ("to", "bfloat16"), ("repeat_rows", 3))
    assert third.members == (A,)
    assert third.shard is None  # its member has it
    expected = (VALUES["layer.a"] + 1).bfloat16().repeat_interleave(3, 0)
    assert torch.equal(compute(third, value), expected)
    of_both = made(packed("both", (first, B)), "mul", 2.0, torch.empty(5, 4))
    assert torch.equal(compute(of_both, value), torch.cat((VALUES["layer.a"] + 1, VALUES["layer.b"])) * 2)


STEP_CASES = {
    "add": (2.0, BOTH + 2),
    "mul": (3.0, BOTH * 3),
    "to": ("float64", BOTH.double()),
    "repeat_rows": (2.0, BOTH.repeat_interleave(2, 0)),
}


@pytest.mark.parametrize("step", STEP_CASES)
def test_each_step(step: str) -> None:
    operand, expected = STEP_CASES[step]
    found = STEPS[step](BOTH, operand)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_weights_are_quantised_by_steps_and_merged_scales_are_the_same() -> None:
    scheme, known = "e4m3 1x2, inputs e4m3 1x2", Scales()
    both = packed("both", (A, B))
    parameters = [Parameter(step, (), "", members=(both,), make=((step, scheme),)) for step in (CODES, SCALES)]
    codes, scales = (compute(parameter, value, known) for parameter in parameters)
    (computed_once,) = known.values()
    assert scales is computed_once
    assert torch.equal(compute(parameters[0], value).float(), codes.float())
    assert (codes.dtype, codes.shape, scales.shape) == (torch.float8_e4m3fn, (5, 4), (5, 2))
    torch.testing.assert_close(codes.float() * scales.repeat_interleave(2, 1), BOTH, rtol=1 / 16, atol=0.0)
    assert torch.equal(STEPS["the_same"](torch.tensor([2.0, 2.0]), "q, k"), torch.tensor([2.0]))
    with pytest.raises(ValueError, match=r"inputs of q, k are \[2.0, 3.0\]; .*disable_passes=\('merge_linears',\)"):
        STEPS["the_same"](torch.tensor([2.0, 3.0]), "q, k")


def test_names_and_shards_reach_every_member() -> None:
    nested = packed("all", (packed("both", (A, B)), made(A, "add", 1.0, torch.empty(2, 4))))
    renamed = nested.renamed(str.upper)
    assert renamed.name == "ALL"
    assert [member.name for member in renamed.members] == ["BOTH", "LAYER.A.ADD(1.0)"]
    assert [leaf.name for leaf in renamed.leaves()] == ["LAYER.A", "LAYER.B", "LAYER.A"]
    shard = Shard((6, 4), 0, (Section(6, 2),))
    divided = nested.divided({"layer.b": shard, "all": shard, "both": shard})
    assert [leaf.shard for leaf in divided.leaves()] == [None, shard, None]
    assert (divided.shard, divided.members[0].shard) == (None, None)
    assert [leaf.name for leaf in divided.leaves()] == [leaf.name for leaf in nested.leaves()]


@pytest.mark.parametrize(
    "parameter",
    [
        A,
        B,
        Parameter("codes", (2, 4), "float8_e4m3fn", CODES, scheme="e4m3 1x*"),
        packed("both", (A, made(B, "to", "float32", torch.empty(3, 4)))),
        replace(A, shard=Shard((4, 4), first_only=True)),
        replace(A, shard=Shard((6, 4), 0, (Section(4, 2), Section(2, 1)))),
    ],
    ids=lambda each: each.name,
)
def test_a_description_comes_back_from_json(parameter: Parameter) -> None:
    found = Parameter.from_json(json.loads(json.dumps(asdict(parameter))))
    assert found == parameter
    assert hash(found) == hash(parameter)


def test_packed_codes_have_the_shape_and_shard_of_their_weight() -> None:
    of_columns = Shard((24, 64), 1, (Section(64, 2),))
    codes = Parameter("w.codes", (24, 32), "uint8", CODES, shard=of_columns, scheme="uint4 1x32")
    assert codes.weight_shape == (24, 64)
    assert codes.weight_shard == Shard((24, 128), 1, (Section(128, 2),))
    of_rows = Shard((24, 64), 0, (Section(24, 2),))
    assert replace(codes, shard=of_rows).weight_shard == Shard((24, 128), 0, (Section(24, 2),))
    assert replace(codes, shard=None).weight_shard is None
    eight = replace(codes, scheme="e4m3 1x32")
    assert (eight.weight_shape, eight.weight_shard) == ((24, 32), of_columns)
    assert replace(codes, role=SCALES).weight_shape == (24, 32)


def test_orders_of_columns_that_differ_cannot_be_merged() -> None:
    assert STEPS["the_same"](torch.tensor([[2, 0, 1], [2, 0, 1]]), "q, k").tolist() == [[2, 0, 1]]
    with pytest.raises(
        ValueError, match=r"the orders of the columns of q, k differ; .*disable_passes=\('merge_linears'"
    ):
        STEPS["the_same"](torch.tensor([[2, 0, 1], [2, 1, 0]]), "q, k")
