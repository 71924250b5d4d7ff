"""Kernels of experts in four bits: their instructions carried out one by one, and as compiled for Hopper."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hopper_compilation import compiled_for_hopper, stack_bytes
from test_experts_op import GATE

from compiled_engine.passes.experts import experts_decoded, experts_e2m1, experts_grouped
from compiled_engine.passes.experts.experts import Experts
from compiled_engine.passes.experts.experts_packed import EXPONENTS, LESS_128, OF_E2M1, OF_INTEGERS, POWER
from compiled_engine.passes.experts.experts_tiles import decodes_first, packed_tiles, words_tiles
from compiled_engine.passes.linear.experts_codes import constants_of
from compiled_engine.quantisation import ELEMENTS


@pytest.mark.product(one_in=1000, each=("num_tokens",))
@pytest.mark.parametrize("text", ["mxfp4 1x32", "mxfp4 1x16", "nvfp4 1x16", "nvfp4 1x8", "int4 1x128", "uint4 1x32"])
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 512, 1024, 8192])
def test_products_of_packed_codes_compiled_for_hopper(num_tokens: int, text: str) -> None:
    """Nothing is on a stack, codes are read ahead, and none is converted."""
    constants = constants_of(text, 2880) | GATE | {"IN_WORDS": False, "ROWS_FIRST": True, "DEPENDENT_LAUNCH": True}
    is_e2m1 = constants["PACKED"] == "e2m1"
    kinds = {"scales_ptr": "*u8" if is_e2m1 else "*fp32", "weights_ptr": "*fp32", "row_scales_ptr": "*fp32"}
    kinds |= dict.fromkeys(("w_ptr", "zeros_ptr"), "*u8")
    kinds |= dict.fromkeys(("sorted_ptr", "blocks_ptr"), "*i32")
    constants |= {} if text.startswith("u") else {"zeros_ptr": None}
    constants |= {} if text.startswith("nv") else {"row_scales_ptr": None}
    tiles = packed_tiles(num_tokens, torch.bfloat16, 1 / 8, is_e2m1)
    sizes: dict[str, Any] = {"K": 2880, "NUM_ROWS": 5760, "TOP_K": 4, "GATED": True, "NUM_STAGES": tiles.num_stages}
    step = tiles.block_k if is_e2m1 else min(tiles.block_k, constants["TILE_COLUMNS"])
    sizes |= {"TOKENS": tiles.tokens, "ROWS": tiles.rows, "BLOCK_K": step}
    kernel = experts_grouped.grouped_kernel
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name == "x_stride"]
    program = compiled_for_hopper(kernel, constants | sizes, kinds, aligned=aligned, num_warps=tiles.num_warps)
    ptx = program.asm["ptx"]
    assert program.metadata.shared <= 227 << 10
    assert stack_bytes(program) == 0
    assert "fma.rn.bf16x2" in ptx
    assert "cvt.rn.bf16.u" not in ptx
    assert "cp.async.c" in ptx
    assert ("wgmma" if num_tokens > 80 else "mma.sync") in ptx


@pytest.mark.product(one_in=1000, each=("num_tokens",))
@pytest.mark.parametrize("text", ["mxfp4 1x32", "nvfp4 1x16"])
@pytest.mark.parametrize("num_tokens", [8, 64, 512])
def test_products_of_words_compiled_for_hopper(num_tokens: int, text: str) -> None:
    """Nothing is on a stack, codes are read ahead, and decoded values go to the tensor cores from registers."""
    tiles = words_tiles(num_tokens, torch.bfloat16, 1 / 8)
    constants = constants_of(text, 2880) | GATE | {"IN_WORDS": True, "ROWS_FIRST": True, "DEPENDENT_LAUNCH": True}
    constants |= {} if text.startswith("nv") else {"row_scales_ptr": None}
    constants |= {"K": 2880, "NUM_ROWS": 5760, "TOP_K": 4, "GATED": True, "zeros_ptr": None}
    constants |= {"TOKENS": tiles.tokens, "ROWS": tiles.rows, "BLOCK_K": tiles.block_k, "NUM_STAGES": tiles.num_stages}
    kinds = {"scales_ptr": "*u8", "w_ptr": "*u8", "weights_ptr": "*fp32", "sorted_ptr": "*i32", "blocks_ptr": "*i32"}
    kinds |= {"row_scales_ptr": "*fp32"}
    kernel = experts_grouped.grouped_kernel
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name == "x_stride"]
    program = compiled_for_hopper(kernel, constants, kinds, aligned=aligned, num_warps=tiles.num_warps)
    assert stack_bytes(program) == 0
    assert "cp.async.c" in program.asm["ptx"]
    # Between the load of codes and the product threads exchange neither words nor the operand, only scales.
    loop = program.asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
    exchanged = [line for line in loop.splitlines() if "ttg.convert_layout" in line]
    assert exchanged
    assert not [line for line in exchanged if re.search("xi32|x128xbf16", line)]


@pytest.mark.parametrize("text", ["mxfp4 1x32", "nvfp4 1x16"])
def test_products_without_tensor_cores_compiled_for_hopper(text: str) -> None:
    """A thread reads 16 bytes of codes at once, and nothing is on a stack."""
    of_codes = {name: value for name, value in constants_of(text, 1024).items() if name in ("TILE_COLUMNS", "SCALES")}
    sizes = of_codes | {"ROWS": 4, "BLOCK_W": 128, "DEPENDENT_LAUNCH": True, "TOP_K": 4}
    sizes |= {} if text.startswith("nv") else {"row_scales_ptr": None}
    kinds = {"row_scales_ptr": "*fp32"}
    kinds |= dict.fromkeys(("inputs_ptr", "hidden_ptr", "weights_ptr"), "*fp32") | {"chosen_ptr": "*i32"}
    kinds |= dict.fromkeys(("gate_up_ptr", "down_ptr", "scales_ptr"), "*u8")
    for kernel, constants in (
        (experts_e2m1.gate_up_words_kernel, GATE | {"K": 1024, "WIDTH": 2880, "UNIT": of_codes["TILE_COLUMNS"]}),
        (experts_e2m1.down_words_kernel, {"HIDDEN_SIZE": 2880, "WIDTH": 1024, "BLOCK_X": 4}),
    ):
        num_warps = experts_e2m1.word_tiles(1024, constants.get("BLOCK_X", 1)).num_warps
        aligned = [name for name in kernel.arg_names if name.endswith("_ptr")]
        program = compiled_for_hopper(kernel, constants | sizes, kinds, aligned=aligned, num_warps=num_warps)
        assert stack_bytes(program) == 0
        assert re.search(r"ld\.global\.L1::evict_first\S*\.v4\.b32", program.asm["ptx"])


@pytest.mark.parametrize("text", ["mxfp4 1x32", "nvfp4 1x16"])
def test_decoding_before_the_product_compiled_for_hopper(text: str) -> None:
    """A thread reads and writes 16 bytes at once, and nothing is on a stack."""
    constants = {"K": 2880, "DEPENDENT_LAUNCH": True}
    constants |= {name: constants_of(text, 2880)[name] for name in ("TILE_COLUMNS", "UNIT", "SCALES")}
    constants |= {"ROWS": experts_decoded.ROWS, "BYTES": experts_decoded.BYTES}
    kinds = {"codes_ptr": "*u8", "scales_ptr": "*u8"}
    aligned = ["codes_ptr", "scales_ptr", "out_ptr"]
    program = compiled_for_hopper(experts_decoded.decode_kernel, constants, kinds, aligned=aligned)
    assert stack_bytes(program) == 0
    for access in (r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"):
        assert re.search(access, program.asm["ptx"])


def test_weights_are_decoded_before_products_of_many_tokens_per_expert() -> None:
    assert not decodes_first(2048, 1)
    assert decodes_first(2049, 1 / 8)
    assert not decodes_first(8192, 1 / 16)


@pytest.mark.parametrize("share", [1 / 16, 1 / 8, 1 / 4, 1])
def test_tiles_change_where_kernels_are_compiled(share: float) -> None:
    """Blocks grow with an expert's tokens, and only after the token counts at which an engine runs before it serves."""
    for by_exponents in (False, True):
        tiles = [packed_tiles(num_tokens, torch.bfloat16, share, by_exponents) for num_tokens in range(1, 4096)]
        changes = [num_tokens for num_tokens in range(1, 4095) if tiles[num_tokens - 1] != tiles[num_tokens]]
        assert set(changes) <= set(Experts.kernel_token_counts)
        assert [each.tokens for each in tiles] == sorted(each.tokens for each in tiles)
        assert tiles[-1].tokens == (256 if by_exponents else 128)


