from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial

import pytest

from compiled_engine.process.in_background import InBackground


def test_its_owner_goes_on_meanwhile() -> None:
    go = threading.Event()
    value = InBackground(lambda: go.wait(10) and threading.get_ident())
    go.set()  # would never come if the constructor waited
    assert value.result() not in (False, threading.get_ident())
    assert value.seconds > 0


def test_what_it_called_is_not_kept() -> None:
    """The function may refer to the owner of the result, and so to much memory."""

    class Owner:
        value: InBackground[None]

    owner = Owner()
    owner.value = InBackground(partial(setattr, owner, "made", True))
    owner.value.result()
    there = weakref.ref(owner)
    gc.disable()
    del owner
    deadline = time.monotonic() + 60  # until the thread has let go of its work
    try:
        while there() is not None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        gc.enable()


def test_what_fails_is_raised_by_who_wants_the_result() -> None:
    value = InBackground(lambda: {}["missing"])
    for _ in range(2):
        with pytest.raises(KeyError, match="missing"):
            value.result()
