"""Which cases of tests that are products run without --all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from conftest import cases_left_out


def case(test: str, number: int, one_in: int | None, *, needs_gpu: bool = False) -> Any:
    markers = {} if one_in is None else {"product": SimpleNamespace(kwargs={"one_in": one_in})}
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


def test_one_of_each_product_runs_with_a_gpu_and_without() -> None:
    items = [
        Item(**vars(case("tests/test_a.py::test_both", number, 1000, needs_gpu=number < 4))) for number in range(8)
    ]
    for seed in map(str, range(9)):
        run = {item.get_closest_marker("gpu") is None for item in set(items) - cases_left_out(items, seed)}
        assert run == {False, True}
