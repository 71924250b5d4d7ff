"""Logits processors: the interface of users' objects, their construction, and the rows to which each applies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from compiled_engine.process.import_name import import_name
from compiled_engine.rows.staged_writes import upload
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import VocabularySlice

METHODS = ("add_row", "remove_row", "apply")
ALLOWED = f"objects with {', '.join(METHODS)}, classes or functions that make one, and 'package.module:Name'"


class LogitsProcessor(Protocol):
    """Protocol of objects that edit logits on the device, for the requests to which they apply.

    Every running request has a row, a number from 0 to max_num_rows - 1, until it is finished, aborted or preempted; a
    preempted request later gets a new row. Steps are launched before the host has the previous step's tokens, so
    `apply` receives no tokens: `add_row` gives the request, and `positions_R` on the device gives the position of its
    next token.

    An exception in any method fails the step: it is raised to the caller, and running requests are aborted. The engine
    stays usable.
    """

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """Handle a request that takes a row. Return whether the processor applies to it.

        params: the request's parameters; `params.extra_args` is meant for processors. token_ids: the prompt, followed
        by the tokens generated before a preemption. Write to the device on the current stream, which orders writes
        after steps already launched.
        """
        ...

    def remove_row(self, row: int) -> None:
        """Handle the end or preemption of a row's request. Called only for rows whose `add_row` returned True."""
        ...

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        """Edit logits in place, and return None. All rows belong to requests for which `add_row` returned True.

        logits_RV: float32 [R, vocabulary]. row_index_R: int32 [R], each request's row, for lookups in the processor's
        own per-row state. positions_R: int64 [R], the position of the token to be sampled, counted from 0 at the start
        of the prompt. All are on the device. In a large batch, a step may call `apply` several times, each time with
        different rows.

        Must not wait for the device (no .item(), .cpu(), .tolist(), boolean indexing, or copies from pageable memory):
        the engine runs ahead of the device.
        """
        ...


class LogitsProcessorFactory(Protocol):
    """Makes a processor when the engine starts; a class whose __init__ takes these arguments is a factory.

    max_num_rows: number of rows. device: holds the logits, and should hold the processor's per-row state.
    """

    def __call__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> LogitsProcessor: ...


def is_processor(value: Any) -> bool:
    """Return whether the object has the methods of a LogitsProcessor; False for a class."""
    return not isinstance(value, type) and has_methods(value)


def has_methods(value: Any) -> bool:
    """Return whether the object, or an instance of the class `value`, has the methods of a LogitsProcessor."""
    return all(callable(getattr(value, name, None)) for name in METHODS)


