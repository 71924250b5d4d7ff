"""Which attention backend and block size a model gets."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_engine.attention.backend import AttentionCase
from compiled_engine.attention.registry import default_backend, get_backend, resolve_backend

ON_CPU = AttentionCase("cpu", torch.float32, 4, 2, 64, 0, None)


def test_backends_are_imported_when_asked_for() -> None:
    code = (
        "import sys, compiled_engine.attention.op, compiled_engine.attention.registry as r; r.get_backend('torch'); "
        "assert not {'triton', 'flash_attn', 'flash_attn_interface'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["torch", "cpp", "triton"])
def test_a_backend_knows_its_name_and_is_made_once(name: str) -> None:
    assert get_backend(name).name == name
    assert get_backend(name) is get_backend(name)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'fa4'; known backends: torch, cpp, triton, flash_attn"):
        get_backend("fa4")
    with pytest.raises(ValueError, match="'fa4'; allowed: auto, torch, cpp, triton, flash_attn"):
        resolve_backend("fa4", "auto", [ON_CPU])


def test_a_missing_package_is_named() -> None:
    code = (
        "import sys; sys.modules.update(flash_attn=None, flash_attn_interface=None); "
        "from compiled_engine.attention.registry import get_backend; get_backend('flash_attn')"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: attention_backend 'flash_attn' needs the package flash-attn" in process.stderr


def test_defaults() -> None:
    assert default_backend("cpu")[0] == "cpp"
    assert default_backend("cuda")[0] == "triton"


def test_auto_gives_reasons() -> None:
    assert resolve_backend("auto", "auto", [ON_CPU]) == (
        "cpp",
        16,
        {
            "attention_backend": "cpu: the engine's own kernel, which needs a C++ compiler",
            "cache.block_size": "the default of attention backend cpp",
        },
    )
    assert resolve_backend("torch", 20, [ON_CPU]) == ("torch", 20, {})


def test_auto_falls_back_to_torch_with_the_obstacle() -> None:
    on_cuda = replace(ON_CPU, device_type="cuda")
    name, block_size, reasons = resolve_backend("auto", "auto", [on_cuda, replace(on_cuda, head_dim=512)])
    assert (name, block_size) == ("torch", 16)
    assert reasons["attention_backend"] == (
        "triton cannot run this model: head_dim is 512; allowed: multiples of 8 from 16 to 256"
    )
    name, block_size, reasons = resolve_backend("auto", 20, [on_cuda])
    assert (name, block_size) == ("torch", 20)
    assert reasons == {"attention_backend": "triton cannot run this model: block_size is 20; allowed: multiples of 16"}
    assert resolve_backend("auto", "auto", [on_cuda])[0] == "triton"


def test_without_a_compiler_a_cpu_gets_torch(tmp_path: Path) -> None:
    code = (
        "import torch; from compiled_engine.attention.backend import AttentionCase; "
        "from compiled_engine.attention.registry import resolve_backend; "
        "print(resolve_backend('auto', 'auto', [AttentionCase('cpu', torch.float32, 4, 2, 64, 0, None)]))"
    )
    for compiler, obstacle in (("/no/such", "no C++ compiler (/no/such) was found"), ("false", "cannot compile")):
        environment = {**os.environ, "CXX": compiler, "COMPILED_ENGINE_CACHE_DIR": str(tmp_path)}
        process = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert process.stdout.startswith("('torch', 16, ")
        assert "cpp cannot run this model: " in process.stdout
        assert obstacle in process.stdout


def test_what_a_requested_backend_cannot_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="'triton' cannot run this model here: device is cpu; allowed: cuda"):
        resolve_backend("triton", "auto", [ON_CPU])
    with pytest.raises(ValueError, match="'flash_attn' cannot run this model here: "):
        resolve_backend("flash_attn", "auto", [ON_CPU])
    with pytest.raises(ValueError, match="num_heads is 5; allowed: multiples of num_kv_heads 2"):
        resolve_backend("auto", "auto", [replace(ON_CPU, num_heads=5)])


@pytest.mark.parametrize("block_size", [0, -16, 16.0, "16", "AUTO"])
def test_block_sizes_that_are_none(block_size: object) -> None:
    with pytest.raises(ValueError, match=r"block_size is .*; allowed: 1 to 65536, or 'auto'"):
        resolve_backend("auto", block_size, [ON_CPU])  # type: ignore[arg-type]
