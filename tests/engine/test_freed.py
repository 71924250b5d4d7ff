"""An engine that nobody refers to is freed at once, without the garbage collector."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from small_engines import PROMPTS, SMALL

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

ENDLESS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}


class Failing:
    """A logits processor that fails, or is interrupted, in its third step."""

    def __init__(self) -> None:
        self.way = ""
        self.num_calls = 0

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        self.way = (params.extra_args or {}).get("way", "")
        if self.way == "add_row":
            raise KeyError("injected")
        return self.way != ""

    def remove_row(self, row: int) -> None: ...

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        self.num_calls += 1
        if self.num_calls % 3 == 0 and self.way == "apply":
            raise KeyError("injected")
        if self.num_calls % 3 == 0 and self.way == "interrupt":
            signal.raise_signal(signal.SIGINT)


class Abandoning:
    """A token mask that lets go of an iterator in the middle of a step."""

    iterator: Any = None

    def allowed(self, output_token_ids: Sequence[int]) -> np.ndarray:
        if len(output_token_ids) == 2:
            self.iterator = None
        return np.full(4096 // 32, -1, np.int32)


def finish(llm: LLM) -> None:
    llm.generate(PROMPTS, SamplingParams(**ENDLESS), use_tqdm=False)


def refuse(llm: LLM) -> None:
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.generate(PROMPTS, SamplingParams(stop_token_ids=[99999]), use_tqdm=False)


def failing(way: str, error: type[BaseException]) -> Callable[[LLM], None]:
    def fail(llm: LLM) -> None:
        params = SamplingParams(**ENDLESS, extra_args={"way": way})
        with pytest.raises(error):
            llm.generate(PROMPTS, params, use_tqdm=False)

    return fail


def fail_in_a_stream(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(**ENDLESS, extra_args={"way": "apply"}))
    with pytest.raises(RuntimeError, match="injected"):
        list(stream)


def fail_another_run(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(**ENDLESS))
    next(stream)
    failing("apply", RuntimeError)(llm)
    with pytest.raises(RuntimeError, match=r"ended this request with it: RuntimeError: .*injected"):
        list(stream)


def abandon(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(**ENDLESS))
    next(stream)


def abandon_within_a_step(llm: LLM) -> None:
    mask = Abandoning()
    mask.iterator = llm.stream(PROMPTS[0], SamplingParams(**ENDLESS))
    next(mask.iterator)
    llm.generate(PROMPTS[1], SamplingParams(**ENDLESS, token_mask=mask), use_tqdm=False)


WAYS: dict[str, Callable[[LLM], None]] = {
    "unused": lambda llm: None,
    "used": finish,
    "refused": refuse,
    "failed in add_row": failing("add_row", RuntimeError),
    "failed in apply": failing("apply", RuntimeError),
    "interrupted": failing("interrupt", KeyboardInterrupt),
    "failed in a stream": fail_in_a_stream,
    "failed in another run": fail_another_run,
    "abandoned": abandon,
    "abandoned within a step": abandon_within_a_step,
}


@pytest.fixture
def _without_collector() -> Iterator[None]:
    """And Python handles SIGINT, as in a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


def tensors() -> dict[int, weakref.ref[torch.Tensor]]:
    """All that there are, the weights and the KV cache of an engine among them."""
    return {id(each): weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left(way: str, one_thread: None) -> None:
    before = tensors()
    llm = LLM(**SMALL, async_scheduling=True, logits_processors=[Failing()])
    made = [each for key, each in tensors().items() if key not in before]
    assert len(made) > 20
    WAYS[way](llm)
    engine = weakref.ref(llm)
    del llm
    assert engine() is None
    assert [each() for each in made] == [None] * len(made)


FIRST = """
import gc, weakref
gc.disable()
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

def use():
    llm = LLM(mode={mode!r}, device="cpu", progress=False, max_model_len=64, num_blocks=64)
    llm.generate("import", SamplingParams(max_tokens=3), use_tqdm=False)
    return weakref.ref(llm)

print(use()() is None)
"""


@pytest.mark.parametrize(
    ("mode", "starts"),
    [
        ("eager", 1),
        pytest.param(
            *("compiled", 2),
            marks=pytest.mark.shown_by(
                "engine/test_callers_settings.py::test_closing_frees_weights_and_kv_cache_at_once"
            ),
        ),
    ],
)
def test_also_the_first_one_of_a_process(mode: str, starts: int) -> None:
    """Modules imported during a start do not hold the engine; the second start finds the compiled code of the first."""
    for _ in range(starts):
        run = subprocess.run(
            [sys.executable, "-c", FIRST.format(mode=mode)], capture_output=True, text=True, check=False
        )
        assert run.stdout.strip() == "True", run.stderr[-2000:]
