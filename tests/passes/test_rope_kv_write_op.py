"""Norm, rotation and KV write in one op: what it computes on a CPU, in the interpreted kernel and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hopper_compilation import compiled_for_hopper, stack_bytes
from interpreting_process import interpret

from compiled_engine.attention.inputs import Rotation
from compiled_engine.passes.rope import rope_kv_write_kernel
from compiled_engine.passes.rope.rope_kv_write import rope_kv_write

# Tokens, query heads, K/V heads, head size: small models' shapes, odd counts, head sizes that are no power of two.
SHAPES = [(1, 16, 8, 128), (5, 14, 2, 64), (3, 4, 4, 80), (7, 6, 1, 96), (2, 8, 2, 192), (4, 5, 5, 256), (9, 3, 3, 20)]
SHAPES += [(3, 8, 1, 512), (2, 2, 1, 576), (130, 3, 1, 64)]
# Head size and form (RopeForm), and whether cos and sin are those of pairs.
FORMS = [(64, (0, False, False), True), (64, (0, True, True), False), (80, (32, False, False), False)]
FORMS += [(20, (10, True, False), True), (96, (48, False, True), True), (32, (0, True, False), True)]
FORMS = [(size, (*form, False), of_pairs) for size, form, of_pairs in FORMS]
FORMS += [(64, (0, False, False, True), False), (96, (48, True, True, True), True)]


Arguments = tuple[Any, ...]


def random_arguments(
    shape: tuple[int, int, int, int], dtype: torch.dtype, normed: bool, device: str = "cpu", merged: bool = True
) -> tuple[Arguments, torch.Tensor]:
    """The op's arguments, and the tensor that its cache is an inner slice of: all NaN, and so it stays around it.

    q, k and v are views of one tensor if `merged`; every third token is padding.
    """
    tokens, heads, kv_heads, d = shape
    generator = torch.Generator().manual_seed(tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    widths = [heads * d, kv_heads * d, kv_heads * d]
    parts = normal(tokens, sum(widths)).split(widths, -1) if merged else [normal(tokens, width) for width in widths]
    q, k, v = (part.unflatten(-1, (-1, d)) for part in parts)
    weights = (normal(d), normal(d)) if normed else (None, None)
    angles = torch.rand(tokens, 1, d, generator=generator).mul(7)
    cos, sin = (1.3 * angles.cos()).to(device, dtype), (1.3 * angles.sin()).to(device, dtype)
    blocks, block_size = 2 + tokens // 10, 16
    guarded = torch.full((blocks + 2, 2, block_size, kv_heads, d), float("nan"), dtype=dtype, device=device)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[1::3] = -1
    return (q, k, v, guarded[1:-1], slots.to(device), None, *Rotation(*weights, 3e-4, cos, sin)), guarded


def expected_of(arguments: Arguments, guarded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, guarded cache) by the formulas of transformers, pair by pair."""
    q, k, v, cache, slots, _, *others = arguments
    q_weight, k_weight, eps, cos, sin, _, _, rotary_dim, interleaved, wide_rope, norm_last = others
    rotary_dim = rotary_dim or q.shape[-1]

    def normed(x_THd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x_THd.float()
        return weight * (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x_THd.dtype)

    def rotated(x_THd: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None and not norm_last:
            x_THd = normed(x_THd, weight)
        y_THd = x_THd.clone()
        for pair in range(rotary_dim // 2):
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary_dim // 2)
            at = (i, j) if cos.shape[-1] == rotary_dim else (pair, pair)
            x_TH, y_TH = (x_THd[..., place].float() if wide_rope else x_THd[..., place] for place in (i, j))
            y_THd[..., i] = (x_TH * cos[..., at[0]] - y_TH * sin[..., at[0]]).to(x_THd.dtype)
            y_THd[..., j] = (y_TH * cos[..., at[1]] + x_TH * sin[..., at[1]]).to(x_THd.dtype)
        return normed(y_THd, weight) if weight is not None and norm_last else y_THd

    guarded, block_size, rotated_k = guarded.clone(), cache.shape[2], rotated(k, k_weight)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            guarded[1 + slot // block_size, 0, slot % block_size] = rotated_k[token]
            guarded[1 + slot // block_size, 1, slot % block_size] = v[token]
    return rotated(q, q_weight), guarded


def check(op: Callable[..., torch.Tensor], arguments: Arguments, guarded: torch.Tensor) -> None:
    """Without a norm every bit is settled; with one, the squares may be added in any order."""
    expected = expected_of(arguments, guarded)
    poison = torch.full_like(expected[0], float("nan"))  # On a GPU the result gets the same memory.
    del poison
    rotated = op(*arguments)
    assert rotated.is_contiguous()
    normed = arguments[6] is not None
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[rotated.dtype] if normed else 0.0
    torch.testing.assert_close((rotated, guarded), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def in_form(
    form: tuple[int, tuple[int, bool, bool, bool], bool], dtype: torch.dtype, normed: bool, device: str = "cpu"
) -> tuple[Arguments, torch.Tensor]:
    """Arguments with another form of rotation."""
    head_dim, (rotary_dim, interleaved, wide, norm_last), of_pairs = form
    arguments, guarded = random_arguments((5, 6, 2, head_dim), dtype, normed, device)
    width = (rotary_dim or head_dim) // (2 if of_pairs else 1)
    # A wide rotation may have angles in fp32.
    angles = [angles[..., :width].to(torch.float32 if wide and interleaved else dtype) for angles in arguments[9:11]]
    return (*arguments[:9], *angles, 0.0, False, rotary_dim, interleaved, wide, norm_last), guarded


@pytest.mark.product(one_in=1000, each=("form",))
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_on_a_cpu(form: Any, dtype: torch.dtype, normed: bool) -> None:
    check(torch.ops.compiled_engine.rope_kv_write, *in_form(form, dtype, normed))


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_on_a_gpu(form: Any, dtype: torch.dtype, normed: bool) -> None:
    check(torch.ops.compiled_engine.rope_kv_write, *in_form(form, dtype, normed, "cuda"))


@pytest.mark.product(one_in=1000, each=("shape", "normed"))
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu(shape: tuple[int, int, int, int], dtype: torch.dtype, normed: bool, merged: bool) -> None:
    check(rope_kv_write, *random_arguments(shape, dtype, normed, merged=merged))
    check(torch.ops.compiled_engine.rope_kv_write, *random_arguments(shape, dtype, normed, merged=merged))


def check_interpreted() -> None:
    """Run by the next test in a process whose Triton interprets."""
    for shape in (*SHAPES[:-1], (33, 3, 1, 64)):
        for dtype in (torch.float32, torch.float16):
            for normed in (True, False):
                check(rope_kv_write_kernel.launch, *random_arguments(shape, dtype, normed, merged=shape[0] % 2 == 1))
    for form in FORMS:
        for dtype in (torch.float32, torch.float16):
            check(rope_kv_write_kernel.launch, *in_form(form, dtype, normed=dtype == torch.float32))


def test_the_kernel_interpreted() -> None:
    script = "import test_rope_kv_write_op; test_rope_kv_write_op.check_interpreted(); print('right')"
    run = interpret(__file__, "-c", script)
    assert run.stdout.strip() == "right", run.stderr[-2000:]


@pytest.mark.product(one_in=4)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("element", ["*bf16", "*fp32"])
@pytest.mark.parametrize(
    ("shape", "cache"),
    [
        ((1, 16, 8, 128), None),
        ((1, 4, 4, 80), None),
        ((1, 32, 1, 256), None),
        ((1, 16, 8, 128), ("*u8", "*i16")),
        ((1, 16, 8, 128), ("*fp8e4nv", "*fp32")),
    ],
)
def test_compiled_for_hopper(
    shape: tuple[int, int, int, int], cache: tuple[str, str] | None, element: str, normed: bool
) -> None:
    """Needs no GPU: it spills nothing, moves 16 bytes at a time, and waits for the kernel before it."""
    _, heads, kv_heads, d = shape
    launched = rope_kv_write_kernel.rope_kv_write_kernel
    tile_h, tile_p, num_warps = rope_kv_write_kernel.tiles(heads, d)
    constants: dict[str, Any] = {name: d for name in launched.arg_names if name.endswith("_HEAD_STRIDE")}
    constants |= {"NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": d, "BLOCK_SIZE": 16, "STRIDE_MULTIPLE": 8}
    constants |= {"WIDTH": d} | ({} if cache else {"scales_ptr": None})
    constants |= {"TILE_H": tile_h, "TILE_P": tile_p, "DEPENDENT_LAUNCH": True, "OFFSET": 0.0, "WIDE": False}
    constants |= {"ROTARY": d, "INTERLEAVED": False, "OF_PAIRS": False, "ROPE_WIDE": False, "NORM_LAST": False}
    constants |= {} if normed else {"q_weight_ptr": None, "k_weight_ptr": None}
    constants |= {"WIDTH": d + 2} if cache and cache[0] == "*u8" else {}
    types = {"slot_mapping_ptr": "*i64", "eps": "fp32"}
    types |= {"cache_ptr": cache[0], "scales_ptr": cache[1]} if cache else {}
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    program = compiled_for_hopper(launched, constants, types, pointers=element, **options)
    assert "griddepcontrol.wait" in program.asm["ptx"]
    assert cache or not re.search(r"(ld|st)\.global\.(b|u)(16|32)\b", program.asm["ptx"])
    assert stack_bytes(program) == 0


def test_the_kernel_refuses_layouts_that_it_cannot_read() -> None:
    q, k, v, *others = random_arguments((3, 4, 2, 16), torch.float32, False)[0]
    with pytest.raises(ValueError, match="v_TKd has stride 2"):
        rope_kv_write_kernel.launch(q, k, v.mT.contiguous().mT, *others)
    others[0] = others[0].transpose(0, 1)
    with pytest.raises(ValueError, match="kv_cache_N2PKd"):
        rope_kv_write_kernel.launch(q, k, v, *others)


@pytest.mark.gpu
@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype, normed: bool, merged: bool) -> None:
    check(rope_kv_write, *random_arguments(shape, dtype, normed, "cuda", merged))


@pytest.mark.gpu
def test_each_launch_waits_for_the_one_before_it() -> None:
    """Every launch rotates what the last one returned, in one CUDA graph, whose buffers are used again and again."""
    shape, launches = (64, 16, 8, 128), 40
    q, *others = random_arguments(shape, torch.float32, False)[0]
    for _ in range(launches):
        q = rope_kv_write(q, *others)
    start, *others = random_arguments(shape, torch.float32, False, "cuda")[0]
    rope_kv_write(start, *others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotated = start
        for _ in range(launches):
            rotated = rope_kv_write(rotated, *others)
    graph.replay()
    assert torch.equal(rotated.cpu(), q)
