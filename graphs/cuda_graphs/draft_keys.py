"""Graph keys of an engine with drafts: of its steps, and of the passes of a draft model or head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.graphs.cuda_graphs.key import GraphKey, decode_key

# Tokens per request in a draft model's first pass.
FIRST = 2


@dataclass(frozen=True)
class StepKeys:
    """The keys of step graphs, by the dispatcher's key: two tables, which differ if the draft head may be skipped."""

    no_head: Mapping[GraphKey, GraphKey]  # for steps in which the draft head does not run
    read: Mapping[GraphKey, GraphKey]  # for all other steps

    @classmethod
    def of(cls, dispatcher: Dispatcher, longest: int, sizes_read: Sequence[int] | None = None) -> StepKeys:
        """Make the tables. sizes_read: see SpeculationConfig.

        Steps without drafts in which the head runs are rare: their graphs serve any context up to `longest`.
        """
        keys = {key: key for key in dispatcher.keys}
        if sizes_read is None:
            return cls(keys, keys)
        no_head, read = dict(keys), dict(keys)
        for key in keys:
            if key.is_decode and key.max_query_len == 1:
                size = min((s for s in sizes_read if s >= key.num_requests), default=key.num_requests)
                no_head[key] = replace(key, no_head=True)
                read[key] = replace(decode_key(size, longest), extra=key.extra)
        return cls(no_head, read)

    @property
    def captured(self) -> tuple[GraphKey, ...]:
        """All keys, without duplicates."""
        return tuple(dict.fromkeys((*self.no_head.values(), *self.read.values())))


def prefill_head_keys(keys: Iterable[GraphKey], longest: int) -> dict[GraphKey, GraphKey]:
    """Return the keys of the graphs in which a head processes the tokens of a step, by the step's key.

    Each serves contexts of any length up to `longest`, and steps with further fields.
    """
    decodes = (key for key in keys if key.is_decode)
    return {key: replace(key, prefills_head=True, short=False, max_seq_len=longest, extra=()) for key in decodes}


def model_keys(dispatcher: Dispatcher, lengths: Sequence[int]) -> tuple[GraphKey, ...]:
    """Return the keys of the graphs with all passes of a draft model, for each number of drafts.

    dispatcher: for rows of the first pass.
    """
    keys = [key for key in dispatcher.keys if key.max_query_len == FIRST and key.is_decode]
    return tuple(replace(key, drafts=length) for length in lengths if length for key in keys)


def head_keys(dispatcher: Dispatcher, lengths: Sequence[int]) -> tuple[GraphKey, ...]:
    """Return the keys of the graphs with a head's drafting passes, for each number of drafts."""
    keys = [key for key in dispatcher.keys if key.is_decode]
    return tuple(replace(key, drafts=length) for length in lengths if length for key in keys)