def processor_name(value: Any) -> str:
    """Return the qualified name, with the module, of a processor's class or of a factory."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def build_processors(
    given: Sequence[LogitsProcessor | LogitsProcessorFactory], max_num_rows: int, vocab_size: int, device: torch.device
) -> list[LogitsProcessor]:
    """Return the processors, calling factories to make them.

    Raises ValueError, naming the factory, if a factory fails or returns no processor.
    """
    built: list[LogitsProcessor] = []
    for entry in given:
        made: Any = entry
        if not is_processor(entry):
            name = f"logits_processors: {processor_name(entry)}"
            try:
                made = entry(max_num_rows=max_num_rows, vocab_size=vocab_size, device=device)  # type: ignore[operator]
            except Exception as error:
                raise ValueError(
                    f"{name}(max_num_rows={max_num_rows}, vocab_size={vocab_size}, device={str(device)!r}) failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if not is_processor(made):
                raise ValueError(f"{name} returned {made!r}; allowed: an object with {', '.join(METHODS)}")
        built.append(made)
    return built


def resolve_logits_processors(given: tuple[Any, ...]) -> tuple[LogitsProcessor | LogitsProcessorFactory, ...]:
    """Return the processors and factories of the option logits_processors; entries given as strings are imported.

    Raises TypeError or ValueError, naming the entry, if it cannot be imported or is neither processor nor factory.
    """
    return tuple(_resolve(f"logits_processors[{index}]", entry) for index, entry in enumerate(given))


def _resolve(name: str, given: Any) -> Any:
    found = import_name(name, given) if isinstance(given, str) else given
    usable = is_processor(found) or callable(found)
    if isinstance(found, type):
        usable = has_methods(found)
    if not usable:
        what = f"{given!r}, which is {found!r}" if isinstance(given, str) else repr(given)
        raise TypeError(f"{name} is {what}; allowed: {ALLOWED}")
    return found


class ProcessedRows:
    """Calls processors for the rows to which they apply, in the order in which they were given."""

    def __init__(self, num_rows: int, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._num_rows = num_rows
        self._processors: list[tuple[LogitsProcessor, np.ndarray]] = []
        for each in processors:
            self.add(each)

    def add(self, processor: LogitsProcessor) -> None:
        """Add a processor that is called after the others."""
        self._processors.append((processor, np.zeros(self._num_rows, dtype=bool)))

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """Add a row to all processors. Return whether any applies to it.

        If a processor fails, raises its error after removing the row from the processors that it was added to.
        """
        try:
            for processor, applies_N in self._processors:
                answer = _call(processor, "add_row", row, params, token_ids, num_prompt_tokens)
                if not isinstance(answer, bool):
                    raise TypeError(f"{processor_name(processor)}.add_row must return True or False, got {answer!r}")
                applies_N[row] = answer
        except BaseException:
            self.remove_row(row)
            raise
        return any(applies_N[row] for _, applies_N in self._processors)

    def remove_row(self, row: int) -> None:
        """Remove a row from the processors that apply to it. Stops and raises at the first processor that fails."""
        for processor, applies_N in self._processors:
            if applies_N[row]:
                applies_N[row] = False
                _call(processor, "remove_row", row)

    def apply_(
        self,
        logits_RV: torch.Tensor,
        rows_R: np.ndarray,
        row_index_R: torch.Tensor,
        positions_R: torch.Tensor,
        vocabulary: VocabularySlice,
    ) -> None:
        """Call the processors, which edit the logits of each row in place.

        rows_R, row_index_R: each row's number, on the host and on the device; the arguments are those of
        Sampler.sample, without padding. vocabulary: this rank's columns; if the vocabulary is divided, whole rows are
        gathered for the processors.
        """
        if vocabulary.is_divided:
            whole_RV = vocabulary.gathered(logits_RV)
            self._apply(whole_RV, rows_R, row_index_R, positions_R)
            logits_RV.copy_(vocabulary.of_whole(whole_RV))
        else:
            self._apply(logits_RV, rows_R, row_index_R, positions_R)

    def _apply(
        self, logits_RV: torch.Tensor, rows_R: np.ndarray, row_index_R: torch.Tensor, positions_R: torch.Tensor
    ) -> None:
        for processor, applies_N in self._processors:
            chosen = np.flatnonzero(applies_N[rows_R])
            if len(chosen) == len(rows_R):
                _apply(processor, logits_RV, row_index_R, positions_R)
            elif len(chosen) > 0:
                index = upload(chosen, logits_RV.device)
                part_RV, *rest = (each.index_select(0, index) for each in (logits_RV, row_index_R, positions_R))
                _apply(processor, part_RV, *rest)
                logits_RV.index_copy_(0, index, part_RV)


def _apply(processor: LogitsProcessor, *arguments: torch.Tensor) -> None:
    returned = _call(processor, "apply", *arguments)
    if returned is not None:
        name = f"{processor_name(processor)}.apply"
        raise RuntimeError(f"logits processor {name} must edit in place and return None, got {type(returned).__name__}")


def _call(processor: LogitsProcessor, method: str, *arguments: Any) -> Any:
    """Call a method and return its result. Raises RuntimeError, naming the processor, for any exception in it."""
    try:
        return getattr(processor, method)(*arguments)
    except Exception as error:
        name = f"{processor_name(processor)}.{method}"
        raise RuntimeError(f"logits processor {name} failed: {type(error).__name__}: {error}") from error
