"""Who compiles a piece: workers, this process, or nobody; and what is said about it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx

from compiled_engine.graphs.compiler import build, compile_pool, compile_worker
from compiled_engine.graphs.compiler.build import compile_pieces, emit_entry
from compiled_engine.graphs.compiler.compat import forget_compilations
from compiled_engine.graphs.compiler.compile_pool import CompileError
from compiled_engine.graphs.compiler.direct_piece import direct_source
from compiled_engine.graphs.compiler.piece import UnknownTarget, piece_to_json
from compiled_engine.graphs.compiler.record import PieceRecord
from compiled_engine.process.progress import SilentProgress
from compiled_engine.process.timeline import Timeline

aten = torch.ops.aten


def graph_of(shapes: list[tuple[int, ...]], body: Callable[..., fx.Node]) -> fx.GraphModule:
    """A piece with inputs of these shapes. body(call, *inputs): what it returns."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{number}") for number in range(len(shapes))]
    for node, shape in zip(inputs, shapes, strict=True):
        node.meta["val"] = torch.empty(shape)
    graph.output((body(graph.call_function, *inputs),))
    return fx.GraphModule({}, graph)


class Pool:
    """Workers that give prepared answers."""

    def __init__(self, answers: dict[str, Any], size: int) -> None:
        self._answers, self._size = answers, size
        self.order: dict[str, Any] = {}
        self.closed = 0

    def __len__(self) -> int:
        return self._size

    def ask(self, message: dict[str, Any]) -> Any:
        return self._answers[message["key"]]

    def begin(self, order: dict[str, Any]) -> None:
        self.order = order

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the pieces that this process compiles, in order; one named `wrong` fails."""
    found: list[str] = []

    def compile_piece(entry: Path, key: str) -> float:
        found.append(key)
        if key == "wrong":
            raise ValueError("Inductor failed")
        return 9.0

    monkeypatch.setattr(compile_pool, "compile_piece", compile_piece)
    monkeypatch.setattr(compile_pool, "forget_compilations", lambda: found.append("forget"))
    return found


def pool_with(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], size: int = 2) -> Pool:
    pool = Pool(answers, size)
    monkeypatch.setattr(compile_pool, "WorkerPool", lambda module, count: pool)
    return pool


DONE = {"seconds": 1.5, "worker": 1}


def test_what_workers_cannot_compile_is_compiled_here(
    compiled_here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Because they have died, or do not know an op. Then nothing is remembered of earlier compilations."""
    pool = pool_with(monkeypatch, {"a": DONE, "b": None, "c": {"unknown": "op x"}})
    settings = {"a": True, "b": 2, "c": 0.5, "d": "text", "e": None, "f": [1], "g": print}
    monkeypatch.setattr(compile_pool, "changed_settings", lambda compiler: settings)
    with (
        caplog.at_level(logging.WARNING, "compiled_engine"),
        compile_pool.compile_pool(tmp_path, 2, ["my_passes"]) as compile_all,
    ):
        assert pool.closed == 0
        found = {record.key: record for record in compile_all(["a", "b", "c"])}
    assert found == {"a": PieceRecord("a", 1.5, 1), "b": PieceRecord("b", 9.0, None), "c": PieceRecord("c", 9.0, None)}
    assert (compiled_here[0], sorted(compiled_here[1:])) == ("forget", ["b", "c"])
    assert pool.closed == 1
    simple = {name: settings[name] for name in "abcde"}
    assert pool.order == {"entry": str(tmp_path), "modules": ["my_passes"], "settings": simple}
    assert sorted(caplog.messages) == [
        "piece b is compiled in this process",
        "piece c is compiled in this process: op x",
    ]


