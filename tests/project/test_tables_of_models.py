"""The tables of the documents on families and embeddings, from made-up measurements."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
from folders import REPOSITORY

PLACE = {"date": "2026-01-02", "machine": {"device": "cpu"}, "versions": {"torch": "2.13.0"}}


def module_of_documents(name: str) -> ModuleType:
    docs = str(REPOSITORY / "docs")
    sys.path.insert(0, docs)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(docs)


def difference(largest: float, *, right: bool, tokens_equal: bool | None = None, rate: float | None = None) -> Any:
    return {"largest": largest, "right": right, "tokens_equal": tokens_equal, "tokens_per_s": rate}


def record(name: str, **modes: Any) -> dict[str, Any]:
    shown = module_of_documents("family_tables").SHOWN_PASSES
    passes = [{"name": each, "matches": 2, "contract": 3} for each in shown]
    return {"family": name, "passes": passes, **modes}


def families(*records: dict[str, Any]) -> dict[str, Any]:
    return {"results": list(records), **PLACE}


def test_counts_of_families() -> None:
    first = families(
        record("a", eager=difference(1e-5, right=True), fused=difference(2e-5, right=True)),
        {"family": "b", "refused": "it needs latent attention"},
    )
    second = families(
        record("a", compiled=difference(1e-3, right=False, tokens_equal=False)),
        record("c", compiled=difference(3e-5, right=True, tokens_equal=True)),
    )
    lines = module_of_documents("family_tables").family_counts(first, second).splitlines()[2:]
    assert lines == [
        "| eager | 1 | 1 | 1e-05 |  |",
        "| after passes | 1 | 1 | 2e-05 |  |",
        "| compiled | 2 | 1 | 1e-03 | 1 of 2 |",
    ]


@pytest.mark.parametrize("rate", [None, 1234.5])
def test_a_column_of_rates_stands_where_one_was_measured(rate: float | None) -> None:
    eager = families(record("a", eager=difference(1e-5, right=True)), record("b", eager=difference(1e-6, right=True)))
    compiled = families(record("a", compiled=difference(4e-5, right=True, rate=rate)))
    heading, _, first, second, *_ = module_of_documents("family_tables").families(eager, compiled).splitlines()
    assert ("tok/s" in heading) == (rate is not None)
    assert first.startswith("| a | 1e-05 |  | 4e-05 |" + (" 1,234 |" if rate else " 2/3 |"))
    assert second.startswith("| b | 1e-06 |  |  |")
    assert {line.count("|") for line in (heading, first, second)} == {heading.count("|")}


def test_each_contender_of_embeddings_has_a_column() -> None:
    def row(workload: str, **rates: float) -> dict[str, Any]:
        contenders = {name.replace("_", "-"): {"texts_per_s": {"median": value}} for name, value in rates.items()}
        return {"workload": workload, "ratio": 1.5, "contenders": contenders}

    place = PLACE | {"model": {"name": "m", "dtype": "float32"}}
    before = {"results": [row("2x8", engine=3000.0, transformers=2000.0)], **place}
    more = {"results": [row("9x8", engine=30.0, sentence_transformers=20.0)], **place}
    embeddings = module_of_documents("measured_tables").embeddings
    assert "sentence-transformers" not in embeddings(before)
    heading, _, first, second, *_ = embeddings(before, more).splitlines()
    assert heading.endswith(
        "| engine, texts/s | transformers, texts/s | sentence-transformers, texts/s | best to best |"
    )
    assert first == "| m | 2 x 8 | 3,000 | 2,000 |  | 1.50 |"
    assert second == "| m | 9 x 8 | 30 |  | 20 | 1.50 |"
