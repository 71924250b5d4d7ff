"""Triton and Gluon kernels compiled for Hopper, on any machine that has Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
HOPPER = GPUTarget("cuda", 90, 32)


def compiled_for_hopper(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    *,
    aligned: Collection[str] | None = None,
    pointers: str = "*bf16",
    **options: Any,
) -> Any:
    """Compile a kernel with programmatic dependent launch.

    types: of arguments that are neither constants nor of the usual type: `pointers` if the name ends in _ptr, else i32.
    aligned: arguments that are multiples of 16, None for those of the type `pointers` and for x_stride.
    """
    kernel = getattr(kernel, "jit_function", kernel)
    names = list(kernel.arg_names)
    known = {**types, **dict.fromkeys(constants, "constexpr")}
    signature = {name: known.get(name, pointers if name.endswith("_ptr") else "i32") for name in names}
    if aligned is None:
        aligned = [name for name, kind in signature.items() if kind == pointers or name == "x_stride"]
    make_source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = make_source(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items() if name in names},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if signature.get(name) != "constexpr"},
    )
    return triton.compile(source, target=HOPPER, options={"launch_pdl": True, "enable_fp_fusion": True, **options})


def stack_bytes(program: Any) -> int:
    """Return the stack of a thread of a compiled kernel: what registers do not hold."""
    return int(re.search(r"STACK:(\d+)", resource_usage(program))[1])  # type: ignore[index]


def registers(program: Any) -> int:
    """Return the registers of a thread of a compiled kernel."""
    return int(re.search(r"REG:(\d+)", resource_usage(program))[1])  # type: ignore[index]


def products_and_groups(program: Any) -> tuple[int, int]:
    """Return (tensor-core instructions, groups of them that are waited for) of a compiled kernel.

    If the assembler runs out of registers for products that overlap, each instruction is a group.
    """
    products = re.findall("HGMMA[^;]*;", _dumped(program, "--dump-sass"))
    return len(products), sum("gsb0" in product for product in products)


def resource_usage(program: Any) -> str:
    return _dumped(program, "--dump-resource-usage")


def _dumped(program: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
