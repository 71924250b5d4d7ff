from __future__ import annotations

import threading

import pytest

from compiled_engine.process.in_background import InBackground


def test_its_owner_goes_on_meanwhile() -> None:
    go = threading.Event()
    value = InBackground(lambda: go.wait(10) and threading.get_ident())
    go.set()  # would never come if the constructor waited
    assert value.result() not in (False, threading.get_ident())
    assert value.seconds > 0


def test_what_fails_is_raised_by_who_wants_the_result() -> None:
    value = InBackground(lambda: {}["missing"])
    for _ in range(2):
        with pytest.raises(KeyError, match="missing"):
            value.result()
