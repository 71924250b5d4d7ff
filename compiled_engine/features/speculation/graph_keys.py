"""Defines the keys of CUDA graphs in an engine with drafts: for steps, and for the passes of a draft model or head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher, GraphKey, decode_key

# Tokens per request in a draft model's first pass.
FIRST = 2


@dataclass(frozen=True)
class StepKeys:
    """Maps each key of the dispatcher (the shape of a batch) to the key of the CUDA graph that runs such a step.

    There is a mapping for steps that skip the draft head, and one for other steps. They are equal if no step may skip
    the head.
    """

    unread: Mapping[GraphKey, GraphKey]  # for steps that skip the head
    read: Mapping[GraphKey, GraphKey]  # for all other steps

    @classmethod
    def of(cls, keys: Iterable[GraphKey], longest: int, sizes_read: Sequence[int] | None = None) -> StepKeys:
        """Return the mappings for `keys`, those of the dispatcher.

        A step that has no drafts and does not skip the head is rare, so its graph serves contexts of any length up to
        `longest`, and has one of the sizes `sizes_read`, see SpeculationConfig. None: no step may skip the head.
        """
        same = {key: key for key in keys}
        if sizes_read is None:
            return cls(same, same)
        unread, read = dict(same), dict(same)
        for key in same:
            if key.is_decode and key.max_query_len == 1:
                size = min((s for s in sizes_read if s >= key.num_rows), default=key.num_rows)
                unread[key] = key._replace(without_offsets=True)
                read[key] = decode_key(size, longest)._replace(extra=key.extra)
        return cls(unread, read)

    @property
    def captured(self) -> tuple[GraphKey, ...]:
        """All keys to capture, each once."""
        return tuple(dict.fromkeys((*self.unread.values(), *self.read.values())))


def prefill_head_keys(keys: Iterable[GraphKey], longest: int) -> dict[GraphKey, GraphKey]:
    """Return the keys of the CUDA graphs in which a draft head processes the tokens of a step, by the step's key.

    A graph serves contexts of any length up to `longest`, and steps with any values in `GraphKey.extra`.
    """

    def following(key: GraphKey) -> GraphKey:
        purpose = f"follow-verify-{key.max_query_len}" if key.max_query_len > 1 else "follow-decode"
        return key._replace(purpose=purpose, short=False, max_seq_len=longest, extra=())

    return {key: following(key) for key in keys if key.is_decode}


def model_keys(dispatcher: Dispatcher, lengths: Sequence[int]) -> dict[GraphKey, int]:
    """Return the keys of the graphs that hold all passes of a draft model, with the number of drafts that each makes.

    The keys of `dispatcher` are for batches of the first pass.
    """
    keys = [key for key in dispatcher.keys if key.max_query_len == FIRST and key.is_decode]
    return {drafting(key, length): length for length in lengths if length for key in keys}


def head_keys(dispatcher: Dispatcher, lengths: Sequence[int]) -> dict[GraphKey, int]:
    """Return the keys of the graphs that hold the drafting passes of a head, with the number of drafts each makes."""
    keys = [key for key in dispatcher.keys if key.is_decode]
    return {drafting(key, length): length for length in lengths if length for key in keys}


def drafting(key: GraphKey, num_drafts: int) -> GraphKey:
    """Return the key of the graph that makes num_drafts drafts per request, for a batch of the size of `key`."""
    return key._replace(purpose=f"draft-{num_drafts}")
