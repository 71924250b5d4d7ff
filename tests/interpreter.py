"""What Triton's interpreter cannot do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import triton


def release(version: str) -> tuple[int, ...]:
    """3.6.0 -> (3, 6)"""
    return tuple(map(int, version.split(".")[:2]))


loops_to_a_loaded_bound = pytest.mark.skipif(
    release(triton.__version__) < (3, 9) and release(np.__version__) >= (2, 5),
    reason="the interpreter of Triton 3.6 cannot loop to a bound that was loaded with numpy 2.5",
)

# Of a process that runs kernels without a GPU, with the modules of these tests.
IN_THE_INTERPRETER = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
