"""silu(gate) * up becomes one kernel that reads both halves of the merged linear in place.

Why: one pass over the widest activation of the model instead of two, and one launch.
"""

from __future__ import annotations

import operator

import torch
import triton
import triton.language as tl
from torch import fx

from compiled_engine.passes.graph_pass import CompileRange, PassResult
from compiled_engine.passes.matching import arg, aten, emit, is_call, only_user, other_factor


@triton.jit(do_not_specialize=["width"])
def _kernel(gate_up_ptr: tl.tensor, out_ptr: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + column, (activated * up).to(out_ptr.dtype.element_ty), mask)


def reference(gate_up_TI2: torch.Tensor) -> torch.Tensor:
    """silu of the left half of each row times the right half."""
    gate_TI, up_TI = gate_up_TI2.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TI) * up_TI


@torch.library.triton_op("compiled_engine::silu_mul", mutates_args={})
def silu_mul(gate_up_TI2: torch.Tensor) -> torch.Tensor:
    """The kernel behind `reference`: [T, 2 I] -> [T, I]; rows must be contiguous."""
    gate_up_TI2 = gate_up_TI2.contiguous()
    num_tokens, width = gate_up_TI2.shape[0], gate_up_TI2.shape[1] // 2
    out_TI = gate_up_TI2.new_empty((num_tokens, width))
    block = 1024
    torch.library.wrap_triton(_kernel)[(num_tokens, triton.cdiv(width, block))](gate_up_TI2, out_TI, width, BLOCK=block)
    return out_TI


silu_mul.register_kernel("cpu")(reference)


class SiluMul:
    name = "silu_mul"
    matches_per_layer = 1

    def applicable(self, compile_range: CompileRange, device_type: str) -> bool:
        return True

    def run(self, graph: fx.Graph) -> PassResult:
        matches, near_misses = 0, []
        for silu in graph.find_nodes(op="call_function", target=aten.silu.default):
            reason = _rewrite(graph, silu)
            if reason is None:
                matches += 1
            else:
                near_misses.append(f"{silu.name}: {reason}")
        graph.eliminate_dead_code()
        return PassResult(matches, tuple(near_misses))


def _rewrite(graph: fx.Graph, silu: fx.Node) -> str | None:
    """None when rewritten, otherwise why not."""
    product = only_user(silu)
    if product is None or not is_call(product, aten.mul.Tensor):
        return "it is not multiplied with another value"
    gate, up = arg(silu, 0), other_factor(product, silu)
    halves = [is_call(half, operator.getitem) and half.args[1] == i for i, half in enumerate((gate, up))]
    if not (all(halves) and gate.args[0] is up.args[0]):
        return "gate and up are not the two halves of one tensor (merge_linears makes them so)"
    split = gate.args[0]
    if not is_call(split, aten.split_with_sizes.default) or len(split.args[1]) != 2:
        return "gate and up are not the two halves of one tensor (merge_linears makes them so)"
    if len(split.args) < 3 or split.args[2] not in (-1, 1):  # the default is 0, rows
        return "the halves are not halves of each row"
    if split.args[1][0] != split.args[1][1] or split.args[0].meta["val"].dim() != 2:
        return "the halves differ in width"
    with graph.inserting_before(product):
        fused = emit(graph, torch.ops.compiled_engine.silu_mul.default, split.args[0])
    product.replace_all_uses_with(fused)
    graph.erase_node(product)
    return None
