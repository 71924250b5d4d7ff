"""Pieces as JSON, compiled in this process or by workers, or run as generated Python."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_engine.graphs.compiled_model import load_piece
from compiled_engine.graphs.compiler.compile_piece import artifact_path, require_open_sizes
from compiled_engine.graphs.compiler.compile_pool import CompileError, compile_pool
from compiled_engine.graphs.compiler.cpp_piece import piece_folder, read_output_code
from compiled_engine.graphs.compiler.direct_piece import direct_source, is_direct, load_direct
from compiled_engine.graphs.compiler.piece import UnknownTarget, piece_from_json, piece_key, piece_to_json
from compiled_engine.graphs.compiler.trace import GuardError
from compiled_engine.passes.framework.op_library import OpDeclaration, declare_op
from compiled_engine.passes.linear.silu_mul import silu_mul

aten = torch.ops.aten


def piece_of(
    inputs: Callable[[torch.SymInt], list[torch.Tensor]], body: Callable[..., tuple[fx.Node, ...]]
) -> fx.GraphModule:
    """A piece with these inputs and then n, any in 1 to 64. body(call, x, w, n): what it returns."""
    shape_env = ShapeEnv()
    with shape_env.ignore_fresh_unbacked_symbols():
        n = shape_env.create_unbacked_symint()
    shape_env.constrain_symbol_range(n.node.expr, 1, 64)
    graph = fx.Graph()
    with FakeTensorMode(shape_env=shape_env):
        nodes = [graph.placeholder(name) for name in "xwn"]
        for node, value in zip(nodes, [*inputs(n), n], strict=True):
            node.meta["val"] = value
        graph.output(body(graph.call_function, *nodes))
    return fx.GraphModule({}, graph)


def pointwise_piece(scale: float = 2.0) -> fx.GraphModule:
    """(relu(x @ w.t()) * scale, x @ w.t()) for x [n, 4]."""

    def body(call: Any, x: fx.Node, w: fx.Node, n: fx.Node) -> tuple[fx.Node, ...]:
        product = call(aten.mm.default, (x, call(aten.t.default, (w,))))
        return call(aten.mul.Tensor, (call(aten.relu.default, (product,)), scale)), product

    return piece_of(lambda n: [torch.empty(n, 4), torch.empty(8, 4)], body)


def call(piece: object, rows: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return piece(torch.randn(rows, 4), torch.randn(8, 4), rows)  # type: ignore[operator]


def test_a_piece_comes_back_from_its_json() -> None:
    text = piece_to_json(pointwise_piece())
    again, fakes, shape_env = piece_from_json(text)
    assert piece_to_json(again) == text
    assert not shape_env.guards
    assert [str(fake.shape[1]) for fake in fakes[:2]] == ["4", "4"]
    for rows in (1, 5):
        torch.testing.assert_close(call(again, rows), call(pointwise_piece(), rows))


def test_the_key_changes_with_constants_shapes_and_ops_only() -> None:
    texts = {piece_to_json(pointwise_piece(scale)) for scale in (2.0, 2.0, 3.0)}
    assert len(texts) == len({piece_key(text) for text in texts}) == 2


def test_a_call_that_is_no_op_has_no_json() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    graph.output((graph.call_function(len, (x,)),))
    with pytest.raises(UnknownTarget, match="len"):
        piece_to_json(fx.GraphModule({}, graph))


def test_an_op_that_is_not_registered_is_named() -> None:
    text = piece_to_json(pointwise_piece()).replace("aten::relu.default", "somebodys::op.default")
    with pytest.raises(UnknownTarget, match="somebodys::op"):
        piece_from_json(text)


def reshaped_piece() -> fx.GraphModule:
    """(x * w).view(n, 96) + 1 for x [4n, 24]."""

    def body(call: Any, x: fx.Node, w: fx.Node, n: fx.Node) -> tuple[fx.Node, ...]:
        joined = call(aten.view.default, (call(aten.mul.Tensor, (x, w)), [n, 96]))
        return (call(aten.add.Tensor, (joined, 1.0)),)

    return piece_of(lambda n: [torch.empty(4 * n, 24), torch.empty(24)], body)


def entry_with(folder: Path, *pieces: fx.GraphModule) -> list[str]:
    (folder / "pieces").mkdir()
    keys = []
    for piece in pieces:
        text = piece_to_json(piece)
        keys.append(piece_key(text))
        (folder / "pieces" / f"{keys[-1]}.json").write_text(text)
    return keys


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("workers", [0, 2])
def test_pieces_compile_here_and_in_workers(tmp_path: Path, workers: int) -> None:
    keys = entry_with(tmp_path, pointwise_piece(2.0), pointwise_piece(3.0))
    with compile_pool(tmp_path, workers) as compile_pieces:
        done = {piece.key: piece.worker for piece in compile_pieces(keys)}
    assert set(done) == set(keys)
    assert all((worker is None) == (workers == 0) for worker in done.values())
    for key, scale in zip(keys, (2.0, 3.0), strict=True):
        compiled = load_piece(tmp_path, key, "cpu")
        for rows in (1, 7, 64):
            torch.testing.assert_close(tuple(call(compiled, rows)), call(pointwise_piece(scale), rows))
        assert "def call(" in (tmp_path / "pieces" / f"{key}.py").read_text()


def test_a_piece_of_cpp_kernels_runs_without_inductor(tmp_path: Path) -> None:
    """Its folder has all that it needs, elsewhere and in another process."""
    (key,) = entry_with(tmp_path, pointwise_piece())
    with compile_pool(tmp_path, 0) as compile_pieces:
        list(compile_pieces([key]))
    folder = piece_folder(tmp_path, key).rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "inductor")
    program = (
        "import json, sys; from pathlib import Path; import torch\n"
        "from compiled_engine.graphs.compiler.cpp_piece import load_cpp_piece\n"
        "piece = load_cpp_piece(Path(sys.argv[1])); torch.manual_seed(0)\n"
        "results = piece(torch.randn(7, 4), torch.randn(8, 4), 7)\n"
        "assert not {'torch._inductor', 'torch._dynamo'} & set(sys.modules)\n"
        "print(json.dumps([result.tolist() for result in results]))"
    )
    run = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for found, expected in zip(json.loads(run.stdout), call(pointwise_piece(), 7), strict=True):
        torch.testing.assert_close(torch.tensor(found), expected)


def test_a_piece_that_needs_inductor_keeps_its_artifact(tmp_path: Path) -> None:
    """With this option, tensors are parts of a pool, which is an op of Inductor's."""
    (key,) = entry_with(tmp_path, pointwise_piece(5.0))
    with inductor_config.patch(memory_planning=True), compile_pool(tmp_path, 0) as compile_pieces:
        list(compile_pieces([key]))
    assert artifact_path(tmp_path, key).is_file()
    assert not piece_folder(tmp_path, key).exists()
    torch.testing.assert_close(tuple(call(load_piece(tmp_path, key, "cpu"), 5)), tuple(call(pointwise_piece(5.0), 5)))


