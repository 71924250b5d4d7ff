"""The tensors that keep the states of recurrences, and what they keep in addition in an engine with drafts.

A step computes a request's newest token and its drafts, and only afterwards it is known which drafts are right. A state
must then be the one after the last right draft. No state is copied for that, and nothing is undone:

- A convolution's state has its last inputs, each in the slot of its position modulo the number of slots. With a slot
  more for each draft, the inputs before any of the step's tokens are all there. The next step's position says which
  count, so those of wrong drafts are overwritten before they are read.
- A delta rule's state is large, so it only advances by tokens that are certain: a step first applies the right drafts
  of the step before, then the newest token, and stores the state. Drafts are computed from it without storing it. The
  update of each draft (a key, a value and a decay, a small part of a state) is kept in the slot of its position, until
  the next step knows how many were right: all positions from the end of the state to its first token.

The host takes no part, tokens that are sampled again need no care, and a row is complete in itself: copied to another
row, it is a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from compiled_engine.config import RowState

# Names of the module buffers that hold the states.
CONV_STATE, RULE_STATE = "conv_state", "rule_state"
# Names of those that a delta rule has in addition in an engine with drafts.
RULE_DRAFTS, RULE_LENGTHS = "rule_drafts", "rule_lengths"


def with_drafts(states: Iterable[RowState], num_drafts: int) -> tuple[RowState, ...]:
    """Return the tensors for states of an engine in which a step has up to `num_drafts` drafts for a request.

    Shapes: D channels and L inputs of a convolution; H heads, k elements of a key and v of a value of a delta rule.
    """
    return tuple(kept for state in states for kept in _with_drafts(state, num_drafts))


def _with_drafts(state: RowState, num_drafts: int) -> Iterator[RowState]:
    owner, _, kind = state.name.rpartition(".")
    if kind == CONV_STATE:
        num_channels, length = state.shape
        yield replace(state, shape=(num_channels, length + num_drafts))
        return
    yield state
    if num_drafts:
        num_heads, key, value = state.shape
        # The step before has num_drafts positions before the newest token, and this step as many after it. All of them
        # must have different slots.
        yield RowState(f"{owner}.{RULE_DRAFTS}", (num_heads, 2 * num_drafts + 1, key + value + 1), "float32")
        yield RowState(f"{owner}.{RULE_LENGTHS}", (num_heads, value), "int32")


def without_drafts(states: Iterable[RowState], num_drafts: int) -> list[RowState]:
    """Return the states from which `with_drafts` made these."""
    found = []
    for state in states:
        kind = state.name.rpartition(".")[2]
        if kind == CONV_STATE:
            num_channels, num_slots = state.shape
            found.append(replace(state, shape=(num_channels, num_slots - num_drafts)))
        elif kind == RULE_STATE:
            found.append(state)
    return found
