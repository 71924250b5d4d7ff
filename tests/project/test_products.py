"""Which cases of tests run without --all: a few of products, and none that others show."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conftest import cases_left_out

TESTS = Path(__file__).parents[1]


def case(test: str, number: int, one_in: int | None, *, needs_gpu: bool = False, shown: bool = False) -> Any:
    markers = {} if one_in is None else {"product": SimpleNamespace(kwargs={"one_in": one_in})}
    markers |= {"shown_by": SimpleNamespace()} if shown else {}
    markers |= {"gpu": SimpleNamespace()} if needs_gpu else {}
    return SimpleNamespace(nodeid=f"{test}[{number}]", get_closest_marker=markers.get)


def names(items: Any) -> set[str]:
    return {item.nodeid for item in items}


class Item(SimpleNamespace):
    __hash__ = object.__hash__  # as pytest's have


def test_a_seed_chooses_a_few_cases_of_each_product() -> None:
    products = [Item(**vars(case("tests/test_a.py::test_many", number, 10))) for number in range(1000)]
    small = [Item(**vars(case("tests/test_a.py::test_few", number, 10))) for number in range(3)]
    others = [Item(**vars(case("tests/test_b.py::test_whole", number, None))) for number in range(9)]
    chosen = {seed: names(set(products + small + others) - cases_left_out(products + small + others, seed))
              for seed in ("0", "1")}  # fmt: skip
    for run in chosen.values():
        assert names(others) <= run
        assert 50 < len(names(products) & run) < 200
        assert names(small) & run
    assert chosen["0"] != chosen["1"]
    again = [Item(**{**vars(item), "nodeid": item.nodeid.removeprefix("tests/")}) for item in products]
    assert {f"tests/{name}" for name in names(set(again) - cases_left_out(again, "0"))} == names(products) & chosen["0"]


def test_every_value_of_a_parameter_keeps_a_case() -> None:
    items = [Item(**vars(case("tests/test_a.py::test_table", number, 1000))) for number in range(60)]
    for number, item in enumerate(items):
        item.callspec = SimpleNamespace(params={"row": number // 6, "kind": number % 3, "size": number % 2})
        item.get_closest_marker("product").kwargs["each"] = ("row", "kind")
    chosen = {}
    for seed in ("0", "1"):
        run = set(items) - cases_left_out(items, seed)
        chosen[seed] = {item.callspec.params["size"] for item in run}
        assert len(run) == 30
        assert {(item.callspec.params["row"], item.callspec.params["kind"]) for item in run} == {
            (row, kind) for row in range(10) for kind in range(3)
        }
        assert chosen[seed] == {0, 1}
    assert names(set(items) - cases_left_out(items, "0")) != names(set(items) - cases_left_out(items, "1"))


def shown_by(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of the marker in a file, or in one decorator."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "shown_by":
            yield node


def test_what_shows_the_same_is_there_and_runs() -> None:
    texts = {str(path.relative_to(TESTS)): path.read_text() for path in TESTS.rglob("test_*.py")}
    trees = {name: ast.parse(text) for name, text in texts.items() if "shown_by" in text}
    named = [argument for tree in trees.values() for call in shown_by(tree) for argument in call.args]
    assert named
    left_out, runs = set[str](), set[str]()
    for name in {str(argument.value).partition("::")[0] for argument in named if isinstance(argument, ast.Constant)}:
        tree = trees.get(name) or ast.parse(texts.get(name, ""))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function in functions:
            plain = [each for each in function.decorator_list if next(shown_by(each), None) is each]
            (left_out if plain else runs).add(f"{name}::{function.name}")
    for argument in named:
        assert isinstance(argument, ast.Constant)
        assert argument.value in runs, f"{argument.value} {'does not run itself' if argument.value in left_out else ''}"