OUTPUT_CODE = """
from math import inf
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.codegen.memory_planning import _align as align
import torch
inductor_ops = torch.ops.inductor
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'source')

class Runner:
    def call(self, args):
        x, n = args
        args.clear()
        buf0 = empty_strided_cpu((n,), (1,), torch.float32)
        extern_kernels.mm(x, x, out=buf0)
        cpp_fused_0(buf0)
        return (buf0, inf)
"""


def known_calls(name: str) -> Any:
    return {"mm": torch.mm, "abs": max}[name]


def test_output_code_without_its_frame_is_a_piece() -> None:
    piece = read_output_code(OUTPUT_CODE, 2, 2, known_calls)
    assert piece is not None
    assert piece.kernels == {"cpp_fused_0": (["float*"], "source")}
    assert piece.source.splitlines() == [
        "empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu",
        "from math import inf",
        "def piece(x, n):",
        "    buf0 = empty_strided_cpu((n,), (1,), torch.float32)",
        "    torch.mm(x, x, out=buf0)",
        "    cpp_fused_0(buf0)",
        "    return (buf0, inf)",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("(buf0, inf)", "(buf0,)"),
        ("x, n = args", "x, n, m = args"),
        ("x, n = args", "x, n = self.unpacked(args)"),
        ("args.clear()", "pass"),
        ("cpp_fused_0(buf0)", "cpp_fused_1(buf0)"),
        ("cpp_fused_0(buf0)", "cpp_fused_0(align(buf0))"),
        ("cpp_fused_0(buf0)", "inductor_ops.seeds(buf0)"),
        ("cpp_fused_0(buf0)", "torch.ops.inductor.seeds(buf0)"),
        ("cpp_fused_0(buf0)", "self.partitions[0](buf0)"),
        ("extern_kernels.mm", "extern_kernels.abs"),
    ],
)
def test_output_code_that_needs_more_is_no_piece(before: str, after: str) -> None:
    assert before in OUTPUT_CODE
    assert read_output_code(OUTPUT_CODE.replace(before, after), 2, 2, known_calls) is None


