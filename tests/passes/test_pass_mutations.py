"""The verifier tells right rewrites from wrong ones: every pass is broken on purpose, and each break is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from changed_passes import Broken
from graph_edits import (
    ANGLES,
    CONVOLUTION,
    EXPERTS,
    GATED,
    LAYER_NORM,
    LINEAR,
    NORM,
    ROPE,
    ROPE_ATTEND,
    SILU_MUL,
    SUM_NORM,
    Edit,
    aten,
    calls,
    copy_argument,
    drop_attention,
    drop_bias,
    forget_residual,
    is_scaled,
    no_silu,
    other_experts,
    reverse_packed,
    set_argument,
    skip,
    slots_off_by_one,
    swap_arguments,
    swap_halves,
    swap_results,
    take_from_next,
    unrotated_k,
    unscaled_q,
    widens,
    write_twice,
)
from pass_cases import (
    COHERE,
    CPU,
    DTYPES,
    DYNAMIC,
    GEMMA2,
    GLM4,
    GLM4_MOE,
    GPT_OSS,
    HUNYUAN,
    LFM2,
    LLAMA,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN3_YARN,
    RANGES,
    SMALL,
    STARCODER2,
    Family,
    graph_for,
    graph_of,
    run_on,
)
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.manager import PassReport, run_passes
from compiled_engine.passes.framework.matching import emit
from compiled_engine.passes.framework.verifier import VerificationError
from compiled_engine.passes.registry import passes_of_quantised, registered_passes

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Mutation:
    """`edit` is applied to what `broken`, a pass, has made of the graph of `family`. reported: as the pass would."""

    broken: str
    what: str
    edit: Edit
    family: Family = QWEN3
    reported: bool = True
    dtypes: tuple[torch.dtype, ...] = DTYPES


def ten_times(value: float) -> float:
    return 10 * value


def none(value: object) -> None:
    return None


MUTATIONS = (
    Mutation("no_op_elimination", "a negation taken for a no-op", skip(aten.neg.default)),
    Mutation("no_op_elimination", "yarn's factor taken for 1", skip(aten.mul.Tensor, is_scaled), QWEN3_YARN),
    Mutation("no_op_elimination", "a cast left out", skip(aten._to_copy.default, widens), dtypes=(torch.bfloat16,)),
    Mutation("no_op_elimination", "attention left out", drop_attention),
    Mutation("merge_linears", "weights in another order", reverse_packed("weight")),
    Mutation("merge_linears", "the same, unreported", reverse_packed("weight"), reported=False),
    Mutation("merge_linears", "gate and up swapped", swap_results(aten.split_with_sizes.default)),
    Mutation("merge_linears", "biases in another order", reverse_packed("bias"), QWEN2),
    Mutation("merge_linears", "no bias", drop_bias, QWEN2),
    Mutation("experts", "one expert fewer", set_argument(EXPERTS, "top_k", lambda count: count - 1), QWEN3_MOE),
    Mutation(
        "experts",
        "weights that are no shares",
        set_argument(EXPERTS, "renormalise", lambda shares: not shares),
        QWEN3_MOE,
    ),
    Mutation("experts", "another activation", set_argument(EXPERTS, "activation", lambda name: "gelu"), QWEN3_MOE),
    Mutation("experts", "no bias of gate and up", set_argument(EXPERTS, "gate_up_bias_EN", none), GPT_OSS),
    Mutation("experts", "no bias of the second product", set_argument(EXPERTS, "down_bias_ED", none), GPT_OSS),
    Mutation("experts", "another alpha", set_argument(EXPERTS, "alpha", ten_times), GPT_OSS),
    Mutation("experts", "another limit", set_argument(EXPERTS, "limit", lambda limit: limit / 10), GPT_OSS),
    Mutation("experts", "gate and up as halves", set_argument(EXPERTS, "interleaved", lambda in_turn: False), GPT_OSS),
    Mutation("rope_angles", "cos and sin of pairs swapped", swap_results(ANGLES), GPT_OSS),
    Mutation("rope_kv_write", "cos and sin of pairs swapped", swap_arguments(ROPE, "cos_T1d", "sin_T1d"), GPT_OSS),
    Mutation(
        "rope_kv_write", "halves for neighbours", set_argument(ROPE, "interleaved", lambda pairs: not pairs), GLM4
    ),
    Mutation(
        "rope_kv_write", "neighbours for halves", set_argument(ROPE, "interleaved", lambda pairs: not pairs), GPT_OSS
    ),
    Mutation(
        "rope_kv_write", "half of the part that is rotated", set_argument(ROPE, "rotary_dim", lambda r: r // 2), GLM4
    ),
    Mutation(
        "rope_kv_write", "the norm before the rotation", set_argument(ROPE, "norm_last", lambda last: False), HUNYUAN
    ),
    Mutation("rope_kv_write", "q not scaled", unscaled_q, MINISTRAL3),
    Mutation("experts", "weights of other experts", other_experts, GLM4_MOE),
    Mutation("residual_rms_norm", "no offset", set_argument(SUM_NORM, "offset", lambda offset: 0.0), GEMMA2),
    Mutation("residual_rms_norm", "no norm inside", set_argument(SUM_NORM, "inner_weight_D", none), GEMMA2),
    Mutation("silu_mul", "silu for gelu", set_argument(SILU_MUL, "activation", lambda name: "silu"), GEMMA2),
    Mutation("small_batch_linear", "no offset", set_argument(LINEAR, "norm_offset", lambda offset: offset - 1), GEMMA2),
    Mutation("small_batch_linear", "no residual beside experts", set_argument(EXPERTS, "residual_TD", none), QWEN3_MOE),
    Mutation("small_batch_linear", "no norm before experts", set_argument(EXPERTS, "norm_weight_D", none), QWEN3_MOE),
    Mutation("residual_rms_norm", "wrong eps", set_argument(SUM_NORM, "eps", ten_times)),
    Mutation("residual_rms_norm", "the weight of another norm", take_from_next(SUM_NORM, "weight_D")),
    Mutation("residual_rms_norm", "no residual in the sum", forget_residual),
    Mutation("residual_rms_norm", "no residual in the norm", copy_argument(SUM_NORM, "x_TD", "residual_TD")),
    Mutation("residual_rms_norm", "sum and norm swapped", swap_results(SUM_NORM)),
    Mutation("rms_norm", "wrong eps", set_argument(NORM, "eps", ten_times)),
    Mutation("rms_norm", "no norm", skip(NORM)),
    Mutation("layer_norm", "wrong eps", set_argument(LAYER_NORM, "eps", ten_times), STARCODER2),
    Mutation("layer_norm", "no weight", set_argument(LAYER_NORM, "weight_D", none), STARCODER2),
    Mutation("layer_norm", "no bias", set_argument(LAYER_NORM, "bias_D", none), STARCODER2),
    Mutation("layer_norm", "the residual twice", copy_argument(LAYER_NORM, "x_TD", "residual_TD"), STARCODER2),
    Mutation("layer_norm", "wrong eps, written out", set_argument(LAYER_NORM, "eps", ten_times), COHERE),
    Mutation("layer_norm", "no weight, written out", set_argument(LAYER_NORM, "weight_D", none), COHERE),
    Mutation("merge_linears", "gate and up swapped, apart", swap_results(aten.split_with_sizes.default), COHERE),
    Mutation("rope_angles", "cos and sin swapped", swap_results(ANGLES)),
    Mutation("rope_angles", "wrong scale", set_argument(ANGLES, "scale", ten_times), QWEN3_YARN),
    Mutation("rope_kv_write", "cos and sin swapped", swap_arguments(ROPE, "cos_T1d", "sin_T1d")),
    Mutation("rope_kv_write", "wrong eps", set_argument(ROPE, "eps", ten_times)),
    Mutation("rope_kv_write", "no norm of q", set_argument(ROPE, "q_norm_weight_d", none)),
    Mutation("rope_kv_write", "no norm of k", set_argument(ROPE, "k_norm_weight_d", none)),
    Mutation("rope_kv_write", "q's norm weight for k", copy_argument(ROPE, "q_norm_weight_d", "k_norm_weight_d")),
    Mutation("rope_kv_write", "k not rotated", unrotated_k, LLAMA),
    Mutation("rope_kv_write", "k and v swapped", swap_arguments(ROPE, "k_TKd", "v_TKd")),
    Mutation("rope_kv_write", "slots off by one", slots_off_by_one),
    Mutation("rope_kv_write", "another layer's cache", take_from_next(ROPE, "kv_cache_N2PKd")),
    Mutation("rope_kv_write", "written a second time", write_twice),
    Mutation("rope_attend", "wrong scale", set_argument(ROPE_ATTEND, "scale", ten_times)),
    Mutation("rope_attend", "another layer's cache", take_from_next(ROPE_ATTEND, "kv_cache_N2PKd")),
    Mutation("rope_attend", "cos and sin swapped", swap_arguments(ROPE_ATTEND, "cos_T1d", "sin_T1d")),
    Mutation("rope_attend", "k and v swapped", swap_arguments(ROPE_ATTEND, "k_TKd", "v_TKd")),
    Mutation("rope_attend", "no norm of q", set_argument(ROPE_ATTEND, "q_norm_weight_d", none)),
    Mutation("gated_convolution", "no factor", set_argument(CONVOLUTION, "factor_TD", none), LFM2),
    Mutation("gated_convolution", "no gate", set_argument(CONVOLUTION, "gate_TD", none), LFM2),
    Mutation("gated_convolution", "swapped", swap_arguments(CONVOLUTION, "factor_TD", "gate_TD"), LFM2),
    Mutation("gated_convolution", "silu", set_argument(CONVOLUTION, "activation", lambda name: "silu"), LFM2),
    Mutation("silu_mul", "gate and up swapped", swap_halves),
    Mutation("silu_mul", "no silu", no_silu),
    Mutation("small_batch_linear", "wrong eps", set_argument(LINEAR, "eps", ten_times)),
    Mutation("small_batch_linear", "the weight of another norm", take_from_next(LINEAR, "norm_weight_K")),
    Mutation("small_batch_linear", "no norm", set_argument(LINEAR, "norm_weight_K", none)),
    Mutation("small_batch_linear", "no residual", set_argument(LINEAR, "residual_TM", none)),
    Mutation("small_batch_linear", "no bias", set_argument(LINEAR, "bias_N", none), QWEN2),
    Mutation("small_batch_linear", "another layer's weight", take_from_next(LINEAR, "weight_NK")),
    Mutation("small_batch_linear", "gate and up swapped", reverse_packed("{gate_proj,up_proj}.weight")),
    Mutation("gated_linear", "another layer's weight", take_from_next(GATED, "weight_NK")),
    Mutation("gated_linear", "gate and up swapped", reverse_packed("{gate_proj,up_proj}.weight")),
    Mutation("gated_linear", "silu for gelu", set_argument(GATED, "activation", lambda name: "silu"), GEMMA2),
)
# Passes that apply to one of the ranges.
ONE_RANGE = {"small_batch_linear": (SMALL,), "gated_linear": (DYNAMIC,)}


def cases() -> Iterator[Any]:
    """Each mutation in both types; of one, which goes by turns, a twelfth runs, and of the other fewer."""
    for number, mutation in enumerate(MUTATIONS):
        chosen = mutation.dtypes[number % len(mutation.dtypes) if mutation.family is QWEN3 else 0]
        for dtype in mutation.dtypes:
            name = f"{mutation.broken}: {mutation.what}, {str(dtype).removeprefix('torch.')}"
            is_other = dtype != chosen
            yield pytest.param(mutation, dtype, id=name, marks=pytest.mark.product(one_in=30 if is_other else 12))


@pytest.fixture(scope="module")
def verified() -> dict[tuple[Any, ...], int]:
    """Graph -> how many passes have been verified on it."""
    return {}


@pytest.mark.parametrize(("mutation", "dtype"), list(cases()))
def test_a_broken_rewrite_is_caught(
    mutation: Mutation, dtype: torch.dtype, verified: dict[tuple[Any, ...], int]
) -> None:
    passes = registered_passes()
    place = [each.name for each in passes].index(mutation.broken)
    broken = Broken(passes[place], mutation.edit, mutation.reported)
    for compile_range in ONE_RANGE.get(mutation.broken, RANGES):
        graph = graph_for(mutation.family, dtype, compile_range)
        # On other graphs test_pass_manager.py verifies what comes before.
        key = (mutation.family, dtype, compile_range)
        verify = bool(mutation.family.foreign) and place > verified.get(key, 0)
        run_on(graph, compile_range, passes[:place], passes, verify=verify)
        if verify:
            verified[key] = place
        with pytest.raises(VerificationError, match=mutation.broken):
            run_on(graph, compile_range, (broken,), passes)


# Applied where there are several ranks: tests/passes/test_sequence_parallel.py breaks them there.
OF_RANKS = {"all_reduce_residual_rms_norm", "sequence_parallel"}


@dataclass(frozen=True)
class ReplaceFlip(GraphPass):
    """Puts something else in the place of flip. Its input, by default, which is right for a single token."""

    becomes: Callable[[fx.Graph, fx.Node], fx.Node] = lambda graph, before: before
    name: str = "flip"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return 0

    def run(self, graph: fx.Graph) -> PassResult:
        (flip,) = calls(graph, aten.flip.default)
        with graph.inserting_before(flip):
            new = self.becomes(graph, flip.all_input_nodes[0])
        flip.replace_all_uses_with(new)
        graph.erase_node(flip)
        return PassResult(1, (), (Replacement(flip.name, new),))


@pytest.mark.parametrize("of_an_input", [True, False])
def test_both_ends_of_a_range_are_run(of_an_input: bool) -> None:

    def run(compile_range: CompileRange) -> PassReport:
        def function(positions_T: torch.Tensor) -> torch.Tensor:
            return (positions_T if of_an_input else positions_T + 1).flip(0) * 2

        graph = graph_of(function, {"positions_T": torch.arange(4)}, {}).graph
        (report,) = run_passes(graph, (ReplaceFlip(),), ("flip",), compile_range, CPU, verify=True)
        return report

    assert run(CompileRange(1, 1)).verified == 1
    with pytest.raises(VerificationError, match=r"pass flip, 8 tokens: .* has other elements"):
        run(CompileRange(1, 8))


@pytest.mark.parametrize(
    ("target", "arguments", "problem"),
    [
        (aten.mul.Tensor, (float("nan"),), "is off by nan"),
        (aten.sum.dim_IntList, ([0],), r"is torch.float32\[\] instead of torch.float32\[8\]"),
        (aten.to.dtype, (torch.float64,), "is torch.float64"),
    ],
)
def test_another_kind_of_value_is_caught(target: Any, arguments: tuple[Any, ...], problem: str) -> None:
    graph = graph_of(lambda positions_T: positions_T.float().flip(0), {"positions_T": torch.arange(4)}, {}).graph
    broken = ReplaceFlip(lambda graph, before: emit(graph, target, before, *arguments))
    with pytest.raises(VerificationError, match=problem):
        run_passes(graph, (broken,), ("flip",), CompileRange(8, 8), CPU, verify=True)


def test_every_pass_is_broken() -> None:
    names = {graph_pass.name for graph_pass in registered_passes()}
    # `top_k`, which is for GPUs alone, is broken in test_top_k.
    assert {mutation.broken for mutation in MUTATIONS} == names - OF_RANKS - passes_of_quantised() - {"top_k"}
