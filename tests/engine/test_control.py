"""Calls between steps, and errors on their way from one process to another."""

from __future__ import annotations

import pytest

from compiled_engine.engine.control import ControlError, Failed, FatalError, apply
from compiled_engine.engine.messages import ControlCall


class Target:
    def add(self, a: int, b: int = 1) -> int:
        return a + b

    def fail(self, kind: str) -> None:
        raise {"value": ValueError("odd"), "fatal": FatalError("gone"), "refused": ControlError("no")}[kind]

    def hidden(self) -> None:
        raise AssertionError


def test_a_call_is_a_method_by_name() -> None:
    calls = {name: getattr(Target(), name) for name in ("add", "fail")}
    assert apply(ControlCall("add", {"a": 2}), calls) == 3
    assert apply(ControlCall("add", {"a": 2, "b": 5}), calls) == 7
    with pytest.raises(ControlError, match=r"^call is 'hidden'; allowed: add, fail$"):
        apply(ControlCall("hidden"), calls)
    with pytest.raises(ControlError, match=r"^fail: ValueError: odd$"):
        apply(ControlCall("fail", {"kind": "value"}), calls)
    with pytest.raises(ControlError, match=r"^add: TypeError: "):
        apply(ControlCall("add", {"c": 1}), calls)
    with pytest.raises(FatalError, match=r"^gone$"):
        apply(ControlCall("fail", {"kind": "fatal"}), calls)
    with pytest.raises(ControlError, match=r"^no$"):
        apply(ControlCall("fail", {"kind": "refused"}), calls)


class OwnError(Exception):
    """An exception that another process may not know."""


UNICODE = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("odd"), ValueError, "first: odd"),
        (TypeError("odd"), TypeError, "first: odd"),
        (FileNotFoundError("odd"), FileNotFoundError, "first: odd"),
        (MemoryError("odd"), MemoryError, "first: odd"),
        (NotImplementedError("odd"), NotImplementedError, "first: odd"),
        (OwnError("odd"), RuntimeError, "first: OwnError: odd"),
        (KeyError("odd"), RuntimeError, "first: KeyError: 'odd'"),
        (KeyboardInterrupt("odd"), RuntimeError, "first: KeyboardInterrupt: odd"),
        (UNICODE, RuntimeError, f"first: {UNICODE}"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_error_crosses_with_its_kind_text_and_place(error: BaseException, kind: type[Exception], text: str) -> None:
    try:
        raise error
    except BaseException as raised:
        failed = Failed.of(raised)
    found = failed.as_exception("rank 3", "first: ")
    assert type(found) is kind
    assert str(found) == text
    (note,) = found.__notes__
    assert note.startswith("in rank 3:\nTraceback")
    assert "raise error" in note
    assert str(failed.as_exception("rank 3")) == text.removeprefix("first: ")
