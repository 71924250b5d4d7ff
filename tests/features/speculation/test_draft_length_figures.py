"""What the number of drafts is chosen by, figure by figure: times of steps, shares of right drafts, probes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from compiled_engine.features.speculation.draft_length import DraftLength, Drafts

LENGTHS = (0, 1, 3, 6)  # between which a step of up to 6 drafts chooses


def measured(
    seconds: dict[int, float],
    right: Iterable[int] = (),
    *,
    num_requests: int = 4,
    skips_head: bool = False,
    into: DraftLength | None = None,
) -> DraftLength:
    """Every number of drafts has taken its seconds three times; of each six drafts so many were right."""
    length = into or DraftLength(6, skips_head=skips_head)
    for number in LENGTHS:
        for _ in range(3):
            length.took(num_requests, number, seconds[number])
    for count in right:
        length.verified(6, count)
    return length


def step_ms(length: DraftLength, num_requests: int = 4) -> dict[str, float]:
    found: dict[str, float] = length.metrics()["draft_step_ms"][str(num_requests)]
    return found


@pytest.mark.parametrize(
    ("seconds", "mean"),
    [
        ([4.0], 4.0),
        ([4.0, 2.0, 3.0], 2.0),  # the first three: the least
        ([4.0, 3.0, 2.0], 2.0),
        ([2.0, 2.0, 2.0, 1.0], 1.9),  # then a tenth of the difference
        ([1.0, 1.0, 1.0, 1.5, 1.5], 1.095),
        ([1.0, 1.0, 1.0, 2.0], 1.1),
        ([1.0, 1.0, 1.0, 2.1], 1.0),  # held up
        ([1.0, 1.0, 1.0, 5.0, 6.0], 1.0),
        ([1.0, 1.0, 1.0, 5.0, 6.0, 7.0], 7.0),  # so this is how long they take now
        ([1.0, 1.0, 1.0, 5.0, 6.0, 1.0, 7.0, 8.0], 1.0),
        ([1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 20.0, 20.0], 5.0),
        ([1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 20.0, 20.0, 20.0], 20.0),
    ],
    ids=str,
)
def test_the_time_of_a_step(seconds: list[float], mean: float) -> None:
    length, at_rest = DraftLength(6), DraftLength(6, skips_head=True)
    at_rest.took(4, 0, 9.0)
    for each in seconds:
        length.took(4, 3, each)
        length.took(4, 1, 0.5)
        length.took(40, 3, 0.25)
        at_rest.took(4, 0, each, head_rested=True)
    assert step_ms(length) == {"1": 500.0, "3": pytest.approx(1e3 * mean)}
    assert step_ms(length, 64) == {"3": 250.0}
    assert step_ms(at_rest) == {"0": pytest.approx(1e3 * mean)}


def test_times_of_steps_in_a_row_replace_others() -> None:
    """Where there are no such steps, as where requests always come and go, others will do after a while."""
    length = DraftLength(1)
    chosen = []
    for _ in range(64):
        chosen.append(length.choose(4).number)
        length.took(4, chosen[-1], 1.0 + chosen[-1], in_a_row=False)
    assert chosen == [1] * 32 + [0] * 32
    assert step_ms(length) == {"0": 1e3, "1": 2e3}
    for number in (0, 1):
        length.took(4, number, 3.0)
        length.took(4, number, 0.5, in_a_row=False)
    assert step_ms(length) == {"0": 3e3, "1": 3e3}


def test_steps_of_about_as_many_requests_have_times_in_common() -> None:
    length = DraftLength(1)
    for num_requests, size in ((33, 64), (17, 32), (16, 16), (9, 16), (8, 8), (5, 8), (4, 4), (3, 4), (2, 2), (1, 1)):
        length.took(num_requests, 0, 1.0)
        assert str(size) in length.metrics()["draft_step_ms"]
    assert list(length.metrics()["draft_step_ms"]) == ["1", "2", "4", "8", "16", "32", "64"]


def test_the_time_without_drafts_is_that_at_rest_once_it_is_known() -> None:
    length = DraftLength(6, skips_head=True)
    for number in (6, 0, 3):
        length.took(4, number, 1.0 + number)
    assert step_ms(length) == {"0": 1e3, "3": 4e3, "6": 7e3}
    length.took(4, 0, 0.25, head_rested=True)
    assert list(step_ms(length).items()) == [("0", 250.0), ("3", 4e3), ("6", 7e3)]


@given(drafts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=120))
def test_the_share_of_a_position_is_that_of_drafts_behind_right_ones(drafts: list[tuple[int, int]]) -> None:
    """It begins as that of eight drafts, of which 70 % were right; from fifty on the newest counts for 2 %."""
    length = DraftLength(3)
    assert length.metrics()["draft_shares"] == [0.7, 0.7, 0.7]
    outcomes: list[list[float]] = [[0.7] * 8 for _ in range(3)]
    for num_drafts, num_right in drafts:
        right = min(num_drafts, num_right)
        length.verified(num_drafts, right)
        for position in range(num_drafts):
            outcomes[position].append(float(position < right))
            if position == right:
                break  # what comes behind a wrong one tells nothing

    def share(seen: list[float]) -> float:
        found = sum(seen[:50]) / len(seen[:50])
        for each in seen[50:]:
            found += 0.02 * (each - found)
        return found

    assert length.metrics()["draft_shares"] == pytest.approx([share(seen) for seen in outcomes], abs=6e-4)


def test_every_number_is_measured_three_times_the_longest_first() -> None:
    length = DraftLength(6)
    chosen = []
    for _ in range(12):
        chosen.append(length.choose(4).number)
        length.took(4, chosen[-1], 1.0 + chosen[-1])
    assert chosen == [6] * 3 + [3] * 3 + [1] * 3 + [0] * 3
    metrics = length.metrics()
    assert metrics["draft_lengths"] == {"0": 3, "1": 3, "3": 3, "6": 3}
    assert metrics["draft_length_chosen"] == {"4": 0}


@pytest.mark.parametrize(
    ("num_requests", "num_drafting", "number"), [(4, 4, 6), (4, 2, 6), (4, 1, 0), (5, 3, 6), (5, 2, 0), (0, 0, 0)]
)
def test_what_is_unknown_is_measured_in_steps_of_which_half_have_drafts(
    num_requests: int, num_drafting: int, number: int
) -> None:
    assert DraftLength(6).choose(num_requests, num_drafting) == (number, False)


SECONDS = st.fixed_dictionaries({number: st.floats(0.5, 8.0) for number in LENGTHS})


@given(
    seconds=SECONDS,
    at_rest=st.none() | st.floats(0.3, 4.0),
    right=st.lists(st.integers(0, 6), max_size=40),
    num_drafting=st.integers(1, 4),
    skips_head=st.booleans(),
)
def test_the_number_that_yields_most_tokens_in_a_second(
    seconds: dict[int, float], at_rest: float | None, right: list[int], num_drafting: int, skips_head: bool
) -> None:
    """Another one than none must be better by 3 % if all requests had drafts; then those that have them count."""
    length = measured(seconds, right, skips_head=skips_head)
    if skips_head and at_rest is not None:
        length.took(4, 0, at_rest, head_rested=True)
    shares = length.metrics()["draft_shares"]
    without = (0.75 * seconds[0] if at_rest is None else at_rest) if skips_head else seconds[0]

    def rates(seconds: dict[int, float], drafting: float) -> dict[int, float]:
        tokens, product = [1.0], drafting
        for share in shares:
            product *= share
            tokens.append(tokens[-1] + product)
        return {number: tokens[number] / seconds[number] for number in LENGTHS}

    def best(rate: dict[int, float]) -> int:
        first, second = sorted(rate, key=lambda number: -rate[number])[:2]
        assume(rate[first] > 1.01 * rate[second])  # shares are rounded
        return first

    rate = rates(seconds | {0: without}, 1.0)
    expected = best(rate)
    assume(expected == 0 or abs(rate[expected] / rate[0] / 1.03 - 1) > 0.01)
    if rate[expected] <= 1.03 * rate[0]:
        expected = 0
    chosen = length.choose(4, num_drafting)
    assert length.metrics()["draft_length_chosen"] == {"4": expected}
    if expected == 0:
        assert chosen == (0, skips_head)
    else:
        if num_drafting < 4:
            expected = best(rates(seconds, num_drafting / 4))
        assert chosen == (expected, False)


def probes(length: DraftLength, num_steps: int, num_requests: int = 4) -> list[int]:
    """The numbers of the steps, from 1 on, that have most drafts."""
    return [step for step in range(1, num_steps + 1) if length.choose(num_requests).number == 6]


WORTHLESS = [0] * 200


@pytest.mark.parametrize(("longest", "every"), [(1.2, 64), (1.64, 64), (1.9, 90), (3.0, 200)])
def test_probes_come_as_often_as_they_may_cost(longest: float, every: int) -> None:
    """Every 64 steps, or as seldom as makes them 1 % of the time."""
    length = measured({0: 1.0, 1: 1.1, 3: 1.15, 6: longest + 1e-9}, WORTHLESS)
    found = probes(length, 5 * every + 9)
    assert found == pytest.approx([every * number for number in range(1, 6)], abs=5)
    assert {later - earlier for earlier, later in pairwise(found)} <= {every, every + 1}


def test_probes_of_a_head_come_in_fours() -> None:
    length = measured({0: 1.0, 1: 1.1, 3: 1.15, 6: 1.2}, WORTHLESS, skips_head=True)
    length.took(4, 0, 1.0, head_rested=True)
    assert probes(length, 600) == [start + number for start in (256, 515) for number in range(4)]


def test_a_head_reads_the_prompts_of_those_that_are_to_probe() -> None:
    """Once it is time, a step in which nobody may have drafts is read too."""
    length = measured({0: 1.0, 1: 1.1, 3: 1.15, 6: 1.2}, WORTHLESS, skips_head=True)
    length.took(4, 0, 1.0, head_rested=True)
    assert {length.choose(4, 0) for _ in range(255)} == {Drafts(0, skips_head=True)}
    assert {length.choose(4, 0) for _ in range(5)} == {Drafts(0)}
    assert [length.choose(4, 1) for _ in range(5)] == [Drafts(6)] * 4 + [Drafts(0, skips_head=True)]


def test_where_the_longest_is_best_nothing_is_probed() -> None:
    """Few requests have drafts: however many steps went by, these do not hold up the others."""
    length = measured({0: 1.0, 1: 1.2, 3: 1.5, 6: 2.5}, [6] * 200)
    assert length.choose(4).number == 6
    assert {length.choose(4, 1).number for _ in range(400)} == {3}


def test_fewer_requests_tell_what_pays_until_it_is_measured() -> None:
    """The nearest smaller number of which all times are known, and none that is larger."""
    pays, does_not = {0: 1.0, 1: 1.01, 3: 1.02, 6: 1.03}, {0: 1.0, 1: 3.0, 3: 5.0, 6: 9.0}
    length = measured(pays, [6] * 100, num_requests=8)
    assert length.choose(4, 1) == (0, False)  # nothing is known
    measured(does_not, num_requests=2, into=length)
    assert length.choose(64, 1).number == 6  # as with 8
    assert length.choose(4, 1).number == 0  # as with 2
    length.took(16, 6, 1.0)
    assert length.choose(64, 1).number == 6
    measured(does_not, num_requests=32, into=length)
    assert length.choose(64, 1).number == 0
