"""Digests of what scheduler and runner tell each other: of an engine at work, and of the scheduler's property tests.

A digest is of one field of one kind of message, over all steps in which the field is not at its default. So a field
that moves to another message, or gets another name, keeps its digest, and `differences` of behaviour_record.py takes it
for moved.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from hypothesis import Phase, settings
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider
from hypothesis.stateful import run_state_machine_as_test

from compiled_engine.engine.scheduler import Scheduler
from compiled_engine.features.structured.extras import NAME, masks_in

# Fields that say when something was.
OF_THE_CLOCK = ("scheduled_time",)
# Lists whose entries are messages themselves, and dicts of which each entry is recorded as a field.
MESSAGES_WITHIN = ("new", "others")
FIELDS_WITHIN = ("extras", "columns")


class MessageDigests:
    """Digests messages. `found` has, by field name, how many messages have the field, and a digest of its values."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._counts: dict[str, int] = {}
        self._digests: dict[str, Any] = {}

    def add(self, kind: str, message: Any) -> None:
        for name, value in values_of(message):
            if name in MESSAGES_WITHIN:
                for one in value:
                    self.add(f"{kind}.{name}", one)
            elif name in FIELDS_WITHIN:
                for feature, one in value.items():
                    self._add(f"{kind}.{name}.{feature}", one)
            elif name not in OF_THE_CLOCK:
                self._add(f"{kind}.{name}", value)

    def _add(self, place: str, value: Any) -> None:
        self._counts[place] = self._counts.get(place, 0) + 1
        digest = self._digests.setdefault(place, hashlib.sha256())
        digest.update(f"{self.num_steps} {plain(value)!r}\n".encode())

    def found(self) -> dict[str, str]:
        digests = {name: f"{self._counts[name]} x {each.hexdigest()[:16]}" for name, each in self._digests.items()}
        return {"steps": str(self.num_steps), **digests}


@contextmanager
def recorded_messages(digests: MessageDigests) -> Iterator[None]:
    """Digest all messages that schedulers of this process get and give within a block."""
    schedule, finish_late, update = Scheduler.schedule, Scheduler.finish_late, Scheduler.update

    def recorded_schedule(scheduler: Scheduler) -> Any:
        step = schedule(scheduler)
        if step is not None:
            digests.num_steps += 1
            digests.add("step", step)
        return step

    def recorded_late(scheduler: Scheduler) -> Any:
        made = finish_late(scheduler)
        digests.add("masks", masks_in(made.extras[NAME]))
        return made

    def recorded_update(scheduler: Scheduler, step: Any, result: Any) -> Any:
        digests.add("result", result)
        outputs = update(scheduler, step, result)
        digests.add("outputs", outputs)
        return outputs

    given = {"schedule": recorded_schedule, "finish_late": recorded_late, "update": recorded_update}
    with patch.multiple(Scheduler, **given):
        yield


def values_of(message: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a message that are neither at their defaults nor empty, with their values."""
    is_struct = isinstance(message, msgspec.Struct)
    for each in msgspec.structs.fields(message) if is_struct else fields(message):
        value, default = getattr(message, each.name), each.default
        if default in (MISSING, msgspec.NODEFAULT):
            default = None
        is_default = type(value) is type(default) and value == default
        if not is_default and not (is_empty(value) and is_empty(default)):
            yield each.name, value


def is_empty(value: Any) -> bool:
    return value is None or value is False or (hasattr(value, "__len__") and len(value) == 0)


def plain(value: Any) -> Any:
    """Return the value in types whose text is the same in every process."""
    if isinstance(value, msgspec.Struct) or (is_dataclass(value) and not isinstance(value, type)):
        return {name: plain(each) for name, each in values_of(value)}
    if isinstance(value, torch.Tensor):
        return plain(value.detach().cpu().numpy())
    if isinstance(value, bytes | memoryview):
        return hashlib.sha256(value).hexdigest()[:16]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return sorted((plain(key), plain(each)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    return value


class SeededProvider(PrimitiveProvider):
    """Draws for Hypothesis from one seed alone. Its own provider also draws constants that it finds in the product's
    code, and would draw others after each change."""

    name = "one seed"

    def __init__(self, conjecturedata: Any, /) -> None:
        super().__init__(conjecturedata)
        self._random = random.Random(7)

    def draw_boolean(self, p: float = 0.5) -> bool:
        return self._random.random() < p

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
    ) -> int:
        if weights is not None:
            return self._random.choices(list(weights), list(weights.values()))[0]
        least = -1000 if min_value is None else min_value
        return self._random.randint(least, max(least, 1000) if max_value is None else max_value)

    def draw_float(self, *, min_value: float = -1e9, max_value: float = 1e9, **others: Any) -> float:
        return self._random.uniform(max(min_value, -1e9), min(max_value, 1e9))

    def draw_string(self, intervals: Any, *, min_size: int = 0, max_size: int = 10) -> str:
        size = self._random.randint(min_size, min(max_size, min_size + 10))
        return "".join(chr(intervals[self._random.randrange(len(intervals))]) for _ in range(size))

    def draw_bytes(self, min_size: int = 0, max_size: int = 10) -> bytes:
        return self._random.randbytes(self._random.randint(min_size, min(max_size, min_size + 10)))


def recorded_properties(machine: type[Any], examples: int) -> dict[str, str]:
    """Return digests of the scheduler's messages in random work. machine: SchedulerMachine of its property tests."""
    AVAILABLE_PROVIDERS[SeededProvider.name] = f"{SeededProvider.__module__}.{SeededProvider.__name__}"
    digests = MessageDigests()
    chosen = settings(
        machine.TestCase.settings,
        max_examples=examples,
        backend=SeededProvider.name,
        database=None,
        phases=(Phase.generate,),
        derandomize=False,
    )
    try:
        with recorded_messages(digests):
            run_state_machine_as_test(machine, settings=chosen)
    finally:
        del AVAILABLE_PROVIDERS[SeededProvider.name]
    return digests.found()


def recorded_loads(load: Any, seeds: Sequence[int]) -> dict[str, str]:
    """Return digests of the scheduler's messages under heavy loads, one per seed. load: the property test."""
    digests = MessageDigests()
    run = load.hypothesis.inner_test
    with recorded_messages(digests):
        for seed in seeds:
            for policy in ("fcfs", "priority"):
                for steps_in_flight, num_micro_batches in ((1, 1), (2, 1), (3, 2)):
                    for max_new_tokens_per_step in (1, 4):
                        run(policy, steps_in_flight, num_micro_batches, max_new_tokens_per_step, 0, seed)
    return digests.found()
