"""What a step costs the host and the device, in counts that are the same on every machine.

    python tests/support/step_trace.py

prints, of a decode step of two requests from LLM.generate with graphs: how many of the product's files and functions it
goes through, the calls, how often one follows another in another file, the lines of the files and of the functions, and
the ops that PyTorch is asked for. The graphs are recorded work: a replay runs its ops again, which count, as a CUDA
graph's kernels do; the functions that it calls for them do not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from recorded_capture import RecordedCapture, RecordedGraph
from torch.utils._python_dispatch import TorchDispatchMode

import compiled_engine
from compiled_engine import graphs, llm_parts, models, passes
from compiled_engine.config import EngineConfig, GraphConfig, GraphMode
from compiled_engine.engine import runner as model_runner
from compiled_engine.engine.core import EngineCore
from compiled_engine.llm import LLM
from compiled_engine.models.bundled import BUNDLED_HEAD_PATH
from compiled_engine.sampling.params import SamplingParams

SIZES, TOKEN_SIZES = (1, 2, 4), (8, 16)
# So many steps are behind the first when counting begins; the cheapest of the next ones, which takes no new block, is
# the steady one.
SETTLED, COUNTED = 8, 6
# The product's code; a wheel has all of it in the first.
FOLDERS = tuple(str(Path(package.__path__[0])) + os.sep for package in (compiled_engine, graphs, models, passes))


@dataclass
class StepTrace:
    """The product's functions that were called from one step to the next, in order, and the ops."""

    functions: list[CodeType] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, int]:
        files = [code.co_filename for code in self.functions]
        return {
            "files": len(set(files)),
            "functions": len(set(self.functions)),
            "moves": sum(one != other for one, other in pairwise(files)),
            "calls": len(files),
            "lines of files": sum(map(lines_of, set(files))),
            "lines of functions": sum(len(set(own_lines(code))) for code in set(self.functions)),
            "ops": self.ops.total(),
        }


@cache
def lines_of(path: str) -> int:
    return len(Path(path).read_text().splitlines())


def own_lines(code: CodeType) -> range:
    lines = [line for _, _, line in code.co_lines() if line]
    return range(code.co_firstlineno, max(lines) + 1)


class _Ops(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self, traces: list[StepTrace]) -> None:
        super().__init__()
        self._traces = traces

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._traces[-1].ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def traced(work: Callable[[], Any]) -> list[StepTrace]:
    """Return traces of the steps of this process's engine during `work`, after one of what precedes the first step."""
    traces = [StepTrace()]
    step, replay = EngineCore.step.__code__, RecordedGraph.replay.__code__
    replaying = False

    def profiled(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal replaying
        if frame.f_code is replay:
            replaying = event == "call"
        elif event == "call" and not replaying and frame.f_code.co_filename.startswith(FOLDERS):
            if frame.f_code is step:
                traces.append(StepTrace())
            traces[-1].functions.append(frame.f_code)

    before = sys.getprofile()
    with _Ops(traces):
        sys.setprofile(profiled)
        try:
            work()
        finally:
            sys.setprofile(before)
    return traces


def steady_step(llm: LLM, **requests: Any) -> StepTrace:
    """Trace a decode step of two requests. requests: further arguments of generate."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [5, 7, 11, 13]}, {"prompt_token_ids": [3, 2]}]
    traces = traced(lambda: llm.generate(prompts, params, use_tqdm=False, **requests))
    return min(traces[SETTLED : SETTLED + COUNTED], key=lambda trace: len(trace.functions))


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Let engines that start on a CPU within a block have graphs, of recorded work."""
    resolve = llm_parts.resolve

    def with_graphs(*arguments: Any) -> EngineConfig:
        config = resolve(*arguments)
        speculation = config.speculation
        if speculation.draft is not None:
            draft = replace(speculation.draft, graph=GraphConfig(GraphMode.FULL_AND_PIECEWISE, SIZES))
            speculation = replace(speculation, draft=draft)
        mode = GraphMode.FULL_AND_PIECEWISE if config.model.recurrences is None else GraphMode.FULL
        return replace(config, graph=GraphConfig(mode, SIZES, TOKEN_SIZES), speculation=speculation)

    with ExitStack() as patches:
        patches.enter_context(patch.object(model_runner, "CudaCapture", RecordedCapture))
        patches.enter_context(patch.object(llm_parts, "resolve", with_graphs))
        yield


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    head = {"method": "eagle3", "model": str(BUNDLED_HEAD_PATH), "num_speculative_tokens": 2}
    options = {"device": "cpu", "mode": "eager", "max_model_len": 256, "num_blocks": 64, "max_num_seqs": 6}
    found = {}
    for name, more in {"plain": {}, "with a head": {"speculative_config": head}}.items():
        with recorded_graphs(), LLM(progress=False, **options | more) as llm:
            found[name] = steady_step(llm).figures()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
