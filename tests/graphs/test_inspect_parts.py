"""The parts of the inspector on input that is written out here."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from compiled_engine.graphs.compiler.guards import proved_asserts
from compiled_engine.graphs.compiler.record import module_tree, phases_since, write_trace
from compiled_engine.graphs.inspection.html import Repeat, fold, highlight
from compiled_engine.graphs.inspection.kernels import kernels_of, without_kernel_sources
from compiled_engine.graphs.inspection.report import piece_text
from compiled_engine.process.timeline import Span

OUTPUT_CODE = """
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
alloc_from_pool = torch.ops.inductor._alloc_from_pool
async_compile = AsyncCompile()

triton_red_fused_mean_0 = async_compile.triton('triton_red_fused_mean_0', '''
import triton
@triton.jit
def triton_red_fused_mean_0(in_ptr0, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')

_our_kernel_0 = async_compile.triton('_our_kernel', '''
def _our_kernel(x): pass
''', device_str='cuda')

class Runner:
    def call(self, args):
        arg0_1, = args
        with torch.cuda._DeviceGuard(0):
            stream0 = get_raw_stream(0)
            triton_red_fused_mean_0.run(arg0_1, 256, stream=stream0)
            buf1 = reinterpret_tensor(arg0_1, (4, 4), (4, 1), 0)
            extern_kernels.mm(arg0_1, buf1, out=buf1)
            buf2 = torch.ops.compiled_engine.small_batch_linear.default(buf1)
            buf3 = torch.ops.inductor._alloc_from_pool(buf2, 0)
            _our_kernel_0.run(buf1, stream=stream0)
            triton_red_fused_mean_0.run(buf1, 256, stream=stream0)
        return (buf1, )

runner = Runner(partitions=[])
call = runner.call

def benchmark_compiled_module(times=10, repeat=10):
    triton_red_fused_mean_0.run(None)
"""


def test_kernels_of_output_code() -> None:
    kernels = kernels_of(OUTPUT_CODE)
    assert [(kernel.name, kernel.kind, kernel.launches) for kernel in kernels] == [
        ("triton_red_fused_mean_0", "triton", 2),
        ("mm", "library", 1),
        ("compiled_engine::small_batch_linear", "op", 1),
        ("_our_kernel_0", "triton", 1),
    ]
    assert "@triton.jit" in kernels[0].source
    assert kernels_of("") == ()


def test_the_launcher_is_all_but_the_kernels() -> None:
    launcher = without_kernel_sources(OUTPUT_CODE)
    assert "@triton.jit" not in launcher
    assert "async_compile.triton('triton_red_fused_mean_0', ..., device_str='cuda')" in launcher
    assert launcher.endswith(OUTPUT_CODE[OUTPUT_CODE.index("class Runner:") :])
    compile(launcher, "launcher", "exec")


def test_piece_text() -> None:
    piece = """{"symbols": {"n0": [1, 64]}, "nodes": [
      ["input", {"dtype": "torch.float32", "shape": ["n0", 8], "stride": [8, 1], "device": "cpu"}],
      ["input", {"size": "n0"}],
      ["aten::view.default", [{"node": 0}, [{"node": 1}, 2, 4]], {"dict": {}}],
      ["aten::_to_copy.default", [{"node": 2}], {"dict": {"dtype": {"torch": "torch.bfloat16"}}}],
      ["output", [{"node": 3}]]]}"""
    assert piece_text(piece) == [
        "n0: 1 to 64",
        "v0: float32[n0, 8] = input",
        "v1: size n0 = input",
        "v2 = aten::view.default(v0, [v1, 2, 4])",
        "v3 = aten::_to_copy.default(v2, dtype=torch.bfloat16)",
        "return [v3]",
    ]


class Text(HTMLParser):
    """What is left of HTML without its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("language", ["python", "c++", "graph"])
def test_highlighting_loses_nothing(language: str) -> None:
    source = 'x: f32[u0, 4] = aten.add.Tensor(a, "<b>&amp;</b>")\nreturn x < y && z  # why\n\n  if True: pass'
    assert Text(highlight(source, language)).text.rstrip("\n") == source


def test_highlighting_colours_what_it_knows() -> None:
    assert '<b class="keyword">def</b> <b class="call">f</b>' in highlight("def f(): pass", "python")
    assert '<b class="type">float</b>' in highlight("float x;", "c++")
    line = "mm_1: float32[u0, 8] = aten.mm.default(x, t)"
    assert '<b class="call">aten.mm.default</b>' in highlight(line, "graph")
    diff = highlight(f"- {line}\n+ {line}\n  {line}\n...", "diff")
    assert [diff.count(f'<span class="{kind}">') for kind in ("removed", "added", "kept", "gap")] == [1, 1, 1, 1]


def test_fold_finds_the_layers() -> None:
    steps = ["A", *["write", "attend", "B"] * 27, "write", "attend", "C"]
    folded = fold(steps)
    assert folded == [
        Repeat(("A",), 1),
        Repeat(("write", "attend", "B"), 27),
        Repeat(("write",), 1),
        Repeat(("attend",), 1),
        Repeat(("C",), 1),
    ]
    assert [item for repeat in folded for item in repeat.items * repeat.count] == steps


def test_equal_layers_are_one_module_with_a_count() -> None:
    model = nn.Sequential(*(nn.Linear(2, 3, dtype=torch.bfloat16) for _ in range(4)), nn.Linear(2, 5))
    tree = module_tree(model)
    assert [(child.path, child.count) for child in tree.children] == [("0", 4), ("4", 1)]
    weight, bias = tree.children[0].parameters
    assert (weight.name, weight.shape, weight.dtype, bias.shape) == ("weight", (3, 2), "bfloat16", (3,))


def test_bytecode_that_depyf_does_not_know_is_shown_as_instructions(tmp_path: Path) -> None:
    def plain(x: int) -> int:
        return x + 1

    def guarded(x: int) -> int:
        try:
            return x.numerator
        except ValueError as error:
            raise KeyError from error

    write_trace(tmp_path / "trace", (plain.__code__, guarded.__code__), "graph", ["a", "b"])
    text = (tmp_path / "trace" / "bytecode.txt").read_text()
    assert "return x + 1" in text
    assert "depyf cannot decompile" in text
    assert "LOAD_ATTR" in text
    assert (tmp_path / "trace" / "aten_graph.txt").read_text() == "a\nb\n"


def test_phases_begin_with_the_build() -> None:
    spans = [Span("piece", 5.0, 1.0, "build"), Span("cache key", 1.0, 0.5), Span("trace", 2.0, 3.0, "build")]
    assert phases_since(spans, 2.0) == (Span("trace", 0.0, 3.0, "build"), Span("piece", 3.0, 1.0, "build"))


def test_proved_asserts_are_counted() -> None:
    messages = ["Runtime assertion failed for expression u0 <= 64 on node 'le'"] * 2 + ["another message"]
    (record,) = proved_asserts(messages)
    assert record.conditions == (("u0 <= 64", 2), ("another message", 1))
    assert proved_asserts([]) == ()


def test_the_python_of_a_piece_that_needs_no_inductor_says_what_it_launches() -> None:
    kernels = kernels_of(
        "def piece(v0, v1, v2):\n"
        "    v3 = op__aten__view__default(v0, [v1, 256])\n"
        "    v4 = op__compiled_engine__silu_mul__default(v3)\n"
        "    v5 = op__aten__mm__default(v4, v2)\n"
        "    v6 = op__aten__empty_like__default(v5)\n"
        "    return (v5, v6,)\n"
    )
    assert [(kernel.name, kernel.kind) for kernel in kernels] == [
        ("compiled_engine::silu_mul", "op"),
        ("mm", "library"),
    ]
    assert "@triton.jit" in kernels[0].source
    assert kernels[1].source == ""
