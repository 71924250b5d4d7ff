"""Plans that are written out here, bound to functions: which code a batch runs, what stages run, what is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from compiled_engine.config import EngineConfig
from compiled_engine.graphs import compiled_model
from compiled_engine.graphs.cache.lookup import Lookup
from compiled_engine.graphs.cache.work_folder import WorkFolder
from compiled_engine.graphs.compiled_model import CompileCounts, CompiledModel, compile_model, load_piece
from compiled_engine.graphs.compiler.compiled_range import CompiledRange, write_compiled_range
from compiled_engine.graphs.compiler.plan import Carried, Plan, PlannedStep
from compiled_engine.graphs.compiler.stage_plan import Border, StagePlan, stage_plan
from compiled_engine.graphs.compiler.stitch import forward_source, stitch
from compiled_engine.graphs.stage_model import stage_model
from compiled_engine.parallel.stages import stages_of
from compiled_engine.passes.framework.graph_inputs import Source
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, SplittingOp
from compiled_engine.passes.framework.manager import ContractError, PassReport
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.registry import register_pass, unregister_pass
from compiled_engine.process.progress import SilentProgress
from compiled_engine.process.timeline import Timeline

SMALL, WHOLE = CompileRange(1, 4, small=True), CompileRange(1, 64)
PARAMETERS = {"w": torch.tensor([2.0]), "unused": torch.tensor([0.0])}


def step(piece: str | None, op: str | None, results: tuple[int, ...], *values: int, **constants: Any) -> PlannedStep:
    given = [{"value": value} for value in values] + [{"constant": value} for value in constants.values()]
    return PlannedStep(piece, op, tuple(given), results)


def plan_calling(piece: str) -> Plan:
    """piece(x_TD, w)"""
    inputs = (Source("argument", "x_TD"), Parameter("w", (1,), "float32"))
    return Plan(("x_TD",), inputs, (step(piece, None, (2,), 0, 1),), (2,))


PIECES: dict[str, Callable[..., Any]] = {
    name: lambda x, w, number=number: (x * w + number,)
    for number, name in enumerate(("small", "whole", "head", "with_adapters"))
}


def model_of(*ranges: CompiledRange, direct: tuple[str, ...] = ()) -> CompiledModel:
    lookup = Lookup(Path("nowhere"), "key", "hit", None, WorkFolder(None, "test_"))
    return CompiledModel(ranges, PIECES, frozenset(direct), lookup, CompileCounts(0, 0))


def range_of(name: str, compile_range: CompileRange, piece: str, result: str = "result") -> CompiledRange:
    return CompiledRange(name, compile_range, plan_calling(piece), (result,), ())


MODEL = model_of(
    range_of("forward", SMALL, "small", "logits_TV"),
    range_of("forward", WHOLE, "whole"),
    range_of("adapted", WHOLE, "with_adapters"),
    range_of("logits", WHOLE, "head"),
    direct=("small", "head"),
)
X = torch.tensor([[1.0]])
# What each of the pieces makes of X.
OF_SMALL, OF_WHOLE, OF_HEAD, OF_ADAPTERS = 2.0, 3.0, 4.0, 5.0


# Which code runs


def test_small_batches_have_a_function_of_their_own_which_may_end_at_logits() -> None:
    small, whole = MODEL.bind("forward", PARAMETERS)
    assert (small.compile_range, small.ends_at_logits, float(small.call(X))) == (SMALL, True, OF_SMALL)
    assert (whole.compile_range, whole.ends_at_logits, float(whole.call(X))) == (WHOLE, False, OF_WHOLE)
    to_hidden = model_of(range_of("forward", SMALL, "small"), range_of("forward", WHOLE, "whole"))
    assert [bound.ends_at_logits for bound in to_hidden.bind("forward", PARAMETERS)] == [False, False]


def test_other_callables_have_names() -> None:
    (adapted,), (logits,) = MODEL.bind("adapted", PARAMETERS), MODEL.bind("logits", PARAMETERS)
    assert (float(adapted.call(X)), float(logits.call(X))) == (OF_ADAPTERS, OF_HEAD)
    assert (MODEL.variants, MODEL.ends) == (("adapted",), ("logits",))
    alone = model_of(range_of("forward", WHOLE, "whole"))
    assert (alone.variants, alone.ends) == ((), ())


def test_ranges_are_found_by_their_callable() -> None:
    names = [[compiled.compile_range for compiled in MODEL.of(name)] for name in ("forward", "logits", "pooler")]
    assert names == [[SMALL, WHOLE], [WHOLE], []]
    assert [parameter.name for parameter in MODEL.parameters] == ["w"]


@pytest.mark.parametrize(
    ("direct", "expected"),
    [
        (("small",), (True, False)),
        (("whole",), (False, True)),
        (("small", "whole"), (True, True)),
        ((), (False, False)),
    ],
)
def test_a_forward_is_direct_if_all_its_pieces_are(direct: tuple[str, ...], expected: tuple[bool, bool]) -> None:
    """Of that very range; the logits and the forward with adapters do not matter."""
    model = replace(MODEL, direct=frozenset((*direct, "head")))
    assert (model.is_direct(SMALL), model.is_direct(WHOLE)) == expected


# What is called with what


@pytest.fixture
def _attends() -> Any:
    class Attends(GraphPass):
        name = "attends_here"
        splitting_ops = (
            SplittingOp("tests::attends", lambda x, scale: x.mul_(scale), attends=True),
            SplittingOp("tests::writes", lambda x, scale: x.add_(scale)),
            SplittingOp("tests::around", lambda *_: None, attends=True, around=lambda attend: lambda x, s: attend(x)),
        )

    register_pass(Attends())
    yield
    unregister_pass("attends_here")


INPUTS = (
    *(Source("argument", "x_TD"), Source("argument", "kv_caches.0"), Source("argument", "kv_caches.1")),
    *(Source("size", "x_TD", 1), Source("size", "x_TD", 0), Parameter("w", (1,), "float32")),
)
PLAN = Plan(
    ("x_TD", "kv_caches"),
    INPUTS,
    (
        step("one", None, (6, 7), 0, 3, 1),
        step(None, "tests::attends", (), 6, scale=10),
        step("two", None, (8,), 6, 7, 5),
        step(None, "tests::attends", (), 8, scale=-1),
        step("three", None, (9,), 8, 2),
    ),
    (9, 7),
    (Carried(6, "float32", (2,)), Carried(7, "float64", (2, 3)), Carried(8, "float32", (2,))),
)


def test_the_source_of_a_forward_reads_sizes_and_drops_each_value_after_its_last_use() -> None:
    """What is returned is kept; sizes that nothing reads are not read."""
    assert forward_source(PLAN).splitlines() == [
        "def forward(x_TD, kv_caches):",
        "    size_3 = x_TD.shape[1]",
        "    v6, v7, = piece_one(x_TD, size_3, kv_caches[0])",
        "    tests_attends(v6, 10)",
        "    v8, = piece_two(v6, v7, parameter_5)",
        "    del v6",
        "    tests_attends(v8, -1)",
        "    v9, = piece_three(v8, kv_caches[1])",
        "    del v8",
        "    return v9, v7",
    ]


def pieces_of_plan() -> dict[str, Callable[..., Any]]:
    return {
        "one": lambda x, width, cache: (x + width + cache, torch.ones(x.shape[0], 2, 3, dtype=torch.float64)),
        "two": lambda x, ones, w: (x * w + ones.sum((1, 2)).float()[:, None],),
        "three": lambda x, cache: (x - cache,),
    }


@pytest.mark.usefixtures("_attends")
def test_attention_is_handed_over_and_other_ops_are_called() -> None:
    handed: list[tuple[Any, ...]] = []
    ops = ("tests::attends", "tests::writes", "tests::around")
    plan = Plan(("x",), (Source("argument", "x"),), tuple(step(None, op, (), 0, scale=3) for op in ops), (0,))
    plain = stitch(plan, {}, {})
    assert plain(torch.tensor([1.0])).tolist() == [6.0]
    given = stitch(plan, {}, {}, lambda function, arguments: handed.append((function, *arguments)))
    x = torch.tensor([1.0])
    assert given(x).tolist() == [4.0]
    assert [arguments[1:] for arguments in handed] == [(x, 3), (x,)]


def hidden_of(model: CompiledModel, *arguments: Any, **how: Any) -> torch.Tensor:
    found: torch.Tensor = model.bind("forward", PARAMETERS, **how)[-1].call(*arguments)
    return found


@pytest.mark.usefixtures("_attends")
def test_stages_hand_on_what_the_next_one_reads_and_number_their_caches_from_nought() -> None:
    x, caches = torch.arange(6.0).view(3, 2), [torch.full((1,), 5.0), torch.full((1,), 7.0)]
    whole = CompiledRange("forward", WHOLE, replace(PLAN, outputs=(9,)), ("result",), ())
    logits, adapted = range_of("logits", WHOLE, "head"), range_of("adapted", WHOLE, "with_adapters")
    model = replace(model_of(whole, logits, adapted), pieces=PIECES | pieces_of_plan())
    expected = hidden_of(model, x.clone(), caches)
    assert torch.equal(expected, ((x + 7) * 10 * 2 + 6) * -1 - 7)
    first, second = (stage_model(model, stage, 6, X.device) for stage in stages_of((1, 1), 2))
    assert [[part.callable for part in stage.ranges] for stage in (first, second)] == [
        *(["forward"], ["forward", "logits"]),
    ]
    row_bytes = [stage.bind("forward", PARAMETERS)[-1].received_row_bytes for stage in (first, second)]
    assert row_bytes == [0, 2 * 4 + 2 * 3 * 8]
    packed = hidden_of(first, x.clone(), caches[:1])
    assert (packed.dtype, packed.numel()) == (torch.uint8, 3 * row_bytes[1])
    assert first.received is None
    assert second.received is not None
    assert second.received.numel() == 6 * row_bytes[1]
    second.received[: len(packed)] = packed
    assert torch.equal(hidden_of(second, x, caches[1:]), expected)
    (alone,) = stages_of((2,), 2)
    assert stage_model(model, alone, 6, X.device) is model


def test_a_border_is_the_bytes_of_all_values_in_order() -> None:
    border = Border((Carried(3, "bfloat16", (4,)), Carried(5, "int64", ()), Carried(6, "float32", (2, 2))))
    assert border.row_bytes == 8 + 8 + 16
    values = [torch.randn(5, 4).bfloat16(), torch.arange(5), torch.randn(5, 2, 2)]
    packed = border.pack(values)
    assert (packed.dtype, packed.numel()) == (torch.uint8, 5 * border.row_bytes)
    for found, value in zip(border.unpack(packed, 5), values, strict=True):
        assert torch.equal(found, value)
    assert all(value.data_ptr() >= packed.data_ptr() for value in border.unpack(packed, 5))  # views


# Found or compiled


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A cache that has an entry with one range; what it was asked for."""
    told: dict[str, Any] = {"status": "hit", "passes": (PassReport("silu_mul", True, True, matches=1, contract=2),)}

    def find(root: Path | None, factors: Any, build: Any, load: Any) -> Lookup:
        told["root"] = root
        compiled = CompiledRange("forward", WHOLE, plan_calling("whole"), ("hidden_TD",), told["passes"])
        loaded = (compiled,), PIECES, frozenset(["whole"])
        return Lookup(Path("nowhere"), "key", told["status"], loaded, WorkFolder(None, "test_"))

    monkeypatch.setattr(compiled_model, "find_or_build", find)
    monkeypatch.setattr(compiled_model, "cache_factors", lambda config: {})
    return told


