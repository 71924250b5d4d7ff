"""The digest of a kernel, which names its binary on disk, does not depend on what a process digested before."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

triton = pytest.importorskip("triton")
from triton.runtime.jit import JITCallable  # noqa: E402

from compiled_engine.attention.backends import (  # noqa: E402, F401 - modules with kernels
    coded_decode,
    decoded_contexts,
    hopper_prefill,
    short_decode,
    short_drafts,
    triton_decode,
    triton_listed_decode,
    triton_packed,
    triton_prefill,
    triton_rope_decode,
    triton_write_kv,
)
from compiled_engine.kernels.kernel_digest import digest_helpers_first  # noqa: E402
from compiled_engine.passes import registry  # noqa: E402, F401
from compiled_engine.passes.linear import small_batch_linear_registers  # noqa: E402, F401
from compiled_engine.sampling import filters_triton, gumbel_triton, logprobs_triton  # noqa: E402, F401

if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, and have no digests", allow_module_level=True)


def functions() -> dict[str, Any]:
    """Return the engine's imported JIT functions, by module and name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("compiled_engine."):
            for value in vars(module).values():
                function = getattr(value, "jit_function", value)
                if isinstance(function, JITCallable):
                    found[f"{function.__module__}.{function.__name__}"] = function
    return found


def digests(order: list[Any]) -> list[str]:
    for function in order:
        function.hash, function.used_global_vals = None, {}
    for function in order:
        digest_helpers_first(function)
    return sorted(function.cache_key for function in order)


def test_a_kernel_has_one_digest_in_whichever_order_kernels_are_digested() -> None:
    order = list(functions().values())
    assert len(order) > 100
    first = digests(order)
    for seed in range(3):
        random.Random(seed).shuffle(order)
        assert digests(order) == first
    assert digests(order[::-1]) == first
