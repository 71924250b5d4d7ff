"""The op of experts: its reference, its kernels in the interpreter and compiled for Hopper, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts_cases import CASES, CODES, RANDOM, Case, arguments_of, encoded, error
from hopper_compilation import compiled_for_hopper
from interpreting_process import interpret
from small_batch_linear_cases import nan_in_new_tensors

from compiled_engine.passes.experts import experts_by_token, experts_grouped, experts_op, experts_routing
from compiled_engine.passes.experts.experts_tiles import GroupedTiles, grouped_tiles, packed_tiles, words_tiles

INTERPRETED = """
import interpreter
import torch
from compiled_engine.passes.experts import experts_op
from compiled_engine.passes.experts.experts_decoded import decoded_weight
from compiled_engine.passes.framework.rounding import unit_of
from compiled_engine.quantisation import Rounding
from experts_cases import CASES, CODES, RANDOM, Case, arguments_of, encoded, error
from small_batch_linear_cases import nan_in_new_tensors

torch.set_num_threads(1)
small = [case for case in CASES if case.num_experts < 10 and case.num_tokens < 10]
# Every other rounding: each meets one token and several, sizes that end inside of tiles, and experts that are given.
roundings = {case: (*CODES, *RANDOM)[(place + place // 4) % 2 :: 2] for place, case in enumerate(small)}
for case in CASES:
    arguments = arguments_of(case, torch.float32)
    # Those that are quick a second time, on counts that the first has left.
    for _ in range(2 if case.num_tokens < 10 else 1):
        with nan_in_new_tensors():
            out = experts_op.launch(*arguments)
        assert error(out, arguments) < 1e-5, f"{case} is off by {error(out, arguments)}"
    for text in roundings.get(case, ()):
        coded, decoded = encoded(arguments, text)
        with nan_in_new_tensors():
            out = experts_op.launch(*coded)
        assert error(out, decoded) < 1e-5, f"{case} with {text} is off by {error(out, decoded)}"
# The products of many tokens, in which rows of codes come first.
for text in ("int4 1x32", "uint4 1x32", "int4 1x*", "uint8 1x32"):
    coded, decoded = encoded(arguments_of(Case(70, 4, 2, gpt_oss=True), torch.float16), text)
    with nan_in_new_tensors():
        out = experts_op.launch(*coded)
    assert error(out, decoded) < 1e-2, f"{text} is off by {error(out, decoded)}"
# Codes of e2m1 that are decoded in whole words, with blocks of columns that end inside, and inside of 16 bytes.
for case, text in (
    (Case(6, 3, 2, hidden_size=160, width=96, norm=True, gpt_oss=True), "mxfp4 1x32"),
    (Case(5, 2, 1, hidden_size=128, width=160, renormalise=False, given=True), "mxfp4 1x32"),
    (Case(6, 3, 2, hidden_size=144, width=80, norm=True, gpt_oss=True), "nvfp4 1x16"),
    (Case(5, 2, 1, hidden_size=128, width=176, renormalise=False, given=True), "nvfp4 1x16"),
    (Case(3, 2, 1, hidden_size=144, width=80), "nvfp4 1x16"),
):
    coded, decoded = encoded(arguments_of(case, torch.float32), text)
    with nan_in_new_tensors():
        out = experts_op.launch(*coded)
    assert error(out, decoded) < 1e-5, f"{case} in words is off by {error(out, decoded)}"
# Weights that are decoded before the product, by which scales of rows are not multiplied.
for text, hidden_size in (("mxfp4 1x32", 160), ("mxfp4 1x8", 72), ("nvfp4 1x16", 160), ("nvfp4 1x8", 72)):
    coded, decoded = encoded(arguments_of(Case(1, 3, 2, hidden_size=hidden_size), torch.float32), text)
    for place in (2, 3):
        rounding, scales, of_rows = Rounding.parse(text), coded[place - 10], coded[place - 4]
        unit, kind = unit_of(rounding, decoded[place].shape[2]), "e8m0" if of_rows is None else "e4m3"
        with nan_in_new_tensors():
            out = decoded_weight(coded[place], scales.view(torch.uint8), rounding.columns, unit, torch.float32, kind)
        out *= 1 if of_rows is None else of_rows
        assert torch.equal(out, decoded[place]), f"decoded {text} is wrong"
# The product of a weight that was decoded before.
experts_op.decodes_first = lambda num_tokens, share: True
coded, decoded = encoded(arguments_of(Case(6, 3, 2, hidden_size=144, width=80), torch.float32), "nvfp4 1x16")
with nan_in_new_tensors():
    out = experts_op.launch(*coded)
assert error(out, decoded) < 1e-5, f"products of decoded weights are off by {error(out, decoded)}"
print("right")
"""


@pytest.mark.product(one_in=1000, each=("case",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference(case: Case, dtype: torch.dtype) -> None:
    arguments = arguments_of(case, dtype)
    assert error(experts_op.experts(*arguments), arguments) < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.product(one_in=1000, each=("case",))
@pytest.mark.parametrize("text", [*CODES, *RANDOM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.num_experts < 10], ids=str)
def test_the_reference_with_codes(case: Case, dtype: torch.dtype, text: str) -> None:
    coded, decoded = encoded(arguments_of(case, dtype), text)
    assert error(experts_op.experts(*coded), decoded) < (1e-5 if dtype == torch.float32 else 3e-2)


def test_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", INTERPRETED)
    assert run.stdout.strip() == "right", run.stderr[-2000:]


def compiled(
    kernel: Any, constants: dict[str, Any], num_warps: int, tiles: tuple[int, int] | None = None, codes: str = "fp8e4nv"
) -> Any:
    """tiles: rows and columns of the weight's codes that share a scale; None for values. codes: Triton's type."""
    constants = {
        "PACKED": "",
        "SCALES": "",
        "ZERO": 0,
        "UNIT": 0,
        "IN_WORDS": False,
        "ROWS_FIRST": constants.get("TOKENS", 0) < 64,
        "zeros_ptr": None,
        "row_scales_ptr": None,
        "DEPENDENT_LAUNCH": True,
    } | constants
    types = {"eps": "fp32", "weights_ptr": "*fp32", "given_ptr": "*i64", "scales_ptr": "*fp32"}
    if tiles is None:
        constants = {"scales_ptr": None, "TILE_ROWS": 1, "TILE_COLUMNS": 0} | constants
    else:
        constants |= dict(zip(("TILE_ROWS", "TILE_COLUMNS"), tiles, strict=True))
        types |= dict.fromkeys(("w_ptr", "gate_up_ptr", "down_ptr"), f"*{codes}")
        if codes == "u8":  # with zero points
            types["zeros_ptr"] = "*u8"
            del constants["zeros_ptr"]
    types |= dict.fromkeys(("chosen_ptr", "rank_ptr", "counts_ptr", "sorted_ptr", "blocks_ptr"), "*i32")
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name == "x_stride"]
    return compiled_for_hopper(kernel, constants, types, aligned=aligned, num_warps=num_warps)


GATE: dict[str, Any] = {"ACTIVATION": "silu", "ALPHA": 1.702, "LIMIT": 7.0, "INTERLEAVED": True}
# Of Qwen3-30B-A3B.
ROUTE: dict[str, Any] = {"NUM_EXPERTS": 128, "BLOCK_E": 128, "TOP_K": 8}


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("num_tokens", [8, 65, 256, 512, 8192])
def test_grouped_products_compiled_for_hopper(num_tokens: int, gated: bool) -> None:
    tiles = grouped_tiles(num_tokens, torch.bfloat16, 1 / 16, large=True)
    constants = {"K": 2048, "NUM_ROWS": 1536} if gated else {"K": 768, "NUM_ROWS": 2048}
    constants |= GATE | {"TOP_K": 8, "GATED": gated, "TOKENS": tiles.tokens, "ROWS": tiles.rows}
    program = compiled(
        experts_grouped.grouped_kernel,
        constants | {"BLOCK_K": tiles.block_k, "NUM_STAGES": tiles.num_stages},
        tiles.num_warps,
    )
    assert program.metadata.shared <= 227 << 10
    assert "wgmma" in program.asm["ptx"]
    assert "cp.async" in program.asm["ptx"]


@pytest.mark.product(one_in=1000, each=("codes",))
@pytest.mark.parametrize(
    ("num_tokens", "tiles", "codes"),
    [
        (8, (1, 0), "i8"),
        (8192, (1, 128), "i8"),
        (8192, (1, 128), "u8"),
        *((tokens, tiles, "fp8e4nv") for tokens in (8, 8192) for tiles in ((1, 0), (128, 128))),
    ],
)
def test_products_of_codes_compiled_for_hopper(num_tokens: int, tiles: tuple[int, int], codes: str) -> None:
    grouped = grouped_tiles(num_tokens, torch.bfloat16, 1 / 16, coded=True)
    constants = {"K": 2048, "NUM_ROWS": 1536, "TOP_K": 8, "GATED": True, "TOKENS": grouped.tokens, "ROWS": grouped.rows}
    constants |= GATE | {"BLOCK_K": grouped.block_k, "NUM_STAGES": grouped.num_stages}
    program = compiled(experts_grouped.grouped_kernel, constants, grouped.num_warps, tiles, codes)
    assert program.metadata.shared <= 227 << 10
    assert "wgmma" in program.asm["ptx"]
    one = GATE | {"TOP_K": 8, "K": 2048, "WIDTH": 768, "NORM": True, "OFFSET": 0.0, "ROWS": 4, "BLOCK_K": 1024}
    compiled(experts_by_token.by_token_gate_up_kernel, one, 8, tiles, codes)
    one = {"HIDDEN_SIZE": 2048, "WIDTH": 768, "TOP_K": 8, "ROWS": 2, "BLOCK_K": 512}
    compiled(experts_by_token.by_token_down_kernel, one, 2, tiles, codes)


def test_the_other_kernels_compiled_for_hopper() -> None:
    shape = GATE | {"TOP_K": 8, "K": 2048, "WIDTH": 768, "NORM": True, "OFFSET": 0.0, "ROWS": 4, "BLOCK_K": 2048}
    for kernel, constants, num_warps in (
        (experts_routing.route_kernel, ROUTE | {"BLOCK_X": 8, "RENORMALISE": True, "given_ptr": None}, 1),
        (experts_routing.route_kernel, ROUTE | {"BLOCK_X": 8, "RENORMALISE": False}, 1),
        (experts_routing.place_kernel, {"NUM_EXPERTS": 128, "BLOCK_E": 128, "TOKENS": 16, "PLACED": 128}, 4),
        (experts_by_token.by_token_route_kernel, ROUTE | {"RENORMALISE": True}, 1),
        (experts_by_token.by_token_gate_up_kernel, shape, 8),
        (
            experts_by_token.by_token_down_kernel,
            {"HIDDEN_SIZE": 2048, "WIDTH": 768, "TOP_K": 8, "ROWS": 4, "BLOCK_K": 1024},
            4,
        ),
        (experts_grouped.combine_kernel, ROUTE | {"HIDDEN_SIZE": 2048, "BLOCK_D": 1024}, 4),
    ):
        assert "griddepcontrol.wait" in compiled(kernel, constants, num_warps).asm["ptx"]


ON_A_GPU = (
    *CASES,
    Case(8, 128, 8, 2048, 768, norm=True, residual=True),
    Case(4, 256, 8, 2048, 512, norm=True, residual=True),
    Case(256, 256, 8, 2048, 512, norm=True),
    Case(700, 128, 8, 512, 256),
    Case(3000, 16, 4),
    Case(1, 32, 4, 2880, 2880, norm=True, residual=True, gpt_oss=True),
    Case(3, 32, 4, 2880, 2880, norm=True, gpt_oss=True),
    Case(8, 32, 4, 2880, 2880, gpt_oss=True),
    Case(64, 32, 4, 2880, 2880, norm=True, residual=True, gpt_oss=True),
    Case(700, 128, 8, 512, 256, renormalise=False, residual=True, given=True),
)


@pytest.mark.gpu
@pytest.mark.product(one_in=8, each=("case",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    """Right, and the same whenever it is repeated, captured or not."""
    arguments = arguments_of(case, dtype, "cuda")
    with nan_in_new_tensors():
        first = experts_op.experts(*arguments)
    assert error(first, arguments) < (1e-5 if dtype == torch.float32 else 2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = experts_op.experts(*arguments)
    for _ in range(3):
        again.fill_(float("nan"))
        graph.replay()
        assert torch.equal(again, first)


@pytest.mark.gpu
@pytest.mark.product(one_in=12, each=("case",))
@pytest.mark.parametrize("text", [*CODES, *RANDOM])
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_codes_on_a_gpu(case: Case, text: str) -> None:
    assert_codes_are_right_on_a_gpu(case, text)


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["mxfp4 1x32", "nvfp4 1x16", "uint4 1x32"])
@pytest.mark.parametrize(
    "case", [Case(64, 4, 2), Case(150, 3, 1), Case(700, 128, 8, 512, 256), Case(3000, 16, 4)], ids=str
)
def test_wide_blocks_decode_each_row_by_its_own_scale_and_zero_point(case: Case, text: str) -> None:
    """In these a thread decodes bytes of two rows at once. Without a residual, which would hide a wrong scale."""
    assert_codes_are_right_on_a_gpu(case, text)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 64, 700, 3000])
def test_every_kernel_of_nvfp4_on_a_gpu(num_tokens: int) -> None:
    """With and without tensor cores, in blocks of all sizes, and decoded before the product."""
    assert_codes_are_right_on_a_gpu(Case(num_tokens, 32, 4, 2880, 2880, norm=True, gpt_oss=True), "nvfp4 1x16")


def assert_codes_are_right_on_a_gpu(case: Case, text: str) -> None:
    coded, decoded = encoded(arguments_of(case, torch.bfloat16, "cuda"), text)
    with nan_in_new_tensors():
        first = experts_op.experts(*coded)
    assert error(first, decoded) < 2e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = experts_op.experts(*coded)
    again.fill_(float("nan"))
    graph.replay()
    assert torch.equal(again, first)


def test_tiles_are_within_what_a_multiprocessor_has() -> None:
    for num_tokens in (1, 2, 64, 65, 1024, 1025, 8192):
        tiles: GroupedTiles
        for tiles in (
            *(
                grouped_tiles(num_tokens, torch.bfloat16, share, coded=coded, large=True)
                for share in (1 / 32, 1 / 4)
                for coded in (False, True)
            ),
            *(packed_tiles(num_tokens, torch.bfloat16, share, True) for share in (1 / 16, 1 / 8, 1)),
            *(words_tiles(num_tokens, torch.bfloat16, share) for share in (1 / 16, 1 / 8, 1)),
        ):
            assert tiles.num_stages * (tiles.tokens + tiles.rows) * tiles.block_k * 2 <= 227 << 10