def no_model(model: Any) -> Any:
    raise AssertionError


def config_with(**compile_options: Any) -> EngineConfig:
    config = tiny_config(num_layers=1)
    return replace(config, compile=replace(config.compile, cache_dir=Path("/cache"), **compile_options))


@pytest.mark.parametrize(("status", "name"), [("hit", "load"), ("miss", "compile"), ("off", "compile")])
def test_the_timeline_says_whether_it_was_found(status: str, name: str, looked_up: dict[str, Any]) -> None:
    looked_up["status"] = status
    timeline = Timeline()
    found = compile_model(config_with(), no_model, SilentProgress(), timeline)
    assert {name} == {span.name for span in timeline.spans if span.parent is None}
    assert (found.counts, found.lookup.status) == (CompileCounts(0, 0), status)
    assert found.direct == {"whole"}


@pytest.mark.parametrize(("verify", "root"), [(False, Path("/cache")), (True, None)])
def test_what_is_to_be_verified_is_compiled_anew(verify: bool, root: Path | None, looked_up: dict[str, Any]) -> None:
    compile_model(config_with(verify=verify), no_model, SilentProgress(), Timeline())
    assert looked_up["root"] == root


def test_a_strict_engine_holds_passes_that_were_run_before_to_their_contracts(looked_up: dict[str, Any]) -> None:
    compile_model(config_with(), no_model, SilentProgress(), Timeline())
    with pytest.raises(ContractError, match="silu_mul"):
        compile_model(config_with(strict=True), no_model, SilentProgress(), Timeline())
    looked_up["passes"] = (PassReport("silu_mul", True, True, matches=2, contract=2),)
    compile_model(config_with(strict=True), no_model, SilentProgress(), Timeline())


