"""Matrices of experts that the model's rules name are kept as codes and scales, which the kernels of experts decode.

Why: with few tokens a mixture of experts costs the bytes of the experts that are touched, and those of FP8 are half as
many; and twice as many experts fit. A product reads what the op experts_weight decodes; the pass experts then gives
codes and scales to its own op. Rules name each projection of each expert, as checkpoints do.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import emit, fake_mode_of, named
from compiled_engine.passes.framework.parameter import CODES, SCALES, WEIGHT, Parameter, compute
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.linear.experts_codes import experts_weight, obstacle
from compiled_engine.quantisation import LinearScheme, Quantisation, Rounding

# A parameter's part of the name, with the projections whose rows it has.
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class QuantiseExperts(GraphPass):
    """Of textbook models on one device; elsewhere codes of experts are decoded when they are loaded."""

    name = "quantise_experts"
    required = True  # with its parameters the loader reads codes

    def __init__(self, quantisation: Quantisation, device: torch.device):
        self._quantisation, self._device = quantisation, device

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """One for each matrix of experts that the rules name and the kernels take."""
        return sum(isinstance(self._rounding(node), Rounding) for node in graph.find_nodes(op="placeholder"))

    def run(self, graph: fx.Graph) -> PassResult:
        replacements: list[Replacement] = []
        notes: list[str] = []
        for node in graph.find_nodes(op="placeholder"):
            rounding = self._rounding(node)
            if isinstance(rounding, Rounding):
                text = f"{rounding}, inputs stay {parameter_of(node).dtype}; {self._origin}"
                replacements.append(Replacement(node.name, _rewrite(graph, node, rounding, self._quantisation)))
                graph.erase_node(node)
            else:
                text = rounding
            if text:
                notes.append(f"{parameter_of(node).name}: {text}")
        return PassResult(len(replacements), (), tuple(replacements), tuple(notes))

    @property
    def _origin(self) -> str:
        return "made while it is loaded" if self._quantisation.is_online else self._quantisation.method

    def _rounding(self, node: fx.Node) -> Rounding | str:
        """How a matrix [E, N, K] of experts is rounded; or why it stays, "" for any other input."""
        prefix, _, own = parameter_of(node).name.rpartition(".") if is_parameter(node) else ("", "", "")
        if own not in _PROJECTIONS or node.meta["val"].dim() != 3:
            return ""
        num_experts, num_rows, _ = parameter_of(node).shape
        modules = [f"{prefix}.{expert}.{part}" for expert in range(num_experts) for part in _PROJECTIONS[own]]
        schemes = {self._quantisation.scheme_of(module) for module in modules}
        if len(schemes) > 1:
            return "stays in 16 bits: the rules differ among its experts"
        (scheme,) = schemes
        if scheme is None:
            return f"stays in 16 bits: {self._quantisation.why_not(modules[0])}"
        # Its rows are those of each projection, one below the other.
        rounding = LinearScheme(scheme.weight, None).dividing(num_rows // len(_PROJECTIONS[own]), 0).weight
        reason = obstacle(rounding, self._device)
        return rounding if reason is None else f"stays in 16 bits: {reason}"

    def verify(self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device) -> int:
        """Compare what each op decodes, of random codes and scales, with the scalar definition of the layout."""
        for replacement in result.replacements:
            arguments = named(replacement.after)
            name = f"pass quantise_experts: {replacement.after.name}, which replaced {replacement.before},"
            codes, scales = (parameter_of(arguments[each]) for each in ("codes_ENK", "scales_ERC"))
            rounding = Rounding.parse(arguments["scheme"])
            values = {leaf.name: _random(leaf, rounding, device) for each in (codes, scales) for leaf in each.leaves()}
            found, of_scales = (_computed(each, values) for each in (codes, scales))
            weight = replacement.after.target(found, of_scales, arguments["scheme"], "float32")  # type: ignore[operator]
            expected = _stands_for(values, codes, scales, rounding)
            if not torch.allclose(weight, expected, rtol=1e-5, atol=0.0):
                raise VerificationError(f"{name} is off by {float((weight - expected).abs().max()):.3g}")
        return len(result.replacements)


def _rewrite(graph: fx.Graph, node: fx.Node, rounding: Rounding, quantisation: Quantisation) -> fx.Node:
    weight, like, text = parameter_of(node), node.meta["val"], str(rounding)
    num_experts, *matrix = weight.shape
    grid = num_experts, *rounding.grid(*matrix)
    codes = Parameter(f"{weight.name}.{CODES}", weight.shape, _name(rounding.dtype), CODES, scheme=text)
    scales = Parameter(f"{weight.name}.{SCALES}", grid, "float32", SCALES, scheme=text)
    if quantisation.is_online:
        codes, scales = (
            replace(each, role=WEIGHT, members=(weight,), make=((each.role, text),), scheme="")
            for each in (codes, scales)
        )
    inputs = []
    for parameter in (codes, scales):
        with graph.inserting_before(node), fake_mode_of(like):
            inputs.append(graph.placeholder(parameter.name.replace(".", "_")))
            inputs[-1].meta["val"] = torch.empty(parameter.shape, dtype=parameter.torch_dtype, device=like.device)
            inputs[-1].meta["source"] = parameter
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        new = emit(graph, experts_weight, *inputs, text, weight.dtype)
    node.replace_all_uses_with(new)
    return new


def _computed(parameter: Parameter, values: dict[str, torch.Tensor]) -> torch.Tensor:
    return compute(parameter, lambda leaf: values[leaf.name])


def _random(leaf: Parameter, rounding: Rounding, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(leaf.name))
    values = torch.randn(leaf.shape, generator=generator).to(device)
    if leaf.role == SCALES:
        return values.exp()
    return (values * rounding.largest / 4).clamp(-rounding.largest, rounding.largest).to(leaf.torch_dtype)


def _stands_for(
    values: dict[str, torch.Tensor], codes: Parameter, scales: Parameter, rounding: Rounding
) -> torch.Tensor:
    """[E, N, K]: of stored codes by the place of each element; of a weight by the largest value of each tile."""
    weight = values[codes.members[0].name if codes.members else codes.name].float()
    _, num_rows, k = weight.shape
    rows, columns = torch.arange(num_rows) // (rounding.rows or num_rows), torch.arange(k) // (rounding.columns or k)
    if not codes.members:
        return weight * values[scales.name][:, rows[:, None], columns[None, :]]
    expected = torch.empty_like(weight)
    for row in rows.unique():
        for column in columns.unique():
            place = slice(None), (rows == row).nonzero().flatten()[:, None], (columns == column).nonzero().flatten()
            largest = weight[place].abs().amax((1, 2), keepdim=True)
            scale = largest / torch.full_like(largest, rounding.largest)
            expected[place] = (weight[place] / scale).to(rounding.dtype).float() * scale
    return expected


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
