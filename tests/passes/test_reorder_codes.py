"""The pass reorder_codes on whole models, with its rewrites verified on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from graph_edits import calls
from pass_cases import BIASED, CPU, LLAMA, RANGES, SMALL, Family
from test_quantise import online, stored
from test_tensor_parallel_pass import config_of, traced, whole_of
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_engine.config import ParallelConfig
from compiled_engine.graphs.compiler.build import apply_passes
from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import PassReport, run_passes
from compiled_engine.passes.framework.matching import named
from compiled_engine.passes.framework.parameter import CODES, SCALES, ZEROS, Parameter
from compiled_engine.passes.linear.quantised_linear_op import quantised_linear
from compiled_engine.passes.quantised.reorder_codes import ReorderCodes, reorder
from compiled_engine.quantisation import Quantisation

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "dtype": torch.bfloat16}
NUM_LAYERS = 2
# Of a layer: qkv, the attention's output, gate and up, down.
LINEARS = 4


class Anywhere(ReorderCodes):
    """The pass as on Hopper; its references run on a CPU."""

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        return None


def reordered(
    family: Family, num_ranks: int, quantisation: Quantisation, compile_range: CompileRange = SMALL
) -> tuple[fx.Graph, PassReport]:
    config = config_of(family, num_ranks, NUM_LAYERS, quantisation=quantisation, **SIZES)
    if num_ranks == 1:
        config = replace(config, parallel=ParallelConfig(1, "in_process"))
    plain = replace(config, model=replace(config.model, quantisation=None))
    whole = whole_of(plain) if num_ranks > 1 else None
    config = replace(config, compile=replace(config.compile, verify=False))
    module, _ = apply_passes(config, traced(plain), compile_range, whole)
    own = Anywhere()
    (report,) = run_passes(module.graph, (own,), (own.name, "quantise"), compile_range, CPU, strict=True, verify=True)
    return module.graph, report


@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("compile_range", RANGES, ids=str)
@pytest.mark.parametrize(
    ("family", "num_ranks", "quantisation"),
    [
        (LLAMA, 1, stored("int4 1x128")),
        (BIASED, 1, stored("uint4 1x128")),
        (LLAMA, 1, online("int4 1x128")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_reordered_linears_compute_the_same(
    family: Family, num_ranks: int, quantisation: Quantisation, compile_range: CompileRange
) -> None:
    graph, report = reordered(family, num_ranks, quantisation, compile_range)
    assert report.matches == report.verified == NUM_LAYERS * LINEARS
    has_zeros = "uint4" in quantisation.rules[0].scheme
    for node in calls(graph, quantised_linear):
        arguments = named(node)
        codes, scales = (parameter_of(arguments[name]) for name in ("codes_NK", "scales_RC"))
        assert (codes.make[-1][0], codes.dtype) == ("words", "int32")
        assert (scales.make[-1][0], scales.shape) == ("transposed", (8 * codes.shape[1] // 128, codes.shape[0]))
        assert (arguments["zeros_RC"] is not None) == has_zeros
    # The loader still reads what the checkpoint has.
    inputs = [parameter_of(each) for each in filter(is_parameter, graph.find_nodes(op="placeholder"))]
    if not quantisation.is_online:
        roles = {leaf.role for each in inputs if each.make for leaf in each.leaves()}
        assert roles == {CODES, SCALES, ZEROS} if has_zeros else {CODES, SCALES}


def test_other_groups_keep_their_order_and_are_named() -> None:
    graph, report = reordered(LLAMA, 1, stored("int4 1x64"))
    assert report.matches == 0
    assert len(report.notes) == NUM_LAYERS * LINEARS
    assert all("its scales are not of 128 columns of a row (int4 1x64)" in note for note in report.notes)
    assert all(node.args[1].meta["val"].dtype == torch.uint8 for node in calls(graph, quantised_linear))


def test_operands_are_described_where_no_gpu_is() -> None:
    """A graph for a GPU is rewritten by a build of PyTorch that has none, as it is for described cards."""
    graph = fx.Graph()
    placeholders = []
    with FakeTensorMode():
        of_device = partial(torch.empty, device="cuda")
        x = of_device((3, 256), dtype=torch.bfloat16)
        y = of_device((3, 32), dtype=torch.bfloat16)
        for role, value in (
            (CODES, of_device((32, 128), dtype=torch.uint8)),
            (SCALES, of_device((32, 2), dtype=torch.float32)),
            (ZEROS, of_device((32, 2), dtype=torch.uint8)),
        ):
            placeholders.append(graph.placeholder(role))
            placeholders[-1].meta |= {"val": value, "source": Parameter.of(f"weight.{role}", value, role)}
    inputs = graph.placeholder("x")
    inputs.meta["val"] = x
    node = graph.call_function(quantised_linear, (inputs, *placeholders, None, None, "uint4 1x128"))
    node.meta["val"] = y
    reorder(graph, node)
    values = [named(node)[name].meta["val"] for name in ("codes_NK", "scales_RC", "zeros_RC")]
    assert [tuple(each.shape) for each in values] == [(32, 32), (2, 32), (2, 32)]
    assert [each.dtype for each in values] == [torch.int32, torch.float32, torch.int16]
    assert {each.device.type for each in values} == {"cuda"}


def test_a_cpu_keeps_the_order() -> None:
    assert "Hopper" in str(ReorderCodes().applicable(SMALL, "cpu"))
    assert ReorderCodes().applicable(SMALL, "cuda") is None
