"""The op of a mixture of experts, from the router's logits to the weighted sum: reference, tiles and launch.

There are kernels for up to MOST_BY_TOKEN tokens that share few experts, unless weights have four bits, and for up to
MOST_VECTOR_TOKENS tokens with weights in e2m1 (MXFP4, NVFP4). In all other cases, tokens are sorted by expert on the
device, and each program takes a tile of one expert's tokens, so every expert in use is read once (Gale et al. 2022,
MegaBlocks).
Grids depend on shapes alone, so nothing waits for the device and every launch can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, is_hopper, next_power_of_2
from compiled_engine.passes.experts import experts_e2m1, invariant_experts
from compiled_engine.passes.experts.experts_by_token import (
    by_token_down_kernel,
    by_token_gate_up_kernel,
    by_token_route_kernel,
)
from compiled_engine.passes.experts.experts_decoded import decoded_weight
from compiled_engine.passes.experts.experts_gate import Gate
from compiled_engine.passes.experts.experts_grouped import combine_kernel, grouped_kernel
from compiled_engine.passes.experts.experts_routing import place_kernel, route_kernel
from compiled_engine.passes.experts.experts_tiles import (
    MOST_VECTOR_TOKENS,
    GroupedTiles,
    by_token_tiles,
    computed_by_token,
    decodes_first,
    grouped_tiles,
    invariant_tiles,
    packed_tiles,
    words_tiles,
)
from compiled_engine.passes.experts.experts_words import BLOCK_COLUMNS, UNIT_COLUMNS
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear.experts_codes import columns_of, constants_of, decoded
from compiled_engine.passes.norm import rms_norm

# (token, expert) pairs that a program of place_kernel sorts.
PLACED = 128


def reference(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_END: torch.Tensor,
    down_EDI: torch.Tensor,
    gate_up_bias_EN: torch.Tensor | None,
    down_bias_ED: torch.Tensor | None,
    top_k: int,
    renormalise: bool,
    activation: str = "silu",
    alpha: float = 0.0,
    limit: float = 0.0,
    interleaved: bool = False,
    norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    residual_TD: torch.Tensor | None = None,
    chosen_TX: torch.Tensor | None = None,
    gate_up_scales_ERC: torch.Tensor | None = None,
    down_scales_ERC: torch.Tensor | None = None,
    gate_up_scheme: str = "",
    down_scheme: str = "",
    gate_up_zeros_ERC: torch.Tensor | None = None,
    down_zeros_ERC: torch.Tensor | None = None,
    gate_up_row_scales_ER1: torch.Tensor | None = None,
    down_row_scales_ER1: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """Return for each token the sum of its top_k experts' outputs times their probabilities, plus the residual: [T, D].

    logits_TE: of the router, before the softmax. renormalise: the chosen experts' probabilities add up to 1.
    gate_up_END: rows of gate and up, ordered by `interleaved`; activation, alpha, limit: see `Gate`.
    norm_weight_D, eps, norm_offset, norm_wide: of an RMS norm that is applied to x first, see rms_norm.
    chosen_TX: the experts of each token; logits_TE then holds their weights, [T, top_k].
    Scales, schemes, zero points and scales of rows: of quantised weights, see experts_codes.
    invariant: a token's bits depend on neither the other tokens nor their number, see invariant_experts.

    Steps whose argument is None are left out. The numbers of the chosen experts are read on the host.
    """
    if norm_weight_D is not None:
        x_TD = rms_norm.reference(x_TD, norm_weight_D, eps, norm_offset, norm_wide)
    gate = Gate(activation, alpha, limit, interleaved)
    if invariant:
        weights = gate_up_END, down_EDI, gate_up_bias_EN, down_bias_ED
        out = invariant_experts.weighted_sum(x_TD, logits_TE, *weights, top_k, renormalise, gate, chosen_TX)
        return out if residual_TD is None else residual_TD + out
    weights_TX = logits_TE
    if chosen_TX is None:
        weights_TX, chosen_TX = logits_TE.float().softmax(-1).topk(top_k, dim=-1)
    if renormalise:
        weights_TX = weights_TX / weights_TX.sum(-1, keepdim=True)
    weights_TX = weights_TX.to(x_TD.dtype)
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32, memory_format=torch.contiguous_format)
    for expert in chosen_TX.unique().tolist():
        token_P, slot_P = torch.where(chosen_TX == expert)
        bias_N, bias_D = (None if bias is None else bias[expert] for bias in (gate_up_bias_EN, down_bias_ED))
        gate_up = gate_up_END, gate_up_scales_ERC, gate_up_zeros_ERC, gate_up_row_scales_ER1
        hidden_PI = gate(_linear(x_TD[token_P], expert, gate_up, gate_up_scheme, bias_N))
        down = down_EDI, down_scales_ERC, down_zeros_ERC, down_row_scales_ER1
        y_PD = _linear(hidden_PI, expert, down, down_scheme, bias_D)
        out_TD.index_add_(0, token_P, (y_PD * weights_TX[token_P, slot_P, None]).float())
    out = out_TD.to(x_TD.dtype)
    return out if residual_TD is None else residual_TD + out


def _linear(
    x_PK: torch.Tensor,
    expert: int,
    weight: tuple[torch.Tensor | None, ...],
    scheme: str,
    bias_N: torch.Tensor | None,
) -> torch.Tensor:
    """Return one expert's linear of x, [P, N]. With a quantised weight it is computed in fp32, and rounded once.

    weight: (values or codes, scales or None, zero points or None, scales of rows or None) of all experts.
    """
    weight_NK, scales_RC, zeros_RC, row_scales_R1 = (None if part is None else part[expert] for part in weight)
    assert weight_NK is not None
    if scales_RC is None:
        return torch.nn.functional.linear(x_PK, weight_NK, bias_N)
    weight_NK = decoded(weight_NK, scales_RC, zeros_RC, scheme, row_scales_R1)
    bias = None if bias_N is None else bias_N.float()
    return torch.nn.functional.linear(x_PK.float(), weight_NK, bias).to(x_PK.dtype)


@dataclass(frozen=True)
class _Weight:
    """A weight matrix of all experts with its bias, and constexprs for the kernels that read its format."""

    values: torch.Tensor  # or codes
    scales_ERC: torch.Tensor | None  # uint8 if a scale is one byte, whatever its format
    zeros_ERC: torch.Tensor | None
    row_scales_ER1: torch.Tensor | None
    bias_EN: torch.Tensor | None
    num_columns: int
    codes: dict[str, Any]

    @staticmethod
    def of(
        values: torch.Tensor,
        scales_ERC: torch.Tensor | None,
        zeros_ERC: torch.Tensor | None,
        row_scales_ER1: torch.Tensor | None,
        bias_EN: torch.Tensor | None,
        scheme: str,
    ) -> _Weight:
        num_columns = columns_of(values, scheme)
        codes = constants_of(scheme, num_columns)
        if scales_ERC is not None and codes["SCALES"]:
            scales_ERC = scales_ERC.view(torch.uint8)
        return _Weight(values, scales_ERC, zeros_ERC, row_scales_ER1, bias_EN, num_columns, codes)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.values, self.scales_ERC, self.zeros_ERC, self.row_scales_ER1, self.bias_EN

    @property
    def tiles(self) -> dict[str, Any]:
        """The constexprs of kernels that do not decode codes of four bits."""
        return {name: self.codes[name] for name in ("TILE_ROWS", "TILE_COLUMNS")}

    @property
    def is_packed(self) -> bool:
        return bool(self.codes["PACKED"])

    @property
    def is_e2m1(self) -> bool:
        return self.codes["PACKED"] == "e2m1"

    @property
    def has_words(self) -> bool:
        """Whether the units of e2m1 codes are those that words_product reads."""
        return self.codes["UNIT"] == self.codes["TILE_COLUMNS"] == UNIT_COLUMNS[self.codes["SCALES"]]

    def decoded(self, dtype: torch.dtype) -> _Weight:
        """Return this weight in e2m1 decoded to `dtype`, in newly allocated memory. Scales of rows stay apart."""
        assert self.scales_ERC is not None
        tile = self.codes["TILE_COLUMNS"], self.codes["UNIT"]
        values = decoded_weight(self.values, self.scales_ERC, *tile, dtype, self.codes["SCALES"])
        return _Weight.of(values, None, None, self.row_scales_ER1, self.bias_EN, "")

    def as_e2m1(self) -> experts_e2m1.Codes:
        assert self.scales_ERC is not None
        constants = (self.codes[name] for name in ("TILE_COLUMNS", "UNIT", "SCALES"))
        return experts_e2m1.Codes(self.values, self.scales_ERC, self.row_scales_ER1, self.bias_EN, *constants)


@dataclass(frozen=True)
class _Weights:
    """The experts' weights, and the kernels' constexprs for routing and for the gate."""

    gate_up: _Weight
    down: _Weight
    route: dict[str, Any]
    gate: dict[str, Any]
    invariant: bool

    @property
    def are_e2m1(self) -> bool:
        return self.gate_up.is_e2m1 and self.down.is_e2m1

    def tiles(self, num_tokens: int, dtype: torch.dtype) -> tuple[GroupedTiles, bool, bool]:
        """Return (tiles of grouped_kernel, whether it uses words_product, whether weights are decoded before it)."""
        share = self.route["TOP_K"] / self.route["NUM_EXPERTS"]
        sizes = self.gate_up.num_columns, self.down.num_columns
        large = is_hopper(self.down.values.device)
        coded = any(weight.scales_ERC is not None for weight in (self.gate_up, self.down))
        if self.invariant:
            return invariant_tiles(num_tokens, dtype, share, *sizes, coded=coded, hopper=large), False, False
        if self.are_e2m1 and decodes_first(num_tokens, share):
            return grouped_tiles(num_tokens, dtype, share, large=large), False, True
        if self.are_e2m1 and self.gate_up.has_words and self.down.has_words:
            return words_tiles(num_tokens, dtype, share), True, False
        if self.gate_up.is_packed or self.down.is_packed:
            return packed_tiles(num_tokens, dtype, share, self.are_e2m1), False, False
        return grouped_tiles(num_tokens, dtype, share, *sizes, coded=coded, large=large), False, False


def launch(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_END: torch.Tensor,
    down_EDI: torch.Tensor,
    gate_up_bias_EN: torch.Tensor | None,
    down_bias_ED: torch.Tensor | None,
    top_k: int,
    renormalise: bool,
    activation: str = "silu",
    alpha: float = 0.0,
    limit: float = 0.0,
    interleaved: bool = False,
    norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    residual_TD: torch.Tensor | None = None,
    chosen_TX: torch.Tensor | None = None,
    gate_up_scales_ERC: torch.Tensor | None = None,
    down_scales_ERC: torch.Tensor | None = None,
    gate_up_scheme: str = "",
    down_scheme: str = "",
    gate_up_zeros_ERC: torch.Tensor | None = None,
    down_zeros_ERC: torch.Tensor | None = None,
    gate_up_row_scales_ER1: torch.Tensor | None = None,
    down_row_scales_ER1: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [T, D], computed by the kernels; see `reference`.

    Weights and biases must be contiguous.
    """
    x_TD, logits_TE = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (x_TD, logits_TE))
    chosen_TX = None if chosen_TX is None else chosen_TX.contiguous()
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    num_experts = gate_up_END.shape[0]
    route = {"NUM_EXPERTS": num_experts, "TOP_K": top_k, "BLOCK_E": next_power_of_2(num_experts)}
    gate = {"ACTIVATION": activation, "ALPHA": alpha, "LIMIT": limit, "INTERLEAVED": interleaved}
    beside = gate_up_scales_ERC, gate_up_zeros_ERC, gate_up_row_scales_ER1
    gate_up = _Weight.of(gate_up_END, *beside, gate_up_bias_EN, gate_up_scheme)
    beside = down_scales_ERC, down_zeros_ERC, down_row_scales_ER1
    down = _Weight.of(down_EDI, *beside, down_bias_ED, down_scheme)
    weights = _Weights(gate_up, down, route | {"RENORMALISE": renormalise}, gate, invariant)
    norm = norm_weight_D, eps, norm_offset, norm_wide
    if invariant:
        return _grouped(x_TD, logits_TE, weights, norm, residual_TD, chosen_TX)
    if not gate_up.is_packed and not down.is_packed and computed_by_token(x_TD.shape[0], top_k, num_experts):
        return _by_token(x_TD, logits_TE, weights, (norm_weight_D, eps, norm_offset), residual_TD, chosen_TX)
    if x_TD.shape[0] <= MOST_VECTOR_TOKENS and weights.are_e2m1:
        codes = gate_up.as_e2m1(), down.as_e2m1()
        return experts_e2m1.launch(x_TD, logits_TE, *codes, weights.route, weights.gate, norm, residual_TD, chosen_TX)
    return _grouped(x_TD, logits_TE, weights, norm, residual_TD, chosen_TX)


