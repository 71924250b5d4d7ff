"""The record of behaviour is the same whenever it is written, and tells what has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import behaviour_features
import behaviour_record
import pytest
from folders import REPOSITORY
from message_record import MessageDigests, recorded_messages, recorded_properties
from simulated_engine import SimulatedEngine, outputs_of

from compiled_engine.engine.scheduler import Scheduler

pytestmark = pytest.mark.usefixtures("one_thread")


def written(path: Path, *features: str) -> Path:
    chosen = [word for feature in features for word in ("--feature", feature)]
    assert behaviour_record.main(["write", str(path), "--part", "features", "--quick", *chosen]) == 0
    return path


@pytest.mark.shown_by(
    "project/test_behaviour_record.py::test_a_record_tells_of_a_change",
    "project/test_behaviour_record.py::test_the_messages_of_random_work_are_the_same_in_every_run",
)
def test_a_record_is_the_same_a_second_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eagerly and with graphs."""
    before, again = (written(tmp_path / f"{number}.json", "recurrences") for number in (1, 2))
    capsys.readouterr()
    assert behaviour_record.main(["compare", str(before), str(again)]) == 0
    assert capsys.readouterr().out == ""
    found = json.loads(before.read_text())
    assert {name.rpartition(", ")[2] for name in found} == {"eager", "graphs"}
    step = found["features: recurrences, graphs"]["a step"]
    assert step["functions"] <= step["calls"]
    assert 0 < step["files"] < step["moves"]


def test_a_record_tells_of_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(tmp_path / "before.json", "classes")
    monkeypatch.setitem(behaviour_features.OPTIONS, "max_num_seqs", 1)
    after = written(tmp_path / "after.json", "classes")
    capsys.readouterr()
    assert behaviour_record.main(["compare", str(before), str(after)]) == 1
    told = capsys.readouterr().out
    assert "features: classes, eager / messages / step.request_ids: " in told
    assert "classes, eager / outputs" not in told  # the vectors are the same


def test_the_messages_of_random_work_are_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "tests" / "engine")
    from test_scheduler_properties import SchedulerMachine

    first = recorded_properties(SchedulerMachine, 12)
    assert recorded_properties(SchedulerMachine, 12) == first
    assert first.keys() >= {"steps", "step.new.token_ids", "step.removed", "masks.words", "result.lengths"}
    build = Scheduler._build_step
    monkeypatch.setattr(
        Scheduler, "_build_step", lambda self, of_step, room, *more: build(self, of_step, min(1, room), *more)
    )
    assert recorded_properties(SchedulerMachine, 12)["step.counts"] != first["step.counts"]


def test_a_field_at_its_default_is_in_no_digest() -> None:
    """So a message with a further field has the digests that it had."""
    digests = MessageDigests()
    engine = SimulatedEngine()
    with recorded_messages(digests):
        engine.add("r", [1, 2, 3], params=outputs_of(4))
        engine.run()
    found = digests.found()
    assert found["steps"] == "4"
    assert found["step.new.token_ids"].startswith("1 x ")
    assert found["step.request_ids"].startswith("4 x ")
    assert not found.keys() & {"step.single", "step.new.extras", "step.samples_late", "result.extras.pooling"}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"a": {"x": 1}}, {"a": {"x": 1}}, []),
        ({"a": {"x": 1}}, {"a": {"x": 2}}, ["a / x: 1 -> 2"]),
        ({"a": {"x": 1}}, {"a": {}}, ["a / x: 1 -> null"]),
        (
            {"a": {"step.slot": "3 x 0123456789abcdef"}},
            {"a": {"step.extras.slot": "3 x 0123456789abcdef"}},
            ["no difference: a: step.slot is now step.extras.slot"],
        ),
        (
            {"a": {"step.slot": "3 x 0123456789abcdef"}},
            {"a": {"step.extras.slot": "4 x 0123456789abcdef"}},
            ['a / step.extras.slot: null -> "4 x 0123456789abcdef"', 'a / step.slot: "3 x 0123456789abcdef" -> null'],
        ),
        (
            {"f": {"a step": {"calls": 9}}},
            {"f": {"a step": {"calls": 8}}},
            ["no difference: f / a step / calls: 9 -> 8"],
        ),
        ({"f": {"a step": {"calls": 8}}}, {"f": {"a step": {"calls": 9}}}, ["f / a step / calls: 8 -> 9"]),
        (
            {"f": {"a step": {"lines of files": 8}}},
            {"f": {"a step": {"lines of files": 9}}},
            ["no difference: f / a step / lines of files: 8 -> 9"],
        ),
    ],
)
def test_what_is_a_difference(before: dict[str, Any], after: dict[str, Any], told: list[str]) -> None:
    assert list(behaviour_record.differences(before, after)) == told
