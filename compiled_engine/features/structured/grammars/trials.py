"""Try grammars where they can be stopped: each in a fork of a small process, with limits of time and memory.

The compiling library has its own limits, which some grammars evade: a schema of 50 bytes compiles forever. A compiling
thread cannot be stopped, but a process can. A grammar that passes its trial may then be compiled by a thread, since the
cost does not depend on the vocabulary.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from compiled_engine.features.structured.grammars.constraint import error_of
from compiled_engine.process.child import start_process
from compiled_engine.process.smallest_first import TakesLong

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Number of compiled grammars, and of trials' errors, in LRU caches.
KEPT_GRAMMARS = 256
# CPU seconds of a grammar: the first try, after which others go first, and the limit.
QUICK_S, LONGEST_S = 0.5, 3.0
# Memory limit of a grammar in bytes, besides its stack.
MOST_MEMORY = 1 << 30
# Stack for recursion as deep as the input is long, in bytes of address space; only the needed part uses memory. The
# longest allowed grammar, with every rule nested in the previous one, needs less than a third. A process that exceeds
# its stack is killed.
STACK_BYTES = 512 * 2**20
_STACK_SIZE = threading.Lock()  # the stack size is a setting of the whole process
# References to tokens of the model's vocabulary: by name, or by ids and ranges of ids.
NAMED_TOKEN = re.compile(r"<[^<>\s]{1,256}>")
NUMBERED_TOKENS = re.compile(r"<\[[\d\s,^-]*\]>")

Result = TypeVar("Result")


class GrammarTrials:
    """Runs trials in a process, which starts with the first trial, and caches the errors found.

    Thread-safe. If this process forks, the child starts a process for its own trials.
    """

    def __init__(self, quick_s: float = QUICK_S, longest_s: float = LONGEST_S, most_memory: int = MOST_MEMORY) -> None:
        self._quick_s, self._longest_s, self._most_memory = quick_s, longest_s, most_memory
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._errors: OrderedDict[str, str | None] = OrderedDict()  # None: exceeded quick_s

    def error(self, grammar: str, *, hurried: bool = False) -> str:
        """Return the error of a grammar; empty without one.

        With `hurried`, the first call for a grammar raises TakesLong if the trial exceeds `quick_s` or the memory
        limit; the next call allows `longest_s`.
        """
        with self._lock:
            is_known, error = grammar in self._errors, self._errors.get(grammar)
            if is_known:
                self._errors.move_to_end(grammar)
        if error is not None:
            return error
        is_quick = hurried and not is_known
        error = self._try(grammar, self._quick_s if is_quick else self._longest_s)
        if error is None and not is_quick:
            memory = f"{self._most_memory >> 20} MiB of memory"
            error = f"it takes more than {self._longest_s:g} s of processor time or {memory} to compile"
        with self._lock:
            self._errors[grammar] = error
            if len(self._errors) > KEPT_GRAMMARS:
                self._errors.popitem(last=False)
        if error is None:
            raise TakesLong
        return error

    def _try(self, grammar: str, seconds: float) -> str | None:
        """Return the error found by a fork of the process; None if the fork exceeded its limits."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._order(theirs, f"{seconds} {self._most_memory}".encode())
            with suppress(OSError):  # the fork ended before it read everything
                ours.sendall(grammar.encode())
                ours.shutdown(socket.SHUT_WR)
                answer = ours.makefile("rb").read()
                return answer[1:].decode() if answer else None
        return None

    def _order(self, theirs: socket.socket, limits: bytes) -> None:
        """Send the connection `theirs` and the limits to the process. If the process has ended, restart it."""
        with self._lock:
            if self._owner == os.getpid() and self._orders is not None:
                with suppress(OSError):
                    socket.send_fds(self._orders, [limits], [theirs.fileno()])
                    return
                self._close()
            self._owner = os.getpid()
            self._orders, read = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with read, open(os.devnull, "wb") as nowhere:
                number = read.fileno()
                self._process = start_process(__name__, [str(number)], [number], output=nowhere)
            socket.send_fds(self._orders, [limits], [theirs.fileno()])

    def close(self) -> None:
        """End the process and its trials. The next trial starts another process."""
        with self._lock:
            if self._owner == os.getpid():
                self._close()

    def _close(self) -> None:
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            self._process.wait()
        self._orders = self._process = None


# --- the process ---


def main() -> None:
    """Fork for each received connection, over which the fork gets one grammar to try. Exit when the caller has ended.

    The program's argument is the file descriptor of the socket over which connections are received.
    """
    import llguidance  # noqa: F401 - for the forks

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks leave no zombies
    orders = socket.socket(fileno=int(sys.argv[1]))
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 64, 1)
        if not order:
            os._exit(0)
        if os.fork() == 0:
            orders.close()
            seconds, memory = order.split()
            _try_one(socket.socket(fileno=descriptors[0]), float(seconds), int(memory))
            os._exit(0)
        os.close(descriptors[0])


def _try_one(connection: socket.socket, seconds: float, memory: int) -> None:
    """Read a grammar, and answer with the byte "=" and the grammar's error, which is empty if it has none.

    The process is killed if it exceeds the limits.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    limit = used + STACK_BYTES + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammar = connection.makefile("rb").read().decode()
    connection.sendall(b"=" + on_large_stack(lambda: _error(grammar)).encode())


def _error(grammar: str) -> str:
    """Return the error of a grammar; empty without one.

    The grammar is compiled for a vocabulary of bytes. Its first mask is computed too, since endlessly recursive rules
    compile but allow nothing. Tokens that the grammar names are assumed to exist.
    """
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    grammar = NUMBERED_TOKENS.sub(f"<[{_Bytes.eos_token_id}]>", grammar)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(set(NAMED_TOKEN.findall(grammar)))), eos_token=_Bytes.eos_token_id)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return error_of(matcher)


class _Bytes:
    """A vocabulary of the 256 bytes and special tokens, with the interface of TokenizerWrapper."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, names: Iterable[str]) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(name.encode() for name in names)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


# --- compiling, in either process ---


def on_large_stack(work: Callable[[], Result]) -> Result:
    """Return the result of `work`, which runs in a new thread with a large stack. Raises the errors of `work`."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _STACK_SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="large stack", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


def parser_limits() -> LLParserLimits:
    """Return the limits of one grammar. Fuel counts steps, a thousand of which take less than a millisecond.

    If a request's grammar exceeds a limit, the request ends with an error.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000,
        max_grammar_size=100_000,
        step_lexer_fuel=20_000,
        step_max_items=3_000,
        max_items_in_row=500,
        max_lexer_states=20_000,
        verbose_errors=False,
    )
