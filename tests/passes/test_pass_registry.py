"""The list of passes: its order, what it is asked for by name, and passes of users."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plain_config import BASE
from torch import fx

from compiled_engine.attention.op import ATTENTION_OPS
from compiled_engine.config import AdapterConfig, EngineConfig
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, SplittingOp
from compiled_engine.passes.linear.adapters import Adapters
from compiled_engine.passes.registry import (
    DEFAULT_PASSES,
    check_registered,
    kernel_token_counts,
    load_plugins,
    op_modules,
    passes_of_quantised,
    passes_of_ranks,
    register_pass,
    registered_passes,
    splitting_ops,
    unregister_pass,
)
from compiled_engine.recurrence.op import RECURRENCE_OPS

NAMES = [graph_pass.name for graph_pass in DEFAULT_PASSES]


class Own(GraphPass):
    """A pass of a user."""

    def __init__(self, name: str, **changes: Any) -> None:
        self.name = name
        vars(self).update(changes)

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return 0

    def run(self, graph: fx.Graph) -> PassResult:
        return PassResult(0)


def with_passes(*names: str) -> EngineConfig:
    return replace(BASE, compile=replace(BASE.compile, passes=names))


@pytest.fixture
def cleared() -> Iterator[None]:
    yield
    for graph_pass in registered_passes():
        if graph_pass not in DEFAULT_PASSES:
            unregister_pass(graph_pass.name)


def test_each_pass_comes_after_those_whose_ops_it_takes_in() -> None:
    after: dict[str, set[str]] = {
        "experts": {"no_op_elimination"},
        "top_k": {"no_op_elimination", "experts"},
        "all_reduce_residual_rms_norm": {"residual_rms_norm"},
        "sequence_parallel": {"residual_rms_norm", "all_reduce_residual_rms_norm"},
        "rms_norm": {"residual_rms_norm", "experts"},
        "rope_kv_write": {"rope_angles", "merge_linears"},
        "rope_attend": {"rope_kv_write"},
        "silu_mul": {"merge_linears", "experts"},
        "small_batch_linear": {"merge_linears", "silu_mul", "rms_norm", "residual_rms_norm", "experts"},
        "gated_linear": {"merge_linears", "silu_mul"},
        "quantise_activations": set(NAMES) - {"quantise_activations", "reorder_codes"},
        "reorder_codes": set(NAMES) - {"reorder_codes"},
    }
    for name, earlier in after.items():
        assert {*NAMES[: NAMES.index(name)]} >= earlier
    assert NAMES[0] == "no_op_elimination"
    assert len(set(NAMES)) == len(NAMES)
    for graph_pass in DEFAULT_PASSES:
        needed = set(graph_pass.requires) - {"tensor_parallel", "quantise"}
        assert needed <= {*NAMES[: NAMES.index(graph_pass.name)]}


def test_passes_that_only_some_models_have() -> None:
    assert passes_of_ranks() == {"all_reduce_residual_rms_norm", "sequence_parallel"}
    assert passes_of_quantised() == {"quantise_activations", "reorder_codes"}


@pytest.mark.usefixtures("cleared")
def test_token_counts_are_those_of_the_passes_in_order() -> None:
    register_pass(Own("one", kernel_token_counts=(7, 3)))
    register_pass(Own("two", kernel_token_counts=(3, 5)))
    assert kernel_token_counts(with_passes("one")) == (3, 7)
    assert kernel_token_counts(with_passes("one", "two")) == (3, 5, 7)
    assert kernel_token_counts(with_passes()) == kernel_token_counts(with_passes("nobody")) == ()
    assert kernel_token_counts(with_passes("small_batch_linear")) == (1, 8, 32, 64)
    adapted = replace(with_passes("one"), adapters=AdapterConfig(max_loras=1, max_lora_rank=4, max_cpu_loras=1))
    assert kernel_token_counts(adapted) == tuple(sorted({3, 7, *Adapters.kernel_token_counts}))


@pytest.mark.usefixtures("cleared")
def test_graphs_are_split_at_ops_that_write_to_caches() -> None:
    own = SplittingOp("tests::own", print)
    register_pass(Own("one", splitting_ops=(own,)))
    found = splitting_ops()
    assert found["tests::own"] is own
    for name, function in ATTENTION_OPS.items():
        assert (found[name].function, found[name].attends, found[name].name) == (function, True, name)
    for name, function in RECURRENCE_OPS.items():
        assert (found[name].function, found[name].attends, found[name].name) == (function, False, name)
    for graph_pass in DEFAULT_PASSES:
        assert all(found[op.name] is op for op in graph_pass.splitting_ops)


@pytest.mark.usefixtures("cleared")
def test_a_pass_is_put_last_or_behind_another_and_taken_back() -> None:
    one, two = Own("one"), Own("two")
    register_pass(one)
    register_pass(two, after="one")
    register_pass(three := Own("three"), after=NAMES[0])
    assert registered_passes() == (DEFAULT_PASSES[0], three, *DEFAULT_PASSES[1:], one, two)
    check_registered([*NAMES, "two"])
    with pytest.raises(ValueError, match=r"name is 'four'; allowed: three, one, two"):
        unregister_pass("four")
    unregister_pass("one")
    assert registered_passes() == (DEFAULT_PASSES[0], three, *DEFAULT_PASSES[1:], two)
    with pytest.raises(ValueError, match="passes has 'one', which was registered in another process"):
        check_registered(["two", "one", "zero"])
    with pytest.raises(ValueError, match="name is 'two', which is taken"):
        register_pass(Own("two"))
    with pytest.raises(ValueError, match="name is 'rms_norm'; allowed: three, two"):
        unregister_pass("rms_norm")


def test_plugins_are_imported_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "first_plugin.py").write_text("loaded = True\n")
    (tmp_path / "broken_plugin.py").write_text("1 / 0\n")
    load_plugins(["first_plugin"])
    assert sys.modules["first_plugin"].loaded
    with pytest.raises(ValueError, match=r"'broken_plugin', which cannot be imported \(ZeroDivisionError: division"):
        load_plugins(["first_plugin", "broken_plugin"])
    with pytest.raises(ValueError, match=r"'no_plugin', which cannot be imported \(ModuleNotFoundError"):
        load_plugins(["no_plugin"])
    monkeypatch.delitem(sys.modules, "first_plugin")


@pytest.mark.usefixtures("cleared")
def test_compiling_processes_import_what_defines_the_ops() -> None:
    """All but what was written in a script, or has no file."""
    register_pass(Own("here"))
    scripted, nowhere = type("Scripted", (Own,), {}), type("Nowhere", (Own,), {})
    scripted.__module__, nowhere.__module__ = "__main__", "builtins"
    register_pass(scripted("scripted"))
    register_pass(nowhere("nowhere"))
    modules = op_modules()
    assert __name__ in modules
    assert not {"__main__", "builtins"} & {*modules}
    assert modules == tuple(sorted(set(modules)))
    assert {type(graph_pass).__module__ for graph_pass in DEFAULT_PASSES} <= {*modules}