def test_without_workers_everything_is_compiled_here_in_order(
    compiled_here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool_with(monkeypatch, {}, 0)
    with compile_pool.compile_pool(tmp_path, 0) as compile_all:
        assert [record.key for record in compile_all(["b", "a"])] == ["b", "a"]
    assert compiled_here == ["forget", "b", "a"]


def test_with_workers_for_all_nothing_is_compiled_here(
    compiled_here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool_with(monkeypatch, {"a": DONE, "b": DONE})
    with compile_pool.compile_pool(tmp_path, 2) as compile_all:
        assert {record.key for record in compile_all(["b", "a"])} == {"a", "b"}
    assert compiled_here == []


@pytest.mark.parametrize("size", [0, 2])
def test_an_error_of_the_compiler_names_the_piece_and_ends_the_workers(
    size: int, compiled_here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool = pool_with(monkeypatch, {"wrong": {"error": "Inductor failed"}}, size)
    with (
        pytest.raises(CompileError, match=r"piece wrong cannot be compiled; mode='eager'.*\nInductor failed"),
        compile_pool.compile_pool(tmp_path, size) as compile_all,
    ):
        list(compile_all(["wrong"]))
    assert pool.closed >= 1


def test_a_worker_says_what_became_of_each_piece(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the caller's settings, and without further processes; of a failure the whole traceback."""
    import torch._inductor.config as inductor_config

    from compiled_engine.graphs.compiler import compile_piece as module

    seen: list[Any] = []

    def compile_piece(entry: Path, key: str) -> float:
        seen.append((entry, key, inductor_config.compile_threads, inductor_config.epilogue_fusion))
        if key == "unknown":
            raise UnknownTarget("op x is not registered")
        if key == "wrong":
            raise ValueError("Inductor failed")
        return 1.25

    prepared: list[Any] = []
    monkeypatch.setattr(module, "compile_piece", compile_piece)
    monkeypatch.setattr(compile_worker, "run_workers", prepared.append)
    compile_worker.main()
    settings = {"epilogue_fusion": False}
    work = prepared[0]({"entry": str(tmp_path), "modules": ["json"], "settings": settings})
    answers: list[dict[str, Any]] = []
    work(iter([{"key": key} for key in ("good", "unknown", "wrong", "last")]), answers.append)
    assert [list(answer) for answer in answers] == [["seconds"], ["unknown"], ["error"], ["seconds"]]
    assert answers[0] == answers[3] == {"seconds": 1.25}
    assert answers[1] == {"unknown": "op x is not registered"}
    assert "Traceback" in answers[2]["error"]
    assert "Inductor failed" in answers[2]["error"]
    assert seen == [(tmp_path, key, 1, False) for key in ("good", "unknown", "wrong", "last")]
    with pytest.raises(ModuleNotFoundError):
        prepared[0]({"entry": "", "modules": ["no_such_module"], "settings": {}})(iter([]), answers.append)


def test_only_pieces_with_something_to_fuse_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of callables that call op by op are Python in any case. What is compiled is on the timeline."""
    (tmp_path / "pieces").mkdir()
    product = piece_to_json(graph_of([(2, 4), (4, 3)], lambda call, x, w: call(aten.mm.default, (x, w))))
    fused = piece_to_json(graph_of([(2,)], lambda call, x: call(aten.relu.default, (call(aten.neg.default, (x,)),))))
    asked: list[Any] = []

    class Here:
        def __init__(self, folder: Path, workers: int, modules: Any) -> None:
            asked.append((folder, workers))

        def __enter__(self) -> Any:
            return lambda keys: [PieceRecord(key, 2.0, 4) for key in keys]

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(build, "compile_pool", Here)
    for key in ("kept", "gone"):
        (tmp_path / "inductor" / key).mkdir(parents=True)
    (tmp_path / "cpp" / "gone").mkdir(parents=True)
    timeline = Timeline()
    pieces = {"plain": product, "kept": fused, "gone": fused, "asked": fused}
    found = compile_pieces(tmp_path, pieces, 7, SilentProgress(), timeline, {"asked"})
    assert {record.key: (record.seconds, record.worker) for record in found} == {
        **{"plain": (0.0, None), "asked": (0.0, None)},
        **{"kept": (2.0, 4), "gone": (2.0, 4)},
    }
    assert asked == [(tmp_path, 2)]  # no more workers than pieces
    for key, text in pieces.items():
        assert (tmp_path / "pieces" / f"{key}.json").read_text() == text
        python = tmp_path / "pieces" / f"{key}.py"
        assert (python.read_text() == direct_source(text)) if key in ("plain", "asked") else not python.exists()
    assert sorted(path.name for path in (tmp_path / "inductor").iterdir()) == ["kept"]
    spans = {span.name: (span.seconds, span.parent) for span in timeline.spans}
    assert spans == {"piece kept": (2.0, "compile pieces"), "piece gone": (2.0, "compile pieces")}
    assert compile_pieces(tmp_path, {"plain": product}, 7, SilentProgress(), timeline) == (
        PieceRecord("plain", 0.0, None),
    )
    assert len(asked) == 1


def test_torchs_trace_has_each_stage_as_an_artifact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = ["trace/aten_graph.txt", "1-8/passes/01_a.diff", "1-8/graph.txt", "1-8/plan.json", "1-8/forward.py"]
    files += ["logits/1-8/graph.txt", "pieces/ab.py"]
    for name in (*files, "pieces/ab.json", "record.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    emitted: dict[str, str] = {}

    def trace_structured(kind: str, metadata_fn: Any, payload_fn: Any, compile_id: Any, **others: Any) -> None:
        assert (kind, metadata_fn()["encoding"], compile_id) == ("artifact", "string", "the compilation")
        emitted[metadata_fn()["name"]] = payload_fn()

    monkeypatch.setattr(build, "trace_structured", trace_structured)
    emit_entry(tmp_path, "the compilation")  # type: ignore[arg-type]
    assert emitted == {
        "compiled_engine." + name.rpartition(".")[0].replace("/", "_"): f"text of {name}" for name in files
    }


def test_kernels_that_were_loaded_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 would find them in the folder of an entry that is complete, and not compile them into another."""
    for name, file in (("cabc.kernel", "/gone/cabc.main.so"), ("of_someone.kernel", "/there/kernel.py")):
        module = ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
    forget_compilations()
    assert "cabc.kernel" not in sys.modules
    assert "of_someone.kernel" in sys.modules
