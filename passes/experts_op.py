"""The op of a mixture of experts, from the router's logits to the weighted sum: reference and launch of kernels.

A single token has kernels of its own. With more, tokens are sorted by their experts on the device, and each program
takes a tile of tokens of one expert, so each expert that is touched is read once. All grids follow from shapes alone:
nothing waits for the device, and every launch can be captured. Sorted tiles: Gale et al. 2022 (MegaBlocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from compiled_engine.kernels.block_sizes import cdiv, next_power_of_2
from compiled_engine.kernels.dependent_launch import dependent_launch
from compiled_engine.passes import rms_norm
from compiled_engine.passes.experts_grouped import combine_kernel, grouped_kernel
from compiled_engine.passes.experts_one_token import one_token_down_kernel, one_token_gate_up_kernel
from compiled_engine.passes.experts_routing import place_kernel, route_kernel
from compiled_engine.passes.op_library import define_op
from compiled_engine.passes.silu_mul import reference as silu_mul_reference

# Up to so many tokens, tiles are those of a few tokens, or of some.
FEW_TOKENS, SOME_TOKENS = 64, 1024
# Pairs of token and expert that a program places.
PLACED = 128


@dataclass(frozen=True)
class GroupedTiles:
    """Tokens and rows of the weight of a program, and how it is compiled."""

    tokens: int
    rows: int
    block_k: int
    num_warps: int
    num_stages: int


def grouped_tiles(num_tokens: int, dtype: torch.dtype) -> GroupedTiles:
    """By the tokens of the step, which many experts share."""
    if dtype == torch.float32:
        return GroupedTiles(tokens=16, rows=32, block_k=32, num_warps=4, num_stages=2)
    if num_tokens <= FEW_TOKENS:
        return GroupedTiles(tokens=16, rows=64, block_k=128, num_warps=4, num_stages=4)
    if num_tokens <= SOME_TOKENS:
        return GroupedTiles(tokens=64, rows=64, block_k=64, num_warps=4, num_stages=4)
    return GroupedTiles(tokens=128, rows=128, block_k=64, num_warps=8, num_stages=3)


def reference(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_END: torch.Tensor,
    down_EDI: torch.Tensor,
    top_k: int,
    renormalise: bool,
    activation: str = "silu",
    norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    residual_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, D]: of each token the sum of what its top_k experts make of it, times their probabilities, plus the residual.

    logits_TE: of the router, before the softmax. renormalise: the probabilities of the chosen ones add up to 1.
    gate_up_END: of each expert the rows of gate, then those of up. norm_weight_D: x is normed first, see rms_norm.
    Steps whose argument is None are left out. It reads the chosen experts on the host.
    """
    if norm_weight_D is not None:
        x_TD = rms_norm.reference(x_TD, norm_weight_D, eps, norm_offset, norm_wide)
    weights_TX, chosen_TX = logits_TE.float().softmax(-1).topk(top_k, dim=-1)
    if renormalise:
        weights_TX = weights_TX / weights_TX.sum(-1, keepdim=True)
    weights_TX = weights_TX.to(x_TD.dtype)
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32, memory_format=torch.contiguous_format)
    for expert in chosen_TX.unique().tolist():
        token_P, slot_P = torch.where(chosen_TX == expert)
        hidden_PI = silu_mul_reference(torch.nn.functional.linear(x_TD[token_P], gate_up_END[expert]), activation)
        y_PD = torch.nn.functional.linear(hidden_PI, down_EDI[expert])
        out_TD.index_add_(0, token_P, (y_PD * weights_TX[token_P, slot_P, None]).float())
    out = out_TD.to(x_TD.dtype)
    return out if residual_TD is None else residual_TD + out