def _by_token(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    weights: _Weights,
    norm: tuple[torch.Tensor | None, float, float],
    residual_TD: torch.Tensor | None,
    chosen_TX: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, hidden_size = x_TD.shape
    width, top_k = weights.down.num_columns, weights.route["TOP_K"]
    norm_weight_D, eps, norm_offset = norm
    options = dependent_launch(x_TD.device)
    hidden_SI = x_TD.new_empty((num_tokens * top_k, width))
    if chosen_TX is None:
        chosen_TX = torch.empty((num_tokens, top_k), dtype=torch.int32, device=x_TD.device)
        weights_TX = torch.empty((num_tokens, top_k), dtype=torch.float32, device=x_TD.device)
        by_token_route_kernel[(num_tokens,)](
            logits_TE, chosen_TX, weights_TX, logits_TE.stride(0), num_warps=1, **weights.route, **options
        )
    else:
        weights_TX = logits_TE.contiguous()
    tiles = by_token_tiles(hidden_size, gate_up=True)
    by_token_gate_up_kernel[(cdiv(width, tiles.rows), num_tokens * top_k)](
        x_TD,
        weights.gate_up.values,
        weights.gate_up.scales_ERC,
        weights.gate_up.zeros_ERC,
        weights.gate_up.bias_EN,
        norm_weight_D,
        hidden_SI,
        chosen_TX,
        eps,
        x_TD.stride(0),
        TOP_K=top_k,
        K=hidden_size,
        WIDTH=width,
        NORM=norm_weight_D is not None,
        OFFSET=norm_offset,
        ROWS=tiles.rows,
        BLOCK_K=max(tiles.block_k, weights.gate_up.codes["TILE_COLUMNS"]),
        num_warps=tiles.num_warps,
        **weights.gate_up.tiles,
        **weights.gate,
        **options,
    )
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    tiles = by_token_tiles(width, gate_up=False)
    by_token_down_kernel[(cdiv(hidden_size, tiles.rows), num_tokens)](
        hidden_SI,
        weights.down.values,
        weights.down.scales_ERC,
        weights.down.zeros_ERC,
        weights.down.bias_EN,
        chosen_TX,
        weights_TX,
        residual_TD,
        out_TD,
        HIDDEN_SIZE=hidden_size,
        WIDTH=width,
        TOP_K=top_k,
        ROWS=tiles.rows,
        BLOCK_K=max(tiles.block_k, weights.down.codes["TILE_COLUMNS"]),
        num_warps=tiles.num_warps,
        **weights.down.tiles,
        **options,
    )
    return out_TD


def _grouped(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    weights: _Weights,
    norm: tuple[torch.Tensor | None, float, float, bool],
    residual_TD: torch.Tensor | None,
    given_TX: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, hidden_size = x_TD.shape
    route, width = weights.route, weights.down.num_columns
    num_experts, top_k, block_e = route["NUM_EXPERTS"], route["TOP_K"], route["BLOCK_E"]
    num_pairs = num_tokens * top_k
    tiles, in_words, decodes = weights.tiles(num_tokens, x_TD.dtype)
    is_alone = num_tokens == 1 and not in_words  # the token, whose pairs need not be sorted
    # Each expert's last tile may be partial.
    num_blocks = top_k if is_alone else min(num_pairs, num_experts) + num_pairs // tiles.tokens
    device, options = x_TD.device, dependent_launch(x_TD.device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    counts_E = _counts(device, stream, num_experts)
    chosen_S, rank_S, sorted_S = torch.empty((3, num_pairs), dtype=torch.int32, device=device)
    weights_S = torch.empty(num_pairs, dtype=torch.float32, device=device)
    blocks_B4 = torch.empty((num_blocks, 4), dtype=torch.int32, device=device)
    # Allocated before the first kernel: running out of memory later would leave counts that the last kernel resets.
    columns, padded_width = (_padded(size, in_words) for size in (hidden_size, width))
    hidden_SI, y_SD = x_TD.new_empty((num_pairs, padded_width)), x_TD.new_empty((num_pairs, hidden_size))
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    if in_words:
        found = x_TD.new_empty((num_tokens, columns)), chosen_S, weights_S, rank_S, counts_E
        experts_e2m1.prepare(x_TD, logits_TE, given_TX, norm, found, route, weights.gate_up.codes["UNIT"], columns)
        x_TD = found[0]
    else:
        norm_weight_D = norm[0]
        if norm_weight_D is not None:
            x_TD = rms_norm.launch(x_TD, norm_weight_D, *norm[1:])
        route_kernel[(num_tokens,)](
            logits_TE,
            given_TX,
            chosen_S,
            weights_S,
            rank_S,
            counts_E,
            *((sorted_S, blocks_B4) if is_alone else (None, None)),
            logits_TE.stride(0),
            BLOCK_X=next_power_of_2(top_k),
            num_warps=1,
            **route,
            **options,
        )
    if not is_alone:
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
    shared: dict[str, Any] = {
        "TOP_K": top_k,
        "TOKENS": tiles.tokens,
        "ROWS": tiles.rows,
        "NUM_STAGES": tiles.num_stages,
        "num_warps": tiles.num_warps,
        "IN_WORDS": in_words,
        "ROWS_FIRST": tiles.rows_first or tiles.tokens < 64,
        "enable_fp_fusion": not weights.invariant,
        **weights.gate,
        **options,
    }
    products = (
        (x_TD, weights.gate_up, hidden_SI, 2 * width, 2 * padded_width, True),
        (hidden_SI, weights.down, y_SD, hidden_size, hidden_size, False),
    )
    for left, codes, out, num_rows, written, gated in products:
        right = codes.decoded(x_TD.dtype) if decodes else codes
        grouped_kernel[(cdiv(written, tiles.rows), num_blocks)](
            left,
            *right.tensors,
            out,
            sorted_S,
            blocks_B4,
            weights_S,
            left.stride(0),
            K=right.num_columns,
            NUM_ROWS=num_rows,
            GATED=gated,
            BLOCK_K=_step(tiles, right),
            **right.codes,
            **shared,
        )
        del right  # before the next weight is decoded
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


def _padded(num_columns: int, in_words: bool) -> int:
    return cdiv(num_columns, BLOCK_COLUMNS) * BLOCK_COLUMNS if in_words else num_columns


def _step(tiles: GroupedTiles, weight: _Weight) -> int:
    """Return how many columns of a weight grouped_kernel multiplies at a time.

    These columns share a scale, unless the scales are factors of the decoded values (e2m1).
    """
    if weight.is_e2m1:
        return tiles.block_k
    return min(tiles.block_k, weight.codes["TILE_COLUMNS"] or tiles.block_k)


@cache
def _counts(device: torch.device, stream: int, num_experts: int) -> torch.Tensor:
    """Return the buffer for the numbers of (token, expert) pairs per expert, int32 [E], zero between launches.

    Each stream has its own buffer, since launches on one stream do not overlap.
    """
    return torch.zeros(num_experts, dtype=torch.int32, device=device)


experts = define_op(
    "experts(Tensor x_TD, Tensor logits_TE, Tensor gate_up_END, Tensor down_EDI, Tensor? gate_up_bias_EN, "
    'Tensor? down_bias_ED, int top_k, bool renormalise, str activation="silu", float alpha=0.0, float limit=0.0, '
    "bool interleaved=False, Tensor? norm_weight_D=None, float eps=0.0, float norm_offset=0.0, bool norm_wide=False, "
    "Tensor? residual_TD=None, Tensor? chosen_TX=None, Tensor? gate_up_scales_ERC=None, "
    'Tensor? down_scales_ERC=None, str gate_up_scheme="", str down_scheme="", '
    "Tensor? gate_up_zeros_ERC=None, Tensor? down_zeros_ERC=None, Tensor? gate_up_row_scales_ER1=None, "
    "Tensor? down_row_scales_ER1=None, bool invariant=False) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=lambda x_TD: torch.empty_like(x_TD, memory_format=torch.contiguous_format),
)
