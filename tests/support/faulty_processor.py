"""A logits processor that has what a request asks for in extra_args["fault"] happen to it, or to the whole step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import torch

from compiled_engine.sampling.params import SamplingParams

NAME = "faulty_processor:Faulty"
FAILS_TO_START = "faulty_processor:FailsToStart"
SLOW_TO_START = "faulty_processor:SlowToStart"
KILLED_AT_START = "faulty_processor:KilledAtStart"


class Faulty:
    """Faults by name: "nan"; "slow", each step takes longer; "raise", its twentieth step fails after slow ones."""

    def __init__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.faults: dict[int, str] = {}
        self.steps: dict[int, int] = {}

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if params.extra_args is None:
            return False
        self.faults[row], self.steps[row] = params.extra_args["fault"], 0
        return True

    def remove_row(self, row: int) -> None:
        del self.faults[row]

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        for index, row in enumerate(row_index_R.tolist()):
            self.steps[row] += 1
            if self.faults[row] == "nan":
                logits_RV[index, 5] = torch.nan
            if self.faults[row] == "raise" and self.steps[row] == 20:
                raise KeyError("injected")
        if set(self.faults.values()) - {"nan"}:
            time.sleep(0.04)


class FailsToStart(Faulty):
    def __init__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        raise KeyError("injected")


class SlowToStart(Faulty):
    """A processor that takes a minute to be made, and writes a file in its working directory when this begins."""

    def __init__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        with open("starting", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)


class KilledAtStart(Faulty):
    """A processor that kills its process while it is made."""

    def __init__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