def test_a_view_that_divides_and_joins_sizes_holds_for_every_size(tmp_path: Path) -> None:
    (key,) = entry_with(tmp_path, reshaped_piece())
    with compile_pool(tmp_path, 0) as compile_pieces:
        list(compile_pieces([key]))
    compiled = load_piece(tmp_path, key, "cpu")
    for rows in (1, 5, 64):
        x, w = torch.randn(4 * rows, 24), torch.randn(24)
        torch.testing.assert_close(compiled(x, w, rows)[0], (x * w).view(rows, 96) + 1)


def test_a_size_that_the_compiler_decides_on_is_an_error() -> None:
    _, (x, *_), shape_env = piece_from_json(piece_to_json(pointwise_piece()))
    require_open_sizes(shape_env)
    torch._check(x.shape[0] == 1)
    with pytest.raises(GuardError, match=r"would hold only where .* is 1"):
        require_open_sizes(shape_env)


def test_without_living_workers_pieces_are_compiled_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    keys = entry_with(tmp_path, pointwise_piece(2.0), pointwise_piece(3.0), pointwise_piece(4.0))
    with compile_pool(tmp_path, 2) as compile_pieces:
        done = {piece.key: piece.worker for piece in compile_pieces(keys)}
    assert done == dict.fromkeys(keys)


def test_what_a_worker_cannot_compile_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (key,) = entry_with(tmp_path, pointwise_piece())
    path = tmp_path / "pieces" / f"{key}.json"
    path.write_text(path.read_text().replace("aten::mm.default", "aten::bmm.default"))
    with compile_pool(tmp_path, 1) as compile_pieces, pytest.raises(CompileError, match="3D"):
        list(compile_pieces([key]))


def test_a_piece_with_nothing_to_fuse_runs_as_python() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = torch.empty(3, 4), torch.empty(8, 4)
    t = graph.call_function(aten.t.default, (w,))
    product = graph.call_function(aten.mm.default, (x, t))
    parts = graph.call_function(aten.split_with_sizes.default, (product, [6, 2], -1))
    first = graph.call_function(__import__("operator").getitem, (parts, 0))
    out = graph.call_function(aten.empty_like.default, (first,), {"pin_memory": False})
    graph.output((first, out))
    text = piece_to_json(fx.GraphModule({}, graph))
    assert is_direct(text)
    source = direct_source(text)
    assert source.count("del ") >= 3  # every value is dropped after its last use
    x_value, w_value = torch.randn(3, 4), torch.randn(8, 4)
    result, buffer = load_direct(source, "cpu")(x_value, w_value)
    torch.testing.assert_close(result, (x_value @ w_value.t())[:, :6])
    assert buffer.shape == (3, 6)


