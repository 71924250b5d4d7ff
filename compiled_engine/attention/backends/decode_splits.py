"""Chooses how many programs share the keys of each request in a decode.

Launches are captured in CUDA graphs, so choices depend only on a graph's key and on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_SPLITS = 64
# Most splits of a request in the work list.
MAX_LISTED_SPLITS = 16
# A split is a multiple of this many keys.
GRAIN = 32
# Fewest keys of a listed split, in a mixed batch with up to FEW_HEADS rows times K/V heads, and in other batches.
FEW_HEADS = 1024
FEW_ROWS_SPLIT, MANY_ROWS_SPLIT = 128, 256
# Small programs per multiprocessor.
SMALL = 4
# Most tokens of a context (by the host's bound) for which rotation, KV write and attention are one kernel.
MOST_CONTEXT_IN_ONE_KERNEL = 8192
# Context lengths whose keys one program reads on Hopper, if there is a multiprocessor for each request and K/V head.
SHORT_CONTEXTS = (256, 512)
MOST_SHORT_REQUESTS = 16
# Up to FEW_REQUESTS requests, the longer of the short contexts are split into FEW_SPLITS parts.
FEW_REQUESTS, FEW_SPLITS = 2, 16
# Most keys read by one program if a few long contexts are among many short ones.
LONG_SPLIT = 16384


@dataclass(frozen=True)
class Splits:
    """The number and size of the splits of each request's keys. A program computes one split for one K/V head."""

    count: int  # most splits of a request
    min_keys: int  # fewest keys of a split
    programs: int = 1  # intended number per multiprocessor: 1, 2 or SMALL


def plan_splits(num_requests: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> Splits:
    """Return the splits for a batch of decodes.

    num_requests: padding included. max_seq_len: the host's upper bound of the keys that a request reads. num_sms:
    multiprocessors of the GPU.

    Without splits there is one program per request and K/V head. If there are at least eight multiprocessors for each
    such program, keys are split until there are two programs per multiprocessor. If there is at least one, keys are
    split among up to eight small programs, so that the longest context does not delay the step. If there are more
    programs than multiprocessors, the load evens out, and keys are only split if contexts may exceed LONG_SPLIT.
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
    """Return the context lengths, ascending, up to which Hopper's kernels for short contexts serve these decodes.

    The kernels are launched differently up to each length. Few decodes have the lengths up to which one program can
    read all keys of a request; many decodes have the length up to which keys are not split. Empty if these kernels
    never serve that many decodes.
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
    """Return the context lengths, ascending, up to which one kernel serves these decodes over an 8-bit cache.

    The kernel also rotates queries and keys. A program reads all keys of a request and K/V head, unless the function
    short_splits splits them. Empty if the decodes are too many for this kernel.
    """
    fits = num_requests <= MOST_SHORT_REQUESTS and num_requests * num_kv_heads <= num_sms
    return SHORT_CONTEXTS if fits else ()


def short_splits(num_requests: int, max_seq_len: int, short_contexts: Sequence[int]) -> Splits | None:
    """Return the splits of decodes with short contexts; None if max_seq_len exceeds all short_contexts.

    short_contexts: upper bounds of the context length, ascending. A program reads all keys of its request, except that
    with up to FEW_REQUESTS requests, contexts longer than the first bound are split.
    """
    if max(short_contexts, default=0) < max_seq_len:
        return None
    if num_requests <= FEW_REQUESTS and max_seq_len > short_contexts[0]:
        return Splits(FEW_SPLITS, GRAIN, programs=SMALL)
    return Splits(1, GRAIN)


def contexts_of_drafts(num_requests: int, short_contexts: tuple[int, ...], *, in_one_tile: bool) -> tuple[int, ...]:
    """Return those of `short_contexts` up to which requests with drafts have launches of their own.

    short_contexts: the lengths for requests without drafts, ascending. in_one_tile: whether the kernel of
    short_drafts.py can serve the requests. Its single tile holds all keys, so the tile's size depends on the context.
    Otherwise only the last length counts, except for up to FEW_REQUESTS requests, whose keys short_splits may split.
    """
    few = MOST_SHORT_REQUESTS if in_one_tile else FEW_REQUESTS
    return short_contexts if short_contexts == SHORT_CONTEXTS and num_requests <= few else short_contexts[-1:]


def one_kernel_pays(splits: Splits, max_seq_len: int) -> bool:
    """Return whether one kernel for norm, rotation, KV write and attention is faster than several.

    One kernel is faster if contexts are short and programs small: SMALL of them share a multiprocessor. With a single
    request, programs are larger and would all wait for the norm. With long contexts, the first tile would occupy
    registers that later tiles need.
    """
    return splits.programs == SMALL and max_seq_len <= MOST_CONTEXT_IN_ONE_KERNEL


@dataclass(frozen=True)
class BatchFacts:
    """The properties of a batch that its launches depend on. They follow from a CUDA graph's key and the device."""

    num_tokens: int
    num_requests: int
    num_decodes: int
    max_seq_len: int
    listed: bool  # kernels take their work from the work list
    min_keys: int  # fewest keys of a listed split
    query_len: int = 1  # consecutive rows per request, if all rows are decodes

    @classmethod
    def of(cls, sizes: tuple[int, ...], num_kv_heads: int, num_sms: int) -> BatchFacts:
        """Return the facts of a batch. sizes: AttentionInputs.sizes."""
        num_tokens, num_requests, num_decodes, query_len, max_seq_len = sizes
        num_heads = num_requests * num_kv_heads
        # Without prompts only these batches are listed. With fewer programs, keys are split evenly; with more, the load
        # evens out.
        only_decodes = num_decodes == num_requests
        listed = not only_decodes or (query_len == 1 and num_sms < num_heads <= 2 * num_sms)
        min_keys = FEW_ROWS_SPLIT if num_heads <= FEW_HEADS and num_decodes < num_requests else MANY_ROWS_SPLIT
        return cls(
            num_tokens, num_requests, num_decodes, max_seq_len, listed, min_keys, query_len if only_decodes else 1
        )
