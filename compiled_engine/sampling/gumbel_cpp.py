"""Gumbel-max sampling on the CPU as one C++ loop over the logits; what gumbel.py says holds here too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compiled_engine.kernels.cpp_library import CannotCompile, load_library
from compiled_engine.sampling import gumbel
from compiled_engine.sampling.vocabulary_slice import Best

SOURCE = Path(__file__).with_name("gumbel_cpp.cpp")


def fastest_sample() -> Callable[..., None]:
    """`sample`, or the one of gumbel.py where there is no C++ compiler."""
    try:
        _kernel()
    except CannotCompile:
        return gumbel.sample
    return sample


def sample(
    logits_SV: torch.Tensor,
    row_index_S: torch.Tensor,
    positions_S: torch.Tensor,
    inverse_temperature_N: torch.Tensor,
    seeds_N: torch.Tensor,
    threshold_S: torch.Tensor | None,
    token_ids_S: torch.Tensor,
    best: Best | None = None,
) -> None:
    """See gumbel.sample. The tokens are the same, but for scores that differ by the rounding of a logarithm alone."""
    num_samples, vocab_size = logits_SV.shape
    _kernel()(
        logits_SV.data_ptr(),
        logits_SV.stride(0),
        row_index_S.data_ptr(),
        positions_S.data_ptr(),
        inverse_temperature_N.data_ptr(),
        seeds_N.data_ptr(),
        None if threshold_S is None else threshold_S.data_ptr(),
        token_ids_S.data_ptr(),
        None if best is None else best.scores_S.data_ptr(),
        0 if best is None else best.first_token,
        num_samples,
        vocab_size,
        torch.get_num_threads(),
    )


@cache
def _kernel() -> Any:
    kernel = load_library(SOURCE).sample
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = [pointer, integer, *[pointer] * 7, *[integer] * 4]
    kernel.restype = None
    return kernel