def test_our_own_ops_are_called_past_the_dispatcher() -> None:
    graph = fx.Graph()
    gate_up = graph.placeholder("gate_up")
    gate_up.meta["val"] = torch.empty(3, 8)
    graph.output((graph.call_function(silu_mul, (graph.call_function(aten.view.default, (gate_up, [3, 8])),)),))
    piece = load_direct(direct_source(piece_to_json(fx.GraphModule({}, graph))), "cpu")
    values = torch.randn(3, 8)
    with Dispatched() as seen:
        (result,) = piece(values)
    torch.testing.assert_close(result, silu_mul(values))
    assert "aten::view" in seen.names
    assert "compiled_engine::silu_mul" not in seen.names


class Dispatched(TorchDispatchMode):
    """The names of the ops that go through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("factor", [2.0, None])
def test_an_embedding_times_a_constant_needs_no_compiler(factor: float | None) -> None:
    graph = fx.Graph()
    ids, w = graph.placeholder("ids"), graph.placeholder("w")
    ids.meta["val"], w.meta["val"] = torch.zeros(3, dtype=torch.int64), torch.empty(8, 4)
    rows = graph.call_function(aten.embedding.default, (w, ids))
    graph.output((graph.call_function(aten.mul.Tensor, (rows, rows if factor is None else factor)),))
    text = piece_to_json(fx.GraphModule({}, graph))
    assert is_direct(text) == (factor is not None)
    if factor is not None:
        weights, tokens = torch.randn(8, 4), torch.tensor([5, 0, 5])
        (result,) = load_direct(direct_source(text), "cpu")(tokens, weights)
        torch.testing.assert_close(result, weights[tokens] * factor)


@pytest.mark.parametrize("more", [None, aten.add.Tensor, aten.cat.default, aten.mul.Tensor])
def test_one_sum_or_concatenation_alone_needs_no_compiler(more: Any) -> None:
    """As in a head, whose layer reads two vectors of a token side by side. With another op it could be fused."""
    graph = fx.Graph()
    x, y, w = (graph.placeholder(name) for name in "xyw")
    for node, shape in ((x, (3, 4)), (y, (3, 4)), (w, (8, 8))):
        node.meta["val"] = torch.empty(shape)
    both = graph.call_function(aten.cat.default, ([x, y], -1))
    product = graph.call_function(aten.mm.default, (both, w))
    arguments = {aten.cat.default: ([product, product], -1)}
    graph.output((product if more is None else graph.call_function(more, arguments.get(more, (product, product))),))
    text = piece_to_json(fx.GraphModule({}, graph))
    assert is_direct(text) == (more is None)
    if more is None:
        first, second, weights = torch.randn(3, 4), torch.randn(3, 4), torch.randn(8, 8)
        (result,) = load_direct(direct_source(text), "cpu")(first, second, weights)
        torch.testing.assert_close(result, torch.cat((first, second), -1) @ weights)


def test_a_sum_alone_keeps_its_factor() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    graph.output((graph.call_function(aten.add.Tensor, (x, x), {"alpha": 2}),))
    (result,) = load_direct(direct_source(piece_to_json(fx.GraphModule({}, graph))), "cpu")(torch.ones(3))
    assert result.tolist() == [3.0, 3.0, 3.0]


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_of_a_user_needs_no_compiler_once_it_is_declared() -> None:
    op = torch.ops.tests.doubled.default
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    graph.output((graph.call_function(op, (x,)),))
    text = piece_to_json(fx.GraphModule({}, graph))
    assert not is_direct(text)
    declare_op(op, OpDeclaration(direct=True, call=lambda x: x + x))
    assert is_direct(text)
    with Dispatched() as seen:
        (result,) = load_direct(direct_source(text), "cpu")(torch.ones(3))
    assert result.tolist() == [2.0, 2.0, 2.0]
    assert "tests::doubled" not in seen.names


def test_a_piece_with_pointwise_ops_is_compiled() -> None:
    text = piece_to_json(pointwise_piece())
    assert not is_direct(text)
    assert [node[0] for node in json.loads(text)["nodes"]].count("input") == 3
