"""Computes small_batch_linear on CPUs by one C++ kernel, for few tokens in float32.

PyTorch's matrix product of a few rows copies the weight to another layout at every call; the C++ kernel reads it in
place.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from compiled_engine.config import ModelConfig
from compiled_engine.kernels.cpp_library import INTEGER, NUMBER, POINTER, CannotCompile, CppFunction

SOURCE = Path(__file__).with_name("small_batch_linear_cpu.cpp")
MOST_TOKENS = 64
# The kernel's codes of activations; others use the reference.
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
# K, and with an activation each half of N, are multiples of this.
LANES = 16


def kernel_launch(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None,
    eps: float,
    residual_TM: torch.Tensor | None,
    activation: str | None,
    norm_offset: float,
) -> torch.Tensor | None:
    """Return a linear with its norm, activation and residual, [T, M], computed by the C++ kernel.

    See small_batch_linear_op.reference. Returns None if the kernel does not support the arguments. activation: None for
    a linear without gate and up.
    """
    num_tokens, k = x_TK.shape
    row_stride, element_stride = x_TK.stride()
    num_rows = weight_NK.shape[0]
    code = 0 if activation is None else ACTIVATIONS.get(activation, -1)
    if (
        x_TK.dtype is not torch.float32
        or weight_NK.dtype is not torch.float32
        or not 0 < num_tokens <= MOST_TOKENS
        or k % LANES
        or element_stride != 1
        or not weight_NK.is_contiguous()
        or (code and (code < 0 or num_rows % (2 * LANES) or residual_TM is not None))
        or (norm_weight_K is not None and norm_weight_K.dtype is not torch.float32)
        or (residual_TM is not None and residual_TM.stride(1) != 1)
    ):
        return None
    kernel = _kernel()
    if kernel is None:
        return None
    out_TM = x_TK.new_empty((num_tokens, num_rows // 2 if code else num_rows))
    kernel(
        x_TK.data_ptr(),
        row_stride,
        weight_NK.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        None if norm_weight_K is None else norm_weight_K.data_ptr(),
        eps,
        norm_offset,
        None if residual_TM is None else residual_TM.data_ptr(),
        0 if residual_TM is None else residual_TM.stride(0),
        code,
        out_TM.data_ptr(),
        num_tokens,
        num_rows,
        k,
        torch.get_num_threads(),
    )
    return out_TM


def linear_in_order(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Return linear(x), [T, N], for any number of tokens; a token's bits depend on no other token.

    With an activation, return activation(gate) * up of the linear's halves, [T, N / 2]. Raises CannotCompile if the
    kernel does not support the arguments.
    """
    if not len(x_TK):
        return x_TK.new_empty((0, weight_NK.shape[0] // (1 if activation is None else 2)))
    parts = []
    for part_TK in x_TK.split(MOST_TOKENS):
        part = kernel_launch(part_TK, weight_NK, bias_N, None, 0.0, None, activation, 0.0)
        if part is None:
            raise CannotCompile("batch_invariant needs the C++ kernel of linears, which does not serve these operands")
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def obstacle(model: ModelConfig, num_ranks: int, num_tokens: int) -> str | None:
    """Return why C++ kernels cannot compute all fused ops for batches of at most `num_tokens`; None if they can."""
    if model.dtype != torch.float32:
        return f"they compute in float32, and dtype is {model.dtype}"
    if model.transformers is not None or model.experts.count:
        return "they serve the textbook's models without experts"
    if model.quantisation is not None:
        return "they take weights in float32, and the model is quantised"
    if num_ranks > 1:
        return f"they serve one rank, and tensor_parallel_size is {num_ranks}"
    if num_tokens > MOST_TOKENS:
        return f"they serve up to {MOST_TOKENS} tokens, not {num_tokens}"
    try:
        _compiled()
    except CannotCompile as error:
        return str(error)
    return None


def _kernel() -> CppFunction | None:
    """Return the C++ function; None if it cannot be compiled."""
    try:
        return _compiled()
    except CannotCompile:
        return None


@cache
def _compiled() -> CppFunction:
    types = [POINTER, INTEGER, *[POINTER] * 3, NUMBER, NUMBER, POINTER, INTEGER, INTEGER, POINTER, *[INTEGER] * 4]
    return CppFunction(SOURCE, "small_batch_linear", types)
