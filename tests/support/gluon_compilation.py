"""Gluon kernels compiled for Hopper, on any machine that has Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled_for_hopper(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    not_aligned: Collection[str] = (),
    **options: Any,
) -> Any:
    """Compile a kernel with programmatic dependent launch. types: those of arguments that are neither constants nor
    pointers to bfloat16, which are multiples of 16 bytes but for `not_aligned`. x_stride is a multiple of 16 too."""
    kernel = getattr(kernel, "jit_function", kernel)
    known = {**types, **dict.fromkeys(constants, "constexpr")}
    signature = {name: known.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    aligned = [name for name, kind in signature.items() if kind == "*bf16" or name == "x_stride"]
    source = GluonASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in not_aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True, **options})


def stack_bytes(program: Any) -> int:
    """The stack of a thread of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index]
