"""The program of the process that checks grammars: it reads a vocabulary once, and forks a process for each grammar.

Nothing can interrupt the library while it compiles, and its own limits do not cover all that it does. So the system
ends the forked process when it exceeds its time or memory. Only the library and the vocabulary are in memory, and a
fork takes milliseconds.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from compiled_engine.grammars.limits import COMPILE_BYTES, STACK_BYTES, error_of, on_large_stack, parser_limits

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# An answer begins with the one when the check does, and with the other when it is done; then comes the error.
BEGUN, CHECKED = b"?", b"="


def main() -> None:
    """Arguments: the descriptor of a socket of packets. Each packet has the seconds that a check may take, and the
    descriptor of a stream on which the grammar comes and the answer goes. stdin: the vocabulary, see `_tokenizer`."""
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        tokenizer = _tokenizer(sys.stdin.buffer.read())
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        while True:
            seconds, descriptors, _, _ = socket.recv_fds(orders, 64, 1)
            if not descriptors:
                return
            with socket.socket(fileno=descriptors[0]) as stream:
                if os.fork() == 0:
                    _check(stream, float(seconds), tokenizer)


def _check(stream: socket.socket, seconds: float, tokenizer: LLTokenizer) -> None:
    """Answer and end the process; without an answer, if it exceeds a limit."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        stream.sendall(BEGUN)
        most = _address_space() + STACK_BYTES + COMPILE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with stream.makefile("rb") as lines:
            grammar = lines.read().decode()
        stream.sendall(CHECKED + on_large_stack(lambda: _error(grammar, tokenizer)).encode())
    finally:
        os._exit(0)


def _error(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return the error of a grammar; empty without one. Its first mask is computed: endlessly recursive rules compile,
    but allow nothing."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return error_of(matcher)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _tokenizer(given: bytes) -> LLTokenizer:
    """given: JSON, the arguments of LLTokenizer; empty for a vocabulary of the 256 bytes and an end of sequence."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if given:
        return LLTokenizer(**json.loads(given))
    return LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=_Bytes.eos_token_id)


class _Bytes:
    """A vocabulary of bytes with the interface of TokenizerWrapper."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
