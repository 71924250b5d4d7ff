"""Runs the ops of a batch-invariant graph on random rows, and compares the bits of a row in steps of several sizes.

Each op is run once for each combination of shapes and constants. Values of large weights repeat, which no order of a
sum notices. Ops of recurrences process a request at once and in parts.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from compiled_engine.passes.framework.matching import is_call, named
from compiled_engine.passes.framework.random_inputs import RandomInputs
from compiled_engine.passes.framework.verifier import ULPS, VerificationError, run_call
from compiled_engine.passes.linear.round_inputs import residual_rms_norm_rounded, round_inputs
from compiled_engine.recurrence.op import CONV_STATE, DELTA_RULE, STATE_SPACE
from compiled_engine.recurrence.sequences import Sequences

RECURRENCES: tuple[OpOverload, ...] = (CONV_STATE, DELTA_RULE, STATE_SPACE)
# Arguments of recurrences: states, which keep values from one step to the next, and the result.
_STATES, _OUT = ("state_SDN", "state_SHkv", "drafts_SHNw", "lengths_SHv"), ("out_TD", "out_THv")
# Ops whose codes and scales are the inputs of another op, and are compared through its result. A sum is exact.
_ROUNDING = round_inputs, residual_rms_norm_rounded
# How the tokens of a request are divided among steps.
PARTS = 3, 1, 4
_MOST_DRAWN = 1 << 22


def check_bits(graph: fx.Graph, ops: Sequence[OpOverload], counts: Sequence[int]) -> tuple[str, ...]:
    """Compare the bits of rows in steps of `counts` rows with those in a larger step, for each call of one of `ops`.

    Calls of RECURRENCES are always compared. Returns lines for the report. Raises VerificationError, which names the
    op, if bits differ. Nothing is run if the graph is for a GPU and there is none.
    """
    calls = list(_unlike_calls(graph, (*ops, *RECURRENCES)))
    if any(_device(call).type == "cuda" for call in calls) and not torch.cuda.is_available():
        return ("bits were not compared: no GPU is there",)
    checked: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    with torch.no_grad():
        for call in calls:
            is_recurrence = is_call(call, *RECURRENCES)
            if is_recurrence:
                _check_recurrence(call)
            else:
                _check_rows(call, counts)
            checked[is_recurrence][_name(call)] += 1
    if any(_device(call).type == "cuda" for call in calls):
        torch.cuda.empty_cache()
    found = []
    if checked[False]:
        found.append(f"a row has the same bits in steps of {_listed(counts)} rows: {_counted(checked[False])}")
    if checked[True]:
        found.append(f"a request has the same bits in steps of {_listed(PARTS)} tokens: {_counted(checked[True])}")
    return tuple(found)


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(names.items()))


def _name(call: fx.Node) -> str:
    target: Any = call.target
    return str(target.name().partition("::")[2])


def _device(call: fx.Node) -> torch.device:
    device: torch.device = next(node.meta["val"].device for node in call.all_input_nodes)
    return device


def _unlike_calls(graph: fx.Graph, ops: Sequence[OpOverload]) -> Iterator[fx.Node]:
    """Yield the calls of ops, of those with equal shapes, dtypes, constants and roundings the first alone."""
    seen = set()
    for call in graph.nodes:
        if not is_call(call, *ops):
            continue
        computed = [each for each in (*_rounding_calls(call), call) if each.target is not operator.getitem]
        alike = tuple((each.target, *map(_described, (*each.args, *each.kwargs.values()))) for each in computed)
        if alike not in seen:
            seen.add(alike)
            yield call


def _described(argument: Any) -> str:
    if not isinstance(argument, fx.Node):
        return repr(argument)
    value = argument.meta["val"]
    return f"{'rows' if _has_rows(argument) else value.shape[0]} {list(value.shape[1:])} {value.dtype}"


def _has_rows(node: fx.Node) -> bool:
    """Return whether a tensor has a row for each token of a step, whose number is not known when compiling."""
    return not isinstance(node.meta["val"].shape[0], int)


class _Operands:
    """Random values for the arguments of a call: rows of tokens, and parameters with what is computed from them."""

    def __init__(self, call: fx.Node):
        self._device = _device(call)
        self._graph = call.graph
        self._generator = torch.Generator().manual_seed(0)

    def rows(self, node: fx.Node, count: int) -> torch.Tensor:
        value = node.meta["val"]
        shape = (count, *(int(size) for size in value.shape[1:]))
        if value.dtype.is_floating_point:
            return self._drawn(shape, value.dtype, 1.0)
        columns = torch.arange(shape[-1], dtype=value.dtype, device=self._device)  # of experts
        return columns.expand(shape).contiguous()

    def fixed(self, node: fx.Node) -> Any:
        if node.op != "placeholder":
            return run_call(node, {each: self.fixed(each) for each in node.all_input_nodes})
        value = node.meta["val"]
        if value.dtype not in ULPS:
            return RandomInputs(self._graph, 1, self._device, 1.0).of(node)  # codes and scales of one byte
        return self._drawn(tuple(value.shape), value.dtype, value.shape[-1] ** -0.5)

    def _drawn(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> torch.Tensor:
        count = torch.Size(shape).numel()
        drawn = torch.randn(min(count, _MOST_DRAWN), generator=self._generator).mul_(scale).to(self._device, dtype)
        return drawn.repeat(-(-count // max(1, len(drawn))))[:count].view(shape)


def _check_rows(call: fx.Node, counts: Sequence[int]) -> None:
    operands, most = _Operands(call), max(counts) + 3
    before = _rounding_calls(call)
    inputs = dict.fromkeys(node for each in (*before, call) for node in each.all_input_nodes if node not in before)
    values = {node: operands.rows(node, most) if _has_rows(node) else operands.fixed(node) for node in inputs}

    def run(first: int, count: int) -> list[torch.Tensor]:
        rows = slice(first, first + count)
        given: dict[fx.Node, Any] = {node: value[rows] if _has_rows(node) else value for node, value in values.items()}
        for each in before:
            given[each] = run_call(each, given)
        found = run_call(call, given)
        return list(found) if isinstance(found, tuple | list) else [found]

    whole = run(0, most)
    for count in counts:
        first = 7 * count % (most - count + 1)
        for found, expected in zip(run(first, count), whole, strict=True):
            _require_equal(call, found, expected[first : first + count], f"a step of {count}", f"one of {most} rows")


def _rounding_calls(call: fx.Node) -> list[fx.Node]:
    """Return the calls that round the inputs of `call` to codes and scales, in order, and those that take either."""
    found: dict[fx.Node, None] = {}
    for item in call.all_input_nodes:
        rounding = item.args[0] if is_call(item, operator.getitem) else None
        if isinstance(rounding, fx.Node) and is_call(rounding, *_ROUNDING):
            found |= {rounding: None, item: None}
    return list(found)


def _check_recurrence(call: fx.Node) -> None:
    operands, arguments, most = _Operands(call), named(call), sum(PARTS)
    of_tokens: dict[str, torch.Tensor] = {}
    fixed: dict[str, Any] = {}
    for name, argument in arguments.items():
        if not isinstance(argument, fx.Node) or name in (*_STATES, *_OUT, *Sequences._fields):
            fixed[name] = argument
        elif _has_rows(argument):
            drawn = operands.rows(argument, most)
            of_tokens[name] = -drawn.abs() if name == "g_TH" else drawn
        else:
            fixed[name] = operands.fixed(argument)
    op: Any = call.target
    device = _device(call)

    def run(lengths: Sequence[int]) -> list[torch.Tensor]:
        states = {name: _one_row(arguments[name], device) for name in _STATES if name in arguments}
        (out_name,) = (name for name in _OUT if name in arguments)
        outs, first = [], 0
        for length in lengths:
            values = {name: value[first : first + length] for name, value in of_tokens.items()}
            value = arguments[out_name].meta["val"]
            out = torch.empty((length, *value.shape[1:]), dtype=value.dtype, device=device)
            first += length
            rows_R, starts_R1, seq_lens_R = (
                torch.tensor(each).int().to(device) for each in ((0,), (0, length), (first,))
            )
            host_3 = torch.tensor((int(length == 1), length, length)).int()
            sequences = Sequences(rows_R, starts_R1, seq_lens_R, host_3)
            given = fixed | values | states | sequences._asdict() | {out_name: out}
            op(*(given[argument.name] for argument in op._schema.arguments))
            outs.append(out)
        kept = (state for name, state in states.items() if name in ("state_SDN", "state_SHkv"))
        return [torch.cat(outs), *(state for state in kept if state is not None)]

    for found, expected in zip(run(PARTS), run((most,)), strict=True):
        _require_equal(call, found, expected, f"steps of {_listed(PARTS)}", f"one of {most} tokens")


def _one_row(state: Any, device: torch.device) -> torch.Tensor | None:
    if state is None:
        return None
    value = state.meta["val"]
    return torch.zeros((1, *value.shape[1:]), dtype=value.dtype, device=device)


def _require_equal(call: fx.Node, found: torch.Tensor, expected: torch.Tensor, where: str, other: str) -> None:
    if not torch.equal(*(each.contiguous().view(torch.uint8) for each in (found, expected))):
        raise VerificationError(
            f"batch_invariant is True, but {call.target} gives other bits in {where} than in {other}"
        )
