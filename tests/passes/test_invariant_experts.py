"""Experts of batch-invariant engines: right, and the same bits for a token whatever the number of tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from experts_cases import CODES, Case, arguments_of, encoded, error
from hopper_compilation import compiled_for_hopper
from interpreting_process import interpret
from small_batch_linear_cases import nan_in_new_tensors

from compiled_engine.kernels.element_functions import FUNCTIONS, softmax, sum_in_halves
from compiled_engine.passes.experts import experts_op
from compiled_engine.passes.experts.experts_gate import Gate
from compiled_engine.passes.experts.experts_grouped import grouped_kernel
from compiled_engine.passes.experts.experts_tiles import FEW_TOKENS, SOME_TOKENS, invariant_tiles
from compiled_engine.passes.experts.invariant_experts import why_not

# The arguments of the op that have a row for each token.
OF_TOKENS = (0, 1, 16, 17)
CASES = (
    Case(70, 6, 2),
    Case(70, 8, 3, renormalise=False, residual=True, gemma=True),
    Case(70, 4, 2, gpt_oss=True),
    Case(70, 5, 2, renormalise=False, given=True),
)


def of_rows(arguments: tuple[Any, ...], first: int, count: int) -> tuple[Any, ...]:
    rows = slice(first, first + count)
    return tuple(
        each[rows] if place in OF_TOKENS and each is not None else each for place, each in enumerate(arguments)
    )


def check_bits(run: Any, arguments: tuple[Any, ...], decoded: tuple[Any, ...], counts: tuple[int, ...]) -> None:
    """Assert that tokens have the same bits in steps of these numbers of tokens."""
    with nan_in_new_tensors():
        whole = run(*arguments, invariant=True)
    assert error(whole, decoded) < (1e-5 if whole.dtype == torch.float32 else 2e-2)
    draw = random.Random(len(whole))
    for count in counts:
        first = draw.randint(0, len(whole) - count)
        found = run(*of_rows(arguments, first, count), invariant=True)
        assert torch.equal(found, whole[first : first + count]), count


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_has_the_same_bits_in_every_step(case: Case) -> None:
    arguments = arguments_of(case, torch.float32)
    check_bits(experts_op.experts, arguments, arguments, (1, 2, 7, 33, 65))


def check_interpreted() -> None:
    for case, text in ((Case(20, 4, 2, gpt_oss=True), ""), (Case(20, 3, 2, given=True), "e4m3 32x32")):
        arguments = arguments_of(case, torch.float32)
        coded, decoded = encoded(arguments, text) if text else (arguments, arguments)
        check_bits(experts_op.launch, coded, decoded, (1, 3))
    print("right")


def test_kernels_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", "from test_invariant_experts import check_interpreted; check_interpreted()")
    assert run.stdout == "right\n", run.stderr[-2000:]


@pytest.mark.parametrize("name", [*FUNCTIONS, "softmax", "sum"])
def test_functions_have_the_same_bits_wherever_an_element_is(name: str) -> None:
    x = torch.randn(4000, 13, generator=torch.Generator().manual_seed(0)) * 8
    x = x.abs() if name == "rsqrt" else x
    of_rows = {"softmax": softmax, "sum": lambda x: sum_in_halves(x, -1)}
    function = FUNCTIONS[name] if name in FUNCTIONS else of_rows[name]
    right = {"softplus": torch.nn.functional.softplus, "silu": torch.nn.functional.silu}
    right |= {"softmax": lambda x: x.softmax(-1), "sum": lambda x: x.sum(-1)}
    whole = function(x)
    torch.testing.assert_close(whole, right.get(name, getattr(torch, name, None))(x), rtol=1e-5, atol=1e-5)
    for first, count in ((first, 1 + first % 67) for first in range(0, 3900, 61)):
        assert torch.equal(function(x[first : first + count]), whole[first : first + count])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed": True}, "codes of less than 8 bits"),
        ({"coded": True}, "decoded by the library on a CPU"),
        ({"gate": Gate("gelu")}, "the library's gelu"),
        ({"gate": Gate("gelu_tanh", interleaved=True)}, "rows of gate and up alternate"),
        ({"down_EDI": torch.zeros(2, 32, 24)}, r"columns in multiples of 16, not torch.float32, \(32, 24\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_no_kernel_adds_in_one_order_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"gate_up_END": torch.zeros(2, 64, 32), "down_EDI": torch.zeros(2, 32, 32), "gate": Gate()}
    options = {"device_type": "cpu", "packed": False, "coded": False}
    assert why_not(**given, **options) is None
    with pytest.raises(ValueError, match=message):
        raise ValueError(why_not(**given | options | changes))


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("num_tokens", [1, FEW_TOKENS + 1, SOME_TOKENS + 1])
@pytest.mark.parametrize("codes", [None, "fp8e4nv"])
def test_products_compiled_for_hopper_have_one_instruction(num_tokens: int, codes: str | None) -> None:
    """Tiles differ in the columns of an instruction, and in what is on its left."""
    tiles = invariant_tiles(num_tokens, torch.bfloat16, 8 / 128, 2048, 768, coded=codes is not None, hopper=True)
    rows_first = tiles.rows_first or tiles.tokens < 64
    constants: dict[str, Any] = {"K": 2048, "NUM_ROWS": 1536, "TOP_K": 8, "GATED": True, "TOKENS": tiles.tokens}
    constants |= {"ACTIVATION": "silu", "ALPHA": 0.0, "LIMIT": 0.0, "INTERLEAVED": False, "ROWS": tiles.rows}
    constants |= {"BLOCK_K": tiles.block_k, "NUM_STAGES": tiles.num_stages, "ROWS_FIRST": rows_first, "IN_WORDS": False}
    constants |= {"PACKED": "", "SCALES": "", "ZERO": 0, "UNIT": 0, "DEPENDENT_LAUNCH": True, "row_scales_ptr": None}
    constants |= {"TILE_ROWS": 128 if codes else 1, "TILE_COLUMNS": 128 if codes else 0, "zeros_ptr": None}
    constants |= {} if codes else {"scales_ptr": None}
    types = {"weights_ptr": "*fp32", "scales_ptr": "*fp32", "sorted_ptr": "*i32", "blocks_ptr": "*i32"}
    types |= {"w_ptr": f"*{codes}"} if codes else {}
    aligned = [name for name in grouped_kernel.arg_names if name.endswith("_ptr") or name == "x_stride"]
    options = {"num_warps": tiles.num_warps, "enable_fp_fusion": False}
    program = compiled_for_hopper(grouped_kernel, constants, types, aligned=aligned, **options)
    assert program.metadata.shared <= 227 << 10
    assert f"wgmma.mma_async.sync.aligned.m64n{tiles.tokens if rows_first else tiles.rows}k16" in program.asm["ptx"]
    assert "mma.sync" not in program.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("text", ["", *CODES])
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_on_a_gpu(text: str, dtype: torch.dtype, gpt_oss: bool) -> None:
    """Sizes of Qwen3-30B-A3B; tokens around the counts at which tiles change."""
    arguments = arguments_of(Case(3000, 32, 4, 2048, 768, gpt_oss=gpt_oss), dtype, "cuda")
    coded, decoded = encoded(arguments, text) if text else (arguments, arguments)
    counts = (1, 2, 3, 7, FEW_TOKENS, FEW_TOKENS + 1, 500, SOME_TOKENS, SOME_TOKENS + 1, 2500)
    check_bits(experts_op.experts, coded, decoded, counts)
