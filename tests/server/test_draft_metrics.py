"""/metrics has the table by which the number of drafts is chosen, under the names of speculation."""

from __future__ import annotations

import random
from typing import Any

from prometheus_client.core import Metric

from compiled_engine.features.speculation.draft_length import DraftLength
from compiled_engine.features.speculation.draft_sharpness import DraftSharpness
from compiled_engine.server.exposition import engine_families


def values(families: list[Metric], name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Samples of a family by the values of these labels."""
    (family,) = (each for each in families if each.name == f"compiled_engine:{name}")
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in family.samples}


def test_the_table_of_numbers_of_drafts() -> None:
    length, draw = DraftLength(2), random.Random(0)
    for _ in range(300):
        count = length.choose(3).number
        if count:
            length.verified(count, draw.choice((count, count, 0)))
        length.took(3, count, 0.001 * (1 + count / 10))
    families = engine_families(length.metrics(), {"model_name": "bundled"})
    steps = values(families, "spec_decode_num_steps", "num_drafts")
    assert steps.keys() == {("0",), ("1",), ("2",)}
    assert sum(steps.values()) == 300
    assert values(families, "spec_decode_chosen_num_drafts", "batch_size") == {("4",): 2}
    times = values(families, "spec_decode_step_seconds", "batch_size", "num_drafts")
    assert {key: round(value, 4) for key, value in times.items()} == {
        ("4", "0"): 0.001,
        ("4", "1"): 0.0011,
        ("4", "2"): 0.0012,
    }
    shares = values(families, "spec_decode_acceptance_rate_per_pos", "position")
    assert shares.keys() == {("0",), ("1",)}
    assert shares["0",] < 0.9 < shares["1",]


def test_the_sharpness_in_use() -> None:
    sharpness = DraftSharpness((3.0, 1.0))
    for _ in range(400):
        choice = sharpness.choose()
        sharpness.verified(choice, right=choice == 1.0)
    families = engine_families(sharpness.metrics(), {"model_name": "bundled"})
    assert values(families, "spec_decode_draft_sharpness", "sharpness") == {("1",): 1}
    shares = values(families, "spec_decode_draft_sharpness_acceptance_rate", "sharpness")
    assert shares == {("3",): 0, ("1",): 1}


def test_without_a_choice_there_are_no_values() -> None:
    engine: dict[str, Any] = {"draft_tokens": 3}
    families = engine_families(engine, {"model_name": "bundled"})
    for name in ("step_seconds", "acceptance_rate_per_pos", "chosen_num_drafts", "draft_sharpness"):
        assert values(families, f"spec_decode_{name}") == {}
