"""The number of programs among which a decode splits the keys of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiled_engine.attention.inputs import AttentionInputs

MAX_SPLITS = 64
# The same if the work list has the contexts.
MAX_LISTED_SPLITS = 16
# A split is a multiple of this many keys.
GRAIN = 32
# The fewest keys of a listed split: of a mixed batch with few rows, times K/V heads, and of any other.
FEW_HEADS = 1024
FEW_ROWS_SPLIT, MANY_ROWS_SPLIT = 128, 256
# Small programs per multiprocessor.
SMALL = 4
# The host's bound of contexts up to which rotation, KV write and attention are one kernel.
MOST_CONTEXT_IN_ONE_KERNEL = 8192
# Context lengths whose keys one program reads, if a Hopper has a multiprocessor for each request and K/V head.
SHORT_CONTEXTS = (256, 512)
MOST_SHORT_REQUESTS = 16
# Up to this many requests, the longer contexts are split into this many parts.
FEW_REQUESTS, FEW_SPLITS = 2, 16
# Most keys read by one program if a few long contexts are among many short ones.
LONG_SPLIT = 16384


@dataclass(frozen=True)
class Splits:
    """The largest number of splits of a request's keys, and the smallest number of keys in a split.

    programs: intended number per multiprocessor: 1, 2 or SMALL.
    """

    count: int
    min_keys: int
    programs: int = 1


def plan_splits(num_requests: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> Splits:
    """The split rule: a pure function of what a captured graph is keyed by, and of the device.

    num_requests: rows of the batch, padding included. max_seq_len: the host's bound of the contexts.
    A few programs are split until there are two for each multiprocessor; up to one a multiprocessor they are split into
    small ones, lest the longest context be waited for; more of them even each other out. Contexts above LONG_SPLIT are
    always split.
    """
    num_programs = num_requests * num_kv_heads
    most = min(max(-(-max_seq_len // GRAIN), 1), MAX_SPLITS)
    to_fill = num_sms // num_programs
    if to_fill >= 8:
        splits = Splits(min(2 * num_sms // num_programs, most), GRAIN, programs=2)
    elif num_programs <= num_sms:
        splits = Splits(min(8, most), GRAIN, programs=SMALL)
    else:
        splits = Splits(1, GRAIN)
    to_shorten = min(-(-max_seq_len // LONG_SPLIT), MAX_SPLITS)
    return splits if splits.count >= to_shorten else Splits(to_shorten, LONG_SPLIT // 16)


def short_contexts_of(num_requests: int, num_kv_heads: int, num_sms: int) -> tuple[int, ...]:
    """Context lengths, ascending, up to which this many decodes use special kernels on Hopper: few decodes whose keys
    fit into a program, and many that are not split.
    """
    num_programs = num_requests * num_kv_heads
    if num_programs > 4 * num_sms:
        return (LONG_SPLIT,)
    if num_programs > 2 * num_sms:
        return SHORT_CONTEXTS[-1], LONG_SPLIT
    if num_programs > num_sms:
        return SHORT_CONTEXTS[-1:]
    return SHORT_CONTEXTS if num_requests <= MOST_SHORT_REQUESTS else ()


def few_short_contexts(num_requests: int, num_kv_heads: int, num_sms: int) -> tuple[int, ...]:
    """Context lengths up to which this many decodes over a cache of 8 bits are one kernel, which reads the keys of a
    request and K/V head in one program if it can."""
    fits = num_requests <= MOST_SHORT_REQUESTS and num_requests * num_kv_heads <= num_sms
    return SHORT_CONTEXTS if fits else ()


def short_splits(num_requests: int, max_seq_len: int, short_contexts: Sequence[int]) -> Splits | None:
    """The splits of decodes up to one of these contexts; None for longer ones.

    A program reads all keys of its request, unless requests are so few that the longer of the contexts are split.
    """
    if max(short_contexts, default=0) < max_seq_len:
        return None
    if num_requests <= FEW_REQUESTS and max_seq_len > short_contexts[0]:
        return Splits(FEW_SPLITS, GRAIN, programs=SMALL)
    return Splits(1, GRAIN)


def contexts_of_drafts(num_requests: int, short_contexts: tuple[int, ...], *, in_one_tile: bool) -> tuple[int, ...]:
    """Return those of these contexts up to which requests with drafts have launches of their own.

    in_one_tile: keys are one tile of their number if requests are few, see short_drafts.py. Otherwise splits differ,
    see short_splits, if requests are very few.
    """
    few = MOST_SHORT_REQUESTS if in_one_tile else FEW_REQUESTS
    return short_contexts if short_contexts == SHORT_CONTEXTS and num_requests <= few else short_contexts[-1:]


def one_kernel_pays(splits: Splits, max_seq_len: int) -> bool:
    """Return whether rotation and KV write are fused into attention: for small programs and short contexts.

    With a single request each program waits for the norm; with long contexts the registers of the first tile are
    missing later.
    """
    return splits.programs == SMALL and max_seq_len <= MOST_CONTEXT_IN_ONE_KERNEL


@dataclass(frozen=True)
class BatchFacts:
    """The facts that a batch's launches follow from: a captured graph's key and the device, never the lengths.

    listed: whether the kernels take their items from the work list, each split being of min_keys keys or more.
    query_len: rows in turn that share a request, where all are decodes.
    """

    num_tokens: int
    num_requests: int
    num_decodes: int
    max_seq_len: int
    listed: bool
    min_keys: int
    query_len: int = 1

    @classmethod
    def of(cls, inputs: AttentionInputs, num_kv_heads: int, num_sms: int) -> BatchFacts:
        num_decodes, query_len, max_seq_len = inputs.host_3.tolist()
        num_tokens, num_requests = inputs.slot_mapping_T.shape[0], inputs.seq_lens_R.shape[0]
        num_heads = num_requests * num_kv_heads
        # Without prompts, fewer programs are split evenly, and more balance each other.
        only_decodes = num_decodes == num_requests
        listed = not only_decodes or (query_len == 1 and num_sms < num_heads <= 2 * num_sms)
        min_keys = FEW_ROWS_SPLIT if num_heads <= FEW_HEADS and num_decodes < num_requests else MANY_ROWS_SPLIT
        return cls(
            num_tokens, num_requests, num_decodes, max_seq_len, listed, min_keys, query_len if only_decodes else 1
        )
