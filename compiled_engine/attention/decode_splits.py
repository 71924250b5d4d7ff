"""Between how many programs a decode splits the keys of each request."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPLITS = 32
# A split is a multiple of this many keys.
GRAIN = 32
# Where splits are there for long contexts alone: how many, and the keys that a context may have to stay in one.
LONG_CONTEXT_SPLITS = 8
SHORT_CONTEXT = 256
# The most keys that one program reads when a few long contexts stand among many short ones.
LONG_SPLIT = 16384


@dataclass(frozen=True)
class Splits:
    """Between how many programs a request's keys are split at most, and the fewest keys that one of them takes."""

    count: int
    min_keys: int


def plan_splits(num_requests: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> Splits:
    """The split rule: a pure function of what a captured graph is keyed by, and of the device.

    num_requests: rows of the batch, padding included. max_seq_len: the host's bound of the contexts.
    A few programs are split until they fill the device once, whatever their contexts. Up to two programs a
    multiprocessor, contexts above SHORT_CONTEXT are split, or the longest would be waited for; contexts above
    LONG_SPLIT always are. Measured on an H200; more programs than that even each other out.
    """
    num_programs, max_seq_len = num_requests * num_kv_heads, max(max_seq_len, 1)
    to_fill = num_sms // num_programs
    if to_fill >= 4:
        splits = Splits(min(to_fill, -(-max_seq_len // GRAIN), MAX_SPLITS), GRAIN)
    elif num_programs <= 2 * num_sms:
        splits = Splits(min(-(-max_seq_len // SHORT_CONTEXT), LONG_CONTEXT_SPLITS), SHORT_CONTEXT)
    else:
        splits = Splits(1, SHORT_CONTEXT)
    to_shorten = min(-(-max_seq_len // LONG_SPLIT), MAX_SPLITS)
    return splits if splits.count >= to_shorten else Splits(to_shorten, LONG_SPLIT // 16)
