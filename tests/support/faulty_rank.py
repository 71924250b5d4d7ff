"""A logits processor whose faults befall one rank alone, or all: what requests ask for in extra_args, or its name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

import torch

from compiled_engine.parallel.group import current_group
from compiled_engine.sampling.params import SamplingParams

NAME = "faulty_rank:FaultyRank"
FAILS_TO_START = "faulty_rank:FailsToStart"
SLOW_TO_START = "faulty_rank:SlowToStart"
FAILS_INSIDE = "faulty_rank:FailsInside"
INSIDE, DEED = "FAULTY_RANK_INSIDE", "FAULTY_RANK_DEED"
RANK = 1


class FaultyRank:
    """Faults, of the last rank where it does not say otherwise: "raise", "memory", "stop" (the process is stopped),
    "kill"; "all": every rank raises."""

    def __init__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.faults: dict[int, str] = {}

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if params.extra_args is None:
            return False
        self.faults[row] = params.extra_args["fault"]
        return True

    def remove_row(self, row: int) -> None:
        del self.faults[row]

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        faults = set(self.faults.values())
        if "all" in faults:
            raise KeyError("injected in all")
        if current_group().rank != current_group().size - 1:
            return
        if "raise" in faults:
            raise KeyError("injected in one")
        if "memory" in faults:
            raise torch.OutOfMemoryError("injected: out of memory")
        if "stop" in faults:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "kill" in faults:
            os.kill(os.getpid(), signal.SIGKILL)


class FailsToStart(FaultyRank):
    def __init__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_num_rows=max_num_rows, vocab_size=vocab_size, device=device)
        if current_group().rank == RANK:
            raise torch.OutOfMemoryError("injected: out of memory")


class SlowToStart(FaultyRank):
    """A processor that writes a file in its working directory while it is being made."""

    def __init__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        with open(f"starting{current_group().rank}", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)


class FailsInside(FaultyRank):
    """Kills or stops a starting process that calls a function: the last rank, or the process that compiles.

    Environment variables: INSIDE names the function; DEED the signal.
    """

    def __init__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_num_rows=max_num_rows, vocab_size=vocab_size, device=device)
        function = os.environ[INSIDE]
        group = current_group()
        if function == "compile_pieces" or group.rank == group.size - 1:
            threading.Thread(target=_watch, args=(function, signal.Signals[os.environ[DEED]]), daemon=True).start()


def _watch(function: str, deed: signal.Signals) -> None:
    while not any(function in names for names in map(_callers, sys._current_frames().values())):
        time.sleep(0.0005)
    os.kill(os.getpid(), deed)


def _callers(frame: FrameType | None) -> set[str]:
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names