def test_pieces_are_loaded_as_they_were_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_up: dict[str, Any]
) -> None:
    """As C++, as Inductor's artifact, or as Python; each once, and only Python is direct, or C++ without Inductor."""
    (tmp_path / "pieces").mkdir()
    (tmp_path / "cpp" / "whole").mkdir(parents=True)
    (tmp_path / "pieces" / "head.bin").touch()
    for key in ("whole", "head", "small"):
        (tmp_path / "pieces" / f"{key}.py").write_text("def piece(x, w):\n    return (x,)\n")
    loaded: list[tuple[Any, ...]] = []

    def loader(name: str) -> Callable[..., Any]:
        def load(*arguments: Any) -> str:
            loaded.append((name, *arguments))
            return name

        return load

    artifact = SimpleNamespace(load_artifact=loader("artifact"))
    monkeypatch.setattr(compiled_model, "load_cpp_piece", loader("C++"))
    monkeypatch.setattr(compiled_model, "import_apart", lambda module: artifact)
    assert [load_piece(tmp_path, key, "cpu") for key in ("whole", "head")] == ["C++", "artifact"]
    assert loaded == [("C++", tmp_path / "cpp" / "whole"), ("artifact", tmp_path, "head")]
    assert load_piece(tmp_path, "small", "cpu")(X, X) == (X,)
    loaded.clear()

    def find(root: Any, factors: Any, build: Any, load: Any) -> Lookup:
        return Lookup(tmp_path, "key", "hit", load(tmp_path), WorkFolder(None, "test_"))

    monkeypatch.setattr(compiled_model, "find_or_build", find)
    for name, compile_range, piece in (
        *(("forward", SMALL, "small"), ("forward", WHOLE, "whole"), ("logits", WHOLE, "head")),
        ("adapted", WHOLE, "whole"),
    ):
        write_compiled_range(tmp_path, range_of(name, compile_range, piece), [])
    found = compile_model(config_with(), no_model, SilentProgress(), Timeline())
    assert [(compiled.callable, compiled.compile_range) for compiled in found.ranges] == [
        *(("forward", SMALL), ("forward", WHOLE), ("adapted", WHOLE), ("logits", WHOLE)),
    ]
    assert {key: found.pieces[key] for key in ("whole", "head")} == {"whole": "C++", "head": "artifact"}
    assert len(loaded) == 2
    assert found.direct == {"small"}


def test_calls_that_repeat_one_another_are_left_out_where_that_is_asked_for() -> None:
    plan = plan_calling("small")
    again = replace(plan, steps=(*plan.steps, step("small", None, (3,), 0, 1)), outputs=(2, 3))
    calls = []

    def piece(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        calls.append(x)
        return (x * w,)

    model = replace(model_of(CompiledRange("forward", WHOLE, again, ("a", "b"), ())), pieces={"small": piece})
    for distinct, number in ((False, 2), (True, 1)):
        calls.clear()
        hidden_of(model, X, distinct=distinct)
        assert len(calls) == number
    calls.clear()
    hidden_of(model, X)
    assert len(calls) == 2


@pytest.mark.usefixtures("_attends")
def test_the_only_stage_is_the_whole() -> None:
    (alone,) = stages_of((2,), 2)
    assert stage_plan(PLAN, alone) == StagePlan(PLAN)
