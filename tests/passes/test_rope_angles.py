"""The pass rope_angles on graphs built by hand: which cosines and sines one kernel computes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_cases import Tensors, count, graph_of, random_tensors, rewrite, run

from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.rope.rope_angles import RopeAngles

aten = torch.ops.aten
ours = torch.ops.compiled_engine

POSITIONS = {"positions": torch.tensor([0, 1, 7, 12345])}


def doubled(angle: torch.Tensor, change: str) -> torch.Tensor:
    """[T, 2 p] of [T, p]: both halves, or each angle twice in a row, but for one thing."""
    match change:
        case "pairs":
            return angle.repeat_interleave(2, dim=-1)
        case "pairs by a last dimension":
            return angle.unsqueeze(-1).expand(-1, -1, 2).clone().view(angle.shape[0], -1)
        case "halves in dimension 1":
            return torch.cat((angle, angle), dim=1)
        case "copied pairs":
            return angle[:, :, None].expand(-1, -1, 2).clone().view(angle.shape[0], -1)
        case "halves by copies":
            return angle[:, None].expand(-1, 2, -1).clone().view(angle.shape[0], -1)
        case "three in a row":
            return angle.repeat_interleave(3, dim=-1)
        case "unlike halves":
            return torch.cat((angle, -angle), dim=-1)
        case "three parts":
            return torch.cat((angle, angle, angle), dim=-1)
        case "tokens twice":
            return torch.cat((angle, angle), dim=0)
        case "shifted":
            return torch.cat((angle + 1.0,) * 2, dim=-1)
        case "once":
            return angle
    return torch.cat((angle, angle), dim=-1)


def angles_with(change: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The angles of a model, in a form that it may have, or but for one thing."""

    def function(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, ...]:
        column = positions.float()[:, None] if change == "cast before" else positions[:, None].float()
        if change == "a last dimension":
            column = positions.unsqueeze(-1).float()
        if change == "a row":
            column = positions.float()[None]
        if change == "not cast":
            column = positions[:, None]
        frequencies = inv_freq * 2 if change == "computed frequencies" else inv_freq
        if change == "frequencies by token":
            frequencies = torch.where(positions[:, None] > 5, inv_freq, 2 * inv_freq)
        product = column + frequencies if change == "a sum" else column * frequencies
        value = doubled(frequencies * column if change == "frequencies first" else product, change)
        if change not in ("heads afterwards", "no heads", "a batch afterwards", "heads of cos alone"):
            value = value.unsqueeze(2 if change == "heads behind" else 1)
        cos, sin = value.cos(), value.sin()
        if change == "no sine":
            return (cos,)
        if change == "sine of others":
            sin = (value * 2).sin()
        if change == "two sines":
            sin = sin + aten.sin.default(value)
        scale = 1.0 if change == "no scale" else torch.ones_like(cos) if change == "scaled by values" else 1.5
        cos, sin = cos * scale, sin * (2.5 if change == "scales differ" else scale)
        both = cos.bfloat16(), sin.half() if change == "dtypes differ" else sin.bfloat16()
        if change == "rounded differently":
            return cos.bfloat16(), sin
        if change == "heads afterwards":
            both = both[0].unsqueeze(1), both[1].unsqueeze(1)
        if change == "a batch afterwards":
            both = both[0].unsqueeze(0), both[1].unsqueeze(0)
        if change == "heads of cos alone":
            both = both[0].unsqueeze(1), both[1]
        if change == "angles read elsewhere":
            return *both, value * 2
        if change == "read twice":
            return *both, both[0] + 1, both[1] + 1
        return both

    return function


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        *((change, "halves") for change in ("", "cast before", "frequencies first", "no scale", "scaled by values")),
        *((change, "halves") for change in ("heads afterwards", "no heads", "read twice")),
        *((change, "halves") for change in ("a batch afterwards", "heads of cos alone", "frequencies by token")),
        *(("pairs", "pairs"), ("copied pairs", "pairs"), ("pairs by a last dimension", "pairs"), ("once", "once")),
        *((change, "halves") for change in ("halves in dimension 1", "a last dimension")),
    ],
)
def test_angles_become_one(change: str, layout: str) -> None:
    """The values, their shapes and their dtypes stay."""
    inv_freq = random_tensors(inv_freq=(8,))
    function = angles_with(change)
    module = graph_of(function, POSITIONS, inv_freq)
    assert RopeAngles().contract(module.graph, CompileRange(1, 8)) == 1
    result = rewrite(RopeAngles(), module)
    assert (result.matches, result.near_misses) == (1, ())
    assert count(module, aten.cos.default) == count(module, aten.sin.default) == 0
    (fused,) = module.graph.find_nodes(op="call_function", target=ours.rope_angles.default)
    assert (*fused.args, "halves")[4] == layout
    got, expected = run(module, POSITIONS | inv_freq), function(**POSITIONS, **inv_freq)
    assert all(map(torch.equal, got, expected))
    assert [value.dtype for value in got] == [value.dtype for value in expected]
    declared = [node.meta["val"] for node in module.graph.output_node().args[0]]  # type: ignore[union-attr]
    assert [(v.shape, v.dtype) for v in declared] == [(v.shape, v.dtype) for v in expected]


@pytest.mark.parametrize(
    ("change", "inv_freq", "reason"),
    [
        *(
            (change, torch.empty(4), reason)
            for change, reason in (
                ("no sine", "no sin of the same angles"),
                ("sine of others", "no sin of the same angles"),
                ("two sines", "no sin of the same angles"),
                ("angles read elsewhere", "no sin of the same angles"),
                ("heads behind", "not two equal halves"),
                ("halves by copies", "not two equal halves"),
                ("three in a row", "not two equal halves"),
                ("three parts", "not two equal halves"),
                ("tokens twice", "not two equal halves"),
                ("unlike halves", "halves of the angles differ"),
                ("shifted", "halves of the angles differ"),
                ("a sum", "halves of the angles differ"),
                ("a row", "not positions times frequencies"),
                ("not cast", "not positions times frequencies"),
                ("computed frequencies", "not a vector of fp32"),
                ("scales differ", "scaled or rounded differently"),
                ("dtypes differ", "scaled or rounded differently"),
                ("rounded differently", "scaled or rounded differently"),
            )
        ),
        ("", torch.empty(4, dtype=torch.bfloat16), "not a vector of fp32"),
        ("", torch.empty(4, 4), "not a vector of fp32"),
    ],
)
def test_what_only_looks_like_angles_is_a_near_miss(change: str, inv_freq: torch.Tensor, reason: str) -> None:
    module = graph_of(angles_with(change), POSITIONS, {"inv_freq": inv_freq})
    module.graph.eliminate_dead_code()
    before = str(module.graph)
    result = rewrite(RopeAngles(), module)
    assert (result.matches, len(result.near_misses), str(module.graph)) == (0, 1, before)
    assert reason in result.near_misses[0]


def test_positions_of_several_dimensions_are_a_near_miss() -> None:
    """Models of images give three positions to each token; the kernel reads one."""
    several: Tensors = {"positions": torch.zeros(3, 4, dtype=torch.int64)}

    def function(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angle = aten.unsqueeze.default(positions, 1).float().transpose(1, 2) * inv_freq
        return angle.cos(), angle.sin()

    def of_columns(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, ...]:
        angle = aten.unsqueeze.default(positions, 1).float() * inv_freq
        return angle.cos(), angle.sin()

    for each in (function, of_columns):
        result = rewrite(RopeAngles(), graph_of(each, several, random_tensors(inv_freq=(4,))))
        assert (result.matches, len(result.near_misses)) == (0, 1)
