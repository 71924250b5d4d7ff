"""Patterns for modules' names: what PEFT's matching finds, without backtracking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_engine.models.checkpoint import name_patterns
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.name_patterns import NamePatterns

MODULES = [
    "lm_head",
    "q_proj",
    *(
        f"{prefix}model.layers.{layer}.{name}"
        for prefix in ("", "language_model.")
        for layer in (0, 1, 10, 21)
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.experts.3.up_proj")
    ),
]
_TEXTS = ("q", "_proj", "proj", "q_proj", "self_attn", "mlp", "layers", "model", "1", "0", "10", "^model", "lm_head")
_SIGNS = (".", r"\.", ".*", ".+", r"\d", r"\d+", "[0-9]", "[^0-9]", "[qkv]", r"\w", r"[\w.]", "2{0,1}", "proj$", r"\b")
# Repetitions are few, and of texts: PEFT's own matching takes years for many of them, or for some in another.
_REPEATED = tuple(
    sign.format(text) for sign in ("(?:{})*", "(?:{})+", "(?:{}){{1,2}}") for text in ("q", "proj", "mlp", "1")
)
ATOMS = st.sampled_from([*_TEXTS, *_SIGNS, *_REPEATED])
PATTERNS = st.recursive(
    st.lists(ATOMS, max_size=5).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("|".join),
        st.tuples(st.sampled_from(["({})", "(?:{})", "({})?"]), inner).map(lambda made: made[0].format(made[1])),
        st.tuples(inner, inner).map("".join),
    ),
    max_leaves=4,
).filter(lambda pattern: sum(map(pattern.count, "*+")) <= 3)


def patterns_of(patterns: dict[str, Any]) -> NamePatterns:
    return NamePatterns(JsonFields("config.json", {"rank_pattern": patterns}), "rank_pattern")


@settings(max_examples=150, deadline=None)
@given(st.lists(PATTERNS, min_size=1, max_size=4, unique=True))
def test_patterns_mean_what_they_mean_to_peft(patterns: list[str]) -> None:
    get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key
    numbers = {pattern: 1.0 + place for place, pattern in enumerate(patterns)}
    found = patterns_of(numbers)
    for module in MODULES:
        assert found.number(module) == numbers.get(get_pattern_key(patterns, module))


def test_names_of_all_modules_may_be_patterns() -> None:
    modules = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(126) for name in "qkvo"]
    numbers = {module: 1.0 + place for place, module in enumerate(modules)}
    found = patterns_of(numbers)
    assert [found.number(module) for module in modules] == list(numbers.values())


@pytest.mark.parametrize(
    "pattern", [r"(\w|\w)*!", r"(\w+\.?)+!", r"((\w*)*)*!", r"(.*)*(.*)*(.*)*x!", r"(\w?){200}\w{200}!"]
)
def test_no_pattern_is_matched_by_backtracking(pattern: str) -> None:
    """Each would take Python's `re` longer than any test may run."""
    assert patterns_of({pattern: 2}).number("a" * 400) is None


@pytest.mark.parametrize(
    "pattern",
    ["(", "a)", "*", "(?=q)q_proj", "(?<!q)k", r"(q)\1", "a*+", "(?>a)", "(a{1000}){1000}", "\ud800", "[z-a]"],
)
def test_what_needs_backtracking_is_refused_in_a_line_that_names_the_pattern(pattern: str) -> None:
    with pytest.raises(
        ValueError, match=r"config\.json: rank_pattern must have regular expressions as its names"
    ) as error:
        patterns_of({"q_proj": 1, pattern: 2})
    assert f"got {pattern!r}; allowed: those without lookaround" in str(error.value)
    assert "\n" not in str(error.value)


def test_memory_of_patterns_has_a_bound() -> None:
    patterns: dict[str, Any] = {rf"(a|b){{0,900}}c{i}.{{0,90}}": 1 for i in range(2000)}
    with pytest.raises(ValueError, match="rank_pattern has patterns that are too large, or take too long to match"):
        patterns_of(patterns)


def test_work_of_all_names_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "MOST_SECONDS", 0.05)
    found = patterns_of({rf".*(a|b).{{{i % 20}}}[a-f]{i}": 1 for i in range(2000)})

    def match_all() -> None:
        for i in range(100_000):
            found.number(f"{i}{'abcdef' * 50}")

    with pytest.raises(ValueError, match="take too long to match"):
        match_all()


def test_an_empty_field_has_no_patterns(tmp_path: Path) -> None:
    for text in ("{}", '{"rank_pattern": null}', '{"rank_pattern": {}}'):
        fields = JsonFields.from_text(tmp_path / "config.json", text.encode())
        assert json.loads(text) == fields.values
        assert NamePatterns(fields, "rank_pattern").number("q_proj") is None
