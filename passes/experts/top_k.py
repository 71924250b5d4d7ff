"""Replaces a top-k over short rows, such as the choice of a token's experts, by one kernel.

Why: for torch, a top-k is a selection and a sort, two kernels that are made for long rows. Routers that the op of
experts does not implement choose experts, or groups of experts, by it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import fx
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import leaves_out_launches, quick_launches
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import arg, aten, emit, named, rewrite_calls
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.framework.verifier import MOST_TOKENS, VerificationError

# Largest row, and the largest number of its elements that are chosen.
MOST_ELEMENTS, MOST_CHOSEN = 1024, 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@quick_launches
@triton.jit(do_not_specialize=["x_stride"])
def top_k_kernel(
    x_ptr: tl.tensor,
    values_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    x_stride: tl.tensor,
    NUM_ELEMENTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_X: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write the TOP_K largest elements of a row and their indices, the largest first. Program: (row).

    Of equal elements the first is chosen first. NaN counts as larger than any number, as it does for torch.

    x_ptr: [R, NUM_ELEMENTS], rows x_stride apart. values_ptr, indices_ptr: int64, [R, TOP_K].
    BLOCK_E, BLOCK_X: NUM_ELEMENTS and TOP_K rounded up to powers of two.
    """
    INFINITY: tl.constexpr = 0x7F800000  # its bits; those of NaN are more
    LOWEST: tl.constexpr = -(2**63)  # less than the order of any element
    e_E = tl.arange(0, BLOCK_E)
    x_X = tl.arange(0, BLOCK_X)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    # Adding zero makes -0.0 equal to 0.0.
    x_E = tl.load(x_ptr + e_E, mask=e_E < NUM_ELEMENTS, other=0.0).to(tl.float32) + 0.0
    # Integers in the order of the elements: the bits of a negative number but the sign are inverted.
    bits_E = x_E.to(tl.int32, bitcast=True)
    is_nan_E = (bits_E & 0x7FFFFFFF) > INFINITY
    bits_E = tl.where(bits_E < 0, bits_E ^ 0x7FFFFFFF, bits_E)
    bits_E = tl.where(is_nan_E, 0x7FFFFFFF, bits_E)
    # With the place from the end in the lower half, no two are equal, and one maximum finds both element and place.
    order_E = (bits_E.to(tl.int64) << 32) + (BLOCK_E - 1 - e_E)
    order_E = tl.where(e_E < NUM_ELEMENTS, order_E, LOWEST)
    chosen_X = tl.zeros([BLOCK_X], tl.int32)
    for i in tl.static_range(TOP_K):
        largest = tl.max(order_E, 0)
        chosen_X = tl.where(x_X == i, BLOCK_E - 1 - (largest & (BLOCK_E - 1)).to(tl.int32), chosen_X)
        order_E = tl.where(order_E == largest, LOWEST, order_E)
    mask_X = x_X < TOP_K
    place_X = row * TOP_K + x_X
    tl.store(values_ptr + place_X, tl.load(x_ptr + chosen_X, mask=mask_X, other=0.0), mask=mask_X)
    tl.store(indices_ptr + place_X, chosen_X.to(tl.int64), mask=mask_X)


def launch(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest elements of the last dimension, the largest first, and their indices, by the kernel."""
    num_elements, shape = x.shape[-1], (*x.shape[:-1], k)
    x_RE = x.reshape(-1, num_elements)
    if x_RE.stride(1) != 1:
        x_RE = x_RE.contiguous()
    values, indices = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    if leaves_out_launches():  # torch's ops still run, and gather by these indices
        indices.zero_()
    top_k_kernel[(x_RE.shape[0],)](
        x_RE,
        values,
        indices,
        x_RE.stride(0),
        NUM_ELEMENTS=num_elements,
        TOP_K=k,
        BLOCK_E=next_power_of_2(num_elements),
        BLOCK_X=next_power_of_2(k),
        num_warps=1,
        **dependent_launch(x.device),
    )
    return values, indices


def _fake(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def reference(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `launch` does, by torch, which leaves open which of equal elements are chosen."""
    values, indices = torch.topk(x, k)
    return values, indices


top_k = define_op("top_k(Tensor x, int k) -> (Tensor, Tensor)", cpu=reference, cuda=launch, fake=_fake)


class TopK(GraphPass):
    name = "top_k"

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        return None if device_type == "cuda" else "its kernel is for GPUs"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return 0: other passes remove any number of top-k's before this one."""
        return 0

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, aten.topk.default, _rewrite)

    def verify(self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device) -> int:
        """Compare each call with torch's on random rows. Which of equal elements are chosen may differ."""
        for replacement in result.replacements:
            x, k = (arg(replacement.after, index) for index in range(2))
            value = x.meta["val"]
            sizes = [size if isinstance(size, int) else MOST_TOKENS for size in value.shape]
            random = torch.randn(sizes, device=device).to(value.dtype)
            values, indices = top_k(random, k)
            is_choice = (
                torch.equal(random.gather(-1, indices), values) and not (indices.sort().values.diff() == 0).any()
            )
            if not is_choice or not torch.equal(values, torch.topk(random, k).values):
                raise VerificationError(f"pass {self.name}: {replacement.before} chooses other elements than torch")
        return len(result.replacements)


def _rewrite(graph: fx.Graph, call: fx.Node) -> list[Replacement] | str | None:
    arguments = named(call)
    x, k = arguments["self"], arguments["k"]
    value = x.meta["val"]
    if arguments["dim"] not in (-1, value.dim() - 1):
        return f"it chooses along dimension {arguments['dim']}, which is not the last one"
    if not arguments["largest"]:
        return "it chooses the smallest elements"
    num_elements = value.shape[-1]
    if not isinstance(num_elements, int) or num_elements > MOST_ELEMENTS or not 0 < k <= MOST_CHOSEN:
        return f"it chooses {k} of {num_elements} elements; the kernel {MOST_CHOSEN} of {MOST_ELEMENTS} at most"
    if value.dtype not in DTYPES:
        return f"its elements are {value.dtype}"
    with graph.inserting_before(call):
        fused = emit(graph, top_k, x, k)
    call.replace_all_uses_with(fused)
    return [Replacement(call.name, fused)]
