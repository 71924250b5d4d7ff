"""What a user's own processing of logits has to look like, and how the engine comes by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from compiled_engine.sampling.params import SamplingParams

METHODS = ("add_row", "remove_row", "apply")


class LogitsProcessor(Protocol):
    """Edits logits on the device, for the requests that it applies to.

    Every running request has a row, a number from 0 to max_num_rows - 1 that it keeps until it is finished, aborted or
    preempted; a preempted request later gets a row again. Steps are launched before the tokens of the one before them
    are known to the host, so a processor gets none in `apply`: what it needs of a request it learns in `add_row`, and
    where a request stands it sees on the device in `positions_R`.

    An exception in any of the methods fails the step: it is raised to the caller, and the requests that run are
    aborted. The engine stays usable.
    """

    def add_row(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """A request takes a row; whether the processor applies to it.

        params: what the request asked for; `params.extra_args` is there for processors. token_ids: the prompt, then
        what was generated before a preemption. Writes to the device belong on the current stream: they come after the
        steps that were launched.
        """
        ...

    def remove_row(self, row: int) -> None:
        """The request of a row for which `add_row` returned True has ended, or was preempted."""
        ...

    def apply(self, logits_RV: torch.Tensor, row_index_R: torch.Tensor, positions_R: torch.Tensor) -> None:
        """Edit logits in place, and return nothing; all rows are of requests for which `add_row` returned True.

        logits_RV: float32 [R, vocabulary]. row_index_R: int32 [R], each request's row, to look up what the processor
        keeps by row. positions_R: int64 [R], the position that the token to be chosen will have, from 0 at the start
        of the prompt. All are on the device. Large batches come in several calls a step, each row in one of them.

        Must not wait for the device (no .item(), .cpu(), .tolist(), boolean indexing, or copies from pageable memory):
        the engine runs ahead of it.
        """
        ...


class LogitsProcessorFactory(Protocol):
    """Makes a processor when the engine starts; a class whose __init__ takes these arguments is one.

    max_num_rows: how many rows there are. device: where the logits are, and what is kept by row belongs.
    """

    def __call__(self, *, max_num_rows: int, vocab_size: int, device: torch.device) -> LogitsProcessor: ...


def is_processor(value: Any) -> bool:
    """Whether it has the methods of a LogitsProcessor; a class is not its instance."""
    return not isinstance(value, type) and has_methods(value)


def has_methods(value: Any) -> bool:
    """Those of a LogitsProcessor, also where it is a class that has them."""
    return all(callable(getattr(value, name, None)) for name in METHODS)


def processor_name(value: Any) -> str:
    """Of a processor, its class; of a factory, its own name."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def build_processors(
    given: Sequence[LogitsProcessor | LogitsProcessorFactory], max_num_rows: int, vocab_size: int, device: torch.device
) -> list[LogitsProcessor]:
    """The processors, made by their factories where that is what was given.

    Raises ValueError, naming it, if a factory fails or returns something else.
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