def launch(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_END: torch.Tensor,
    down_EDI: torch.Tensor,
    top_k: int,
    renormalise: bool,
    activation: str = "silu",
    norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    residual_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernels behind `reference`; weights contiguous."""
    x_TD, logits_TE = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (x_TD, logits_TE))
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    route = {"NUM_EXPERTS": logits_TE.shape[1], "TOP_K": top_k, "RENORMALISE": renormalise}
    if x_TD.shape[0] == 1:
        norm = norm_weight_D, eps, norm_offset
        return _one_token(x_TD, logits_TE, gate_up_END, down_EDI, route, activation, norm, residual_TD)
    if norm_weight_D is not None:
        x_TD = rms_norm.launch(x_TD, norm_weight_D, eps, norm_offset, norm_wide)
    return _grouped(x_TD, logits_TE, gate_up_END, down_EDI, route, activation, residual_TD)


def _one_token(
    x_1D: torch.Tensor,
    logits_1E: torch.Tensor,
    gate_up_END: torch.Tensor,
    down_EDI: torch.Tensor,
    route: dict[str, Any],
    activation: str,
    norm: tuple[torch.Tensor | None, float, float],
    residual_1D: torch.Tensor | None,
) -> torch.Tensor:
    hidden_size, width, top_k = x_1D.shape[1], down_EDI.shape[2], route["TOP_K"]
    norm_weight_D, eps, norm_offset = norm
    options = dependent_launch(x_1D.device)
    hidden_XI = x_1D.new_empty((top_k, width))
    chosen_X = torch.empty(top_k, dtype=torch.int32, device=x_1D.device)
    weights_X = torch.empty(top_k, dtype=torch.float32, device=x_1D.device)
    rows = 4
    one_token_gate_up_kernel[(cdiv(width, rows), top_k)](
        x_1D,
        logits_1E,
        gate_up_END,
        norm_weight_D,
        hidden_XI,
        chosen_X,
        weights_X,
        eps,
        K=hidden_size,
        WIDTH=width,
        BLOCK_E=next_power_of_2(route["NUM_EXPERTS"]),
        NORM=norm_weight_D is not None,
        OFFSET=norm_offset,
        ACTIVATION=activation,
        ROWS=rows,
        BLOCK_K=min(next_power_of_2(hidden_size), 2048),
        num_warps=8,
        **route,
        **options,
    )
    out_1D = torch.empty_like(x_1D, memory_format=torch.contiguous_format)
    one_token_down_kernel[(cdiv(hidden_size, rows),)](
        hidden_XI,
        down_EDI,
        chosen_X,
        weights_X,
        residual_1D,
        out_1D,
        HIDDEN_SIZE=hidden_size,
        WIDTH=width,
        TOP_K=top_k,
        ROWS=rows,
        BLOCK_K=min(next_power_of_2(width), 1024),
        num_warps=4,
        **options,
    )
    return out_1D


def _grouped(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_END: torch.Tensor,
    down_EDI: torch.Tensor,
    route: dict[str, Any],
    activation: str,
    residual_TD: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, hidden_size = x_TD.shape
    num_experts, width, top_k = route["NUM_EXPERTS"], down_EDI.shape[2], route["TOP_K"]
    tiles = grouped_tiles(num_tokens, x_TD.dtype)
    num_pairs = num_tokens * top_k
    # An expert's last tile may be part of one.
    num_blocks = min(num_pairs, num_experts) + num_pairs // tiles.tokens
    device, options = x_TD.device, dependent_launch(x_TD.device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    counts_E = _counts(device, stream, num_experts)
    chosen_S, rank_S, sorted_S = torch.empty((3, num_pairs), dtype=torch.int32, device=device)
    weights_S = torch.empty(num_pairs, dtype=torch.float32, device=device)
    blocks_B4 = torch.empty((num_blocks, 4), dtype=torch.int32, device=device)
    block_e = next_power_of_2(num_experts)
    route_kernel[(num_tokens,)](
        logits_TE,
        chosen_S,
        weights_S,
        rank_S,
        counts_E,
        logits_TE.stride(0),
        BLOCK_E=block_e,
        BLOCK_X=next_power_of_2(top_k),
        num_warps=1,
        **route,
        **options,
    )
    place_kernel[(cdiv(max(num_pairs, num_blocks), PLACED),)](
        chosen_S,
        rank_S,
        counts_E,
        sorted_S,
        blocks_B4,
        num_pairs,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BLOCK_E=block_e,
        TOKENS=tiles.tokens,
        PLACED=PLACED,
        **options,
    )
    hidden_SI = x_TD.new_empty((num_pairs, width))
    y_SD = x_TD.new_empty((num_pairs, hidden_size))
    shared: dict[str, Any] = {
        "TOP_K": top_k,
        "ACTIVATION": activation,
        "TOKENS": tiles.tokens,
        "ROWS": tiles.rows,
        "BLOCK_K": tiles.block_k,
        "NUM_STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": True,
        **options,
    }
    products = (
        (x_TD, gate_up_END, hidden_SI, hidden_size, 2 * width, True),
        (hidden_SI, down_EDI, y_SD, width, hidden_size, False),
    )
    for left, weights, out, k, num_rows, gated in products:
        grouped_kernel[(cdiv(num_rows, tiles.rows), num_blocks)](
            left,
            weights,
            out,
            sorted_S,
            blocks_B4,
            weights_S,
            left.stride(0),
            K=k,
            NUM_ROWS=num_rows,
            GATED=gated,
            **shared,
        )
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    block_d = min(next_power_of_2(hidden_size), 1024)
    combine_kernel[(num_tokens, cdiv(hidden_size, block_d))](
        y_SD,
        residual_TD,
        out_TD,
        counts_E,
        HIDDEN_SIZE=hidden_size,
        TOP_K=top_k,
        NUM_EXPERTS=num_experts,
        BLOCK_E=block_e,
        BLOCK_D=block_d,
        **options,
    )
    return out_TD


@cache
def _counts(device: torch.device, stream: int, num_experts: int) -> torch.Tensor:
    """Pairs of each expert, zero between launches; one set for each stream, on which launches follow one another."""
    return torch.zeros(num_experts, dtype=torch.int32, device=device)


def _fake(x_TD: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format)


experts = define_op(
    "experts(Tensor x_TD, Tensor logits_TE, Tensor gate_up_END, Tensor down_EDI, int top_k, bool renormalise, "
    'str activation="silu", Tensor? norm_weight_D=None, float eps=0.0, float norm_offset=0.0, bool norm_wide=False, '
    "Tensor? residual_TD=None) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=_fake,
)
