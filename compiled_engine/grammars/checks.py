"""Grammars are compiled in a process that can be ended before this one compiles them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from compiled_engine.grammars.check_program import BEGUN, CHECKED
from compiled_engine.grammars.limits import LONGEST_COMPILE_S, QUICK_COMPILE_S, CompileTime, TakesTooLong
from compiled_engine.messages import GrammarVocabulary
from compiled_engine.process.child import start_process
from compiled_engine.process.smallest_first import TurnsOutLarge

# Seconds for which the process may start and read a vocabulary.
START_S = 60.0

Result = TypeVar("Result")


def tokenizer_arguments(vocabulary: GrammarVocabulary) -> dict[str, Any]:
    """Return the arguments of LLTokenizer."""
    return {
        "tokenizer": vocabulary.tokenizer,
        "n_vocab": vocabulary.vocab_size,
        "eos_token": sorted(vocabulary.eos_token_ids),
    }


class GrammarChecks:
    """A process that checks grammars, for callers in several threads. It starts with the first check, is started again
    if it was killed, and ends with this process.

    vocabulary: of the model, which a grammar with special tokens needs. None: one of bytes.
    """

    def __init__(self, vocabulary: GrammarVocabulary | None = None) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    def error(self, grammar: str, within: CompileTime) -> str:
        """Return why a grammar cannot be compiled; empty if it can. Raises TakesTooLong, and OSError if the
        process cannot start, or ended."""
        own, theirs = socket.socketpair()
        with own:
            with theirs:
                seconds = within.left()
                self._order(seconds, theirs)
            own.settimeout(START_S + seconds)
            answer = _exchange(own, grammar.encode())
        if not answer:
            raise OSError("the process that checks grammars has ended")
        if not answer.startswith(BEGUN + CHECKED):
            raise TakesTooLong
        return answer.removeprefix(BEGUN + CHECKED).decode()

    def close(self) -> None:
        """End the process. A later check starts another."""
        with self._lock:
            self._end()

    def _order(self, seconds: float, stream: socket.socket) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if self._orders is None:
                self._orders = self._start()
            socket.send_fds(self._orders, [str(seconds).encode()], [stream.fileno()])

    def _start(self) -> socket.socket:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "wb") as nowhere:
            self._process = start_process(
                "compiled_engine.grammars.check_program",
                [str(theirs.fileno())],
                [theirs.fileno()],
                has_input=True,
                output=nowhere,  # of a process that exceeds its memory
                environment={"MALLOC_ARENA_MAX": "1"},  # address space is bounded, and an arena reserves much of it
            )
        given = b"" if self._vocabulary is None else json.dumps(tokenizer_arguments(self._vocabulary)).encode()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # the answers that do not come say it
            stdin.write(given)
        return own

    def _end(self) -> None:
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._orders = self._process = None


def _exchange(stream: socket.socket, question: bytes) -> bytes:
    """Return the answer; as much of it as there is when the other end closes, or is too slow."""
    parts: list[bytes] = []
    with suppress(BrokenPipeError):  # it has ended before it read everything
        stream.sendall(question)
        stream.shutdown(socket.SHUT_WR)
    with suppress(ConnectionResetError, TimeoutError):
        while part := stream.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def in_turn(work: Callable[[CompileTime], Result]) -> Callable[[], Result]:
    """Return work for SmallestFirst that checks grammars: what takes more than a moment is begun again as large work.

    So a short grammar that takes long holds up other short ones for this moment only. Its time counts from now on.
    """
    begun = time.monotonic()

    def last() -> Result:
        return work(CompileTime(LONGEST_COMPILE_S - (time.monotonic() - begun)))

    def first() -> Result:
        try:
            return work(CompileTime(QUICK_COMPILE_S))
        except TakesTooLong:
            raise TurnsOutLarge(last) from None

    return first