@pytest.mark.parametrize("name", ["e2m1", "integers"])
def test_the_instructions_that_decode_packed_codes(name: str) -> None:
    """Carried out here for every byte at every place, with all scales that are exact, or all zero points."""
    for byte in range(256):
        words = [(byte << 8 * place) | (0x5A3C1E87 & ~(255 << 8 * place)) for place in range(4)]
        for word in words:
            codes = [word >> 4 * place & 15 for place in range(8)]
            for operand in (66, 119, 127, 192) if name == "e2m1" else (0, 8, 15, 16):
                found = run_assembly(name, word, (operand,) * 4)
                for value, code in zip(found, codes[0::2] + codes[1::2], strict=True):
                    right = (
                        ELEMENTS["e2m1"].values[code] * 2.0 ** (operand - 127 - 64)
                        if name == "e2m1"
                        else code - operand
                    )
                    assert value == right


@pytest.mark.parametrize("name", ["e2m1", "integers"])
def test_each_byte_is_decoded_with_its_own_operand(name: str) -> None:
    """As the four bytes of a thread may belong to rows with other scales or zero points."""
    operands = (119, 120, 127, 66) if name == "e2m1" else (0, 3, 8, 15)
    word = 0x5A3C1E87
    found = run_assembly(name, word, operands)
    for place in range(8):
        code, operand = word >> 4 * place & 15, operands[place // 2]
        right = ELEMENTS["e2m1"].values[code] * 2.0 ** (operand - 127 - 64) if name == "e2m1" else code - operand
        assert found[place // 2 + 4 * (place % 2)] == right


def test_values_of_e2m1_times_scales_are_exact_in_bfloat16() -> None:
    """Also after they are divided by POWER, for every code and every scale in e4m3."""
    codes = torch.tensor(ELEMENTS["e2m1"].values, dtype=torch.float64)
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    products = (codes[:, None] * scales[~scales.isnan()]) / POWER.value
    assert torch.equal(products.bfloat16().double(), products)


def run_assembly(name: str, word: int, operands: tuple[int, ...]) -> list[float]:
    """Interpret the PTX of a decoder for a word of codes: the eight results, those of low bits first.

    operands: exponents or zero points of the four bytes.
    """
    registers: dict[str, int] = {"$4": word}
    for place, operand in enumerate(operands, 5):
        factor = operand * 0x00800080 + EXPONENTS.value if name == "e2m1" else operand * 0x00010001 + LESS_128.value
        registers[f"${place}"] = factor % 2**32

    def value(text: str) -> int:
        return registers[text] if text in registers else int(text, 0)

    def halves(bits: int) -> list[float]:
        return torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.uint16).view(torch.bfloat16).tolist()

    assembly: str = {"e2m1": OF_E2M1, "integers": OF_INTEGERS}[name].value
    for line in assembly.strip("{} ").split(";"):
        op, _, arguments = line.strip().partition(" ")
        if not op or op == ".reg":
            continue
        to, *given = (each.strip() for each in arguments.split(","))
        if op == "fma.rn.bf16x2":
            parts = zip(*(halves(value(each)) for each in given), strict=True)
            exact = torch.tensor([a * b + c for a, b, c in parts], dtype=torch.float64)
            assert torch.equal(exact.bfloat16().double(), exact)
            low, high = (int(bits) & 0xFFFF for bits in exact.bfloat16().view(torch.int16))
            registers[to] = low | high << 16
            continue
        a, *others = map(value, given)
        if op == "prmt.b32":
            second, selector = others
            both = second << 32 | a
            registers[to] = sum((both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i for i in range(4))
        elif op == "lop3.b32":
            b, c, table = others
            assert table == 0xEA
            registers[to] = (a & b) | c
        elif op in ("mov.b32", "and.b32"):
            registers[to] = a & others[0] if others else a
        else:
            registers[to] = (a << others[0] if op == "shl.b32" else a >> others[0]) % 2**32
    return [value for i in range(4) for value in halves(registers[f"${i}"])]
