"""A load pays from the number of tokens that measured times say, and the number follows them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.features.kv_offload.break_even import FIRST_GUESS, NEVER, BreakEven, least_tokens
from compiled_engine.features.kv_offload.extras import BLOCKS, STATES

SIZE = 16


@given(
    st.floats(0, 1),
    st.floats(0, 1e-4),
    st.one_of(st.floats(1e-9, 1e-3), st.just(0.0)),
)
def test_fewer_tokens_are_computed_sooner(fixed_s: float, copy_s: float, gain_s: float) -> None:
    compute_s = copy_s + gain_s
    least = least_tokens(fixed_s, copy_s, compute_s)
    assert 1 <= least <= NEVER

    def gain(num_tokens: int) -> float:
        return num_tokens * (compute_s - copy_s) - fixed_s

    if least < NEVER:
        assert gain(least + 1) > 0
    if least > 1:
        assert gain(least - 2) < 1e-12


def test_computing_that_is_faster_than_the_bus_is_never_left_out() -> None:
    assert least_tokens(0.0, 2e-5, 1e-5) == least_tokens(0.0, 1e-5, 1e-5) == NEVER


class Steps:
    """Runs steps of given times, one planned while the previous one runs."""

    def __init__(self, *copy_seconds: dict[str, float]) -> None:
        self.judge, self._number, self._now_s = BreakEven(copy_seconds), 0, 0.0

    def run(self, *steps: tuple[int, float]) -> int:
        """Run steps, each with prompt tokens and seconds. Return the least tokens of a load."""
        ahead = [num_prompt_tokens for num_prompt_tokens, _ in steps[1:]]
        self.judge.planned(self._number, steps[0][0], self._now_s)
        for _, seconds in steps:
            if ahead:
                self.judge.planned(self._number + 1, ahead.pop(0), self._now_s)
            self._now_s += seconds
            self.judge.updated(self._number, self._now_s)
            self._number += 1
        return self.judge.least_tokens(SIZE)


DECODE, PROMPT = (0, 0.004), (1000, 0.034)  # 30 us for each token of a prompt


def test_the_first_guess_holds_until_both_kinds_of_steps_were_timed() -> None:
    steps = Steps({BLOCKS: SIZE * 10e-6})
    assert steps.run(*[PROMPT] * 5, *[DECODE] * 3, *[PROMPT] * 2, *[(255, 1.0)] * 9) == FIRST_GUESS
    assert 395 <= steps.run(PROMPT) <= 405  # 8 ms and 10 us a token, or 30 us a token


def test_the_slowest_rank_counts() -> None:
    steps = Steps({BLOCKS: SIZE * 10e-6}, {BLOCKS: SIZE * 20e-6})
    assert 790 < steps.run(*[DECODE] * 3, *[PROMPT] * 3) < 810


def test_a_snapshot_needs_more_tokens() -> None:
    steps = Steps({BLOCKS: SIZE * 10e-6, STATES: 0.012})
    assert steps.run(*[DECODE] * 3, *[PROMPT] * 3) < 410
    assert 990 < steps.judge.least_tokens(SIZE, has_state=True) < 1010


def test_one_long_step_changes_nothing_and_several_do() -> None:
    """The judgement follows the steps in both directions."""
    steps = Steps({BLOCKS: SIZE * 10e-6})
    before = steps.run(*[DECODE] * 3, *[PROMPT] * 3)
    assert abs(steps.run((0, 2.0), (1000, 2.0), DECODE) - before) <= 1
    slow = (1000, 0.304)
    assert steps.run(*[slow] * 3) < before / 10
    assert before - 5 < steps.run(*[PROMPT] * 100) < before + 5
    assert steps.run(*[(0, 0.04)] * 3) > 5 * before


def test_a_step_that_failed_is_not_timed() -> None:
    steps = Steps({BLOCKS: SIZE * 10e-6})
    before = steps.run(*[DECODE] * 3, *[PROMPT] * 3)
    for number in range(100, 110):
        steps.judge.planned(number, 1000, 0.0)
    steps.judge.failed()
    for number in range(100, 110):
        steps.judge.updated(number, 1e9)
    assert steps.judge.least_tokens(SIZE) == before


def test_ranks_without_times_leave_the_first_guess() -> None:
    assert Steps({}, {}).run(*[DECODE] * 9, *[PROMPT] * 9) == FIRST_GUESS
    assert Steps().run(*[DECODE] * 9, *[PROMPT] * 9) == FIRST_GUESS
