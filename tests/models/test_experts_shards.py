"""Parts of FP8 experts on each rank: its part of the dequantised values, and of the 8-bit values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from test_quantise_experts_folder import MOE, OF_EXPERT, decoded, plan_of

from compiled_engine.graphs.compiler.build import apply_passes, trace_rank
from compiled_engine.graphs.compiler.signature import forward_signature
from compiled_engine.graphs.compiler.trace import without_storage
from compiled_engine.models.checkpoint.build_model import build_model, shards_of
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize
from compiled_engine.models.checkpoint.quantise_folder import write_folder
from compiled_engine.other_engines.translate import make_options
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.matching import named
from compiled_engine.process.progress import SilentProgress
from compiled_engine.quantisation import Rounding
from compiled_engine.resolve.engine import resolve

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 132, "num_hidden_layers": 1}


@pytest.mark.product(one_in=1000, each=("scheme",))
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block"])
def test_each_rank_has_its_part_of_the_values(scheme: str, num_ranks: int, tmp_path: Path) -> None:
    """Shares of 192 and 96 rows or columns end within blocks of 128."""
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **MOE | WIDTHS | {"moe_intermediate_size": 384})
    write_folder(plan_of(tmp_path / "plain", scheme), tmp_path / "fp8", SilentProgress())
    undivided = whole_matrices(decoded(tmp_path / "fp8", scheme))
    config = resolve(make_options({"model": tmp_path / "fp8", "device": "cpu", "tensor_parallel_size": num_ranks}))
    graphs = trace_rank(
        config, without_storage(build_model(local_model(config)), config.device), forward_signature(config)
    )
    module, _ = apply_passes(config, graphs, graphs.signature.ranges[0])
    parameters = [parameter_of(node) for node in module.graph.find_nodes(op="placeholder") if is_parameter(node)]
    (experts,) = (node for node in module.graph.nodes if node.target is torch.ops.compiled_engine.experts.default)
    arguments, shards = named(experts), shards_of(config)
    for rank in range(num_ranks):
        weights = materialize(
            without_storage(build_model(local_model(config)), config.device), parameters, config.device
        )
        load_weights(weights, build_model(config.model), config.model, SilentProgress(), rank, num_ranks)
        for name, (codes, scales, text) in OPERANDS.items():
            found = spread_out(*(weights.tensors[parameter_of(arguments[each]).name] for each in (codes, scales)),
                               Rounding.parse(arguments[text]))  # fmt: skip
            path = f"model.layers.0.mlp.experts.{name}"
            assert weights.tensors[parameter_of(arguments[codes]).name].dtype == torch.float8_e4m3fn
            assert torch.equal(found, shards[path].of(undivided[path], rank, num_ranks))


OPERANDS = {
    "gate_up_proj": ("gate_up_END", "gate_up_scales_ERC", "gate_up_scheme"),
    "down_proj": ("down_EDI", "down_scales_ERC", "down_scheme"),
}


def whole_matrices(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's parameters of experts, built from a checkpoint's matrices."""
    found: dict[str, Any] = {}
    for name in filter(OF_EXPERT.fullmatch, values):
        path, expert, part = OF_EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]
        found.setdefault(path, {})[int(expert), part] = values[name]
    stacked = {}
    for path, parts in found.items():
        experts = range(len(parts) // 3)
        stacked[f"{path}.down_proj"] = torch.stack([parts[e, "down"] for e in experts])
        stacked[f"{path}.gate_up_proj"] = torch.stack([torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in experts])
    return stacked


def spread_out(codes_ENK: torch.Tensor, scales_ERC: torch.Tensor, tile: Rounding) -> torch.Tensor:
    """Dequantise: multiply each element by its tile's scale."""
    _, num_rows, k = codes_ENK.shape
    row_N = torch.arange(num_rows) // (tile.rows or num_rows)
    column_K = torch.arange(k) // (tile.columns or k)
    return codes_ENK.float() * scales_ERC[:, row_N[:, None], column_K]
