"""Attention in both directions without a cache, by every backend that has it, against its definition in float64."""

from __future__ import annotations

import json

import pytest
import torch
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from packed_cases import CASES, PackedCase, mistake

from compiled_engine.attention.backend import choose_backend, get_backend
from compiled_engine.attention.case import GraphSupport, Refused
from compiled_engine.attention.inputs import attention_inputs_of, step_of
from compiled_engine.attention.op import packed_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_torch_on_a_cpu(dtype: torch.dtype) -> None:
    found = {case.name: mistake("torch", case, "cpu", dtype) for case in CASES}
    assert found == dict.fromkeys(found)


@loops_to_a_loaded_bound
def test_the_triton_kernel_in_the_interpreter() -> None:
    ran = interpret(__file__, "-c", "import interpreter, packed_cases; packed_cases.main('triton')")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout) == {}


# Kernels of 16 bits have the same tiles: a case runs in one of the two types at least, which the seed chooses.
ON_A_GPU = [
    torch.float32,
    *(pytest.param(dtype, marks=pytest.mark.product(one_in=8, each=("backend", "case"))) for dtype in DTYPES[1:]),
]


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("backend", "case"))
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("dtype", ON_A_GPU, ids=str)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_on_a_gpu(backend: str, case: PackedCase, dtype: torch.dtype) -> None:
    get_backend(backend).accept(case.asked("cuda", dtype))
    assert mistake(backend, case, "cuda", dtype) is None


def test_backends_without_such_a_kernel_refuse() -> None:
    asked = PackedCase("", (1,)).asked("cpu", torch.float32)
    with pytest.raises(Refused, match="causal is False; allowed: True"):
        get_backend("cpp").accept(asked)
    chosen = choose_backend("auto", "auto", [asked])
    assert chosen.backend == "torch"
    assert chosen.support.graphs is GraphSupport.NEVER
    assert chosen.cases == (asked,)


def test_the_op_gives_each_text_its_own_attention() -> None:
    """Another text beside it changes nothing."""
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 12, 2, 16)
    values = []
    for lens in ((5, 7), (5, 4, 3)):
        step = step_of([0] * 12, [range(length) for length in lens], [[0]] * len(lens), 16, torch.device("cpu"))
        values.append(packed_attention(q, k, v, attention_inputs_of(step, "torch"), 0.25))
    assert torch.equal(values[0][:5], values[1][:5])
    assert not torch.allclose(values[0][5:], values[1][5:])
