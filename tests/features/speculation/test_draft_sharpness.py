"""The sharpness of drafts is that with which most of them are right."""

from __future__ import annotations

import numpy as np
import pytest

from compiled_engine.features.speculation.draft_sharpness import GREEDY_DRAFTS, LEAST, PROBE_EVERY, DraftSharpness

CANDIDATES = (3.0, 1.0, 1.5, GREEDY_DRAFTS)


def run(sharpness: DraftSharpness, factor: float, num_steps: int, spread: float = 3.0, seed: int = 0) -> list[float]:
    """The choices for a head whose logits are those of the model divided by `factor`."""
    draw, chosen = np.random.default_rng(seed), []
    for _ in range(num_steps):
        choice = sharpness.choose()
        chosen.append(choice)
        for _ in range(4):
            logits, noise = draw.normal(0, spread, 40), draw.gumbel(size=40)
            right = (logits + noise).argmax() == (choice * logits / factor + noise).argmax()
            sharpness.verified(choice, right=bool(right))
    return chosen


@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0])
def test_the_best_is_found(factor: float) -> None:
    sharpness = DraftSharpness(CANDIDATES)
    first = run(sharpness, factor, len(CANDIDATES) * (LEAST // 4 + 2))
    assert set(first) == set(CANDIDATES)
    chosen = run(sharpness, factor, 400, seed=1)
    assert chosen.count(factor) == 400 - 400 // PROBE_EVERY
    metrics = sharpness.metrics()
    assert metrics["draft_sharpness"] == f"{factor:g}"
    assert metrics["draft_sharpness_shares"][f"{factor:g}"] == 1.0
    assert metrics["draft_sharpness_shares"].keys() == {"3", "1", "1.5", "greedy"}


def test_it_follows_the_text() -> None:
    sharpness = DraftSharpness(CANDIDATES)
    run(sharpness, 1.0, 500)
    assert sharpness.best == 1.0
    run(sharpness, 3.0, 6000, seed=1)
    assert sharpness.best == 3.0


def test_without_requests_that_tell_it_is_the_first() -> None:
    sharpness = DraftSharpness(CANDIDATES)
    assert {sharpness.choose() for _ in range(100)} == {3.0}
    assert sharpness.best == 3.0
