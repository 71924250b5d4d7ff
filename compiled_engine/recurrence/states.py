"""The tensors that hold the states of recurrences, and the additional tensors of an engine with drafts.

A step computes a request's newest token and its drafts. Which drafts are accepted is known only afterwards, and the
next step must begin with the state after the last accepted one. No state is copied for that, and none is restored:

- A convolution's state has its last inputs, each in the slot of its position modulo the number of slots. With another
  slot for each draft, the inputs before each token of the step stay there. The inputs of rejected drafts are
  overwritten before they are read, since the next step begins at their positions.
- The matrix states of delta rules and state space models are large, so they advance only by tokens that are certain. A
  step first applies the accepted drafts of the previous step, then the newest token, and stores the state. It computes
  the drafts from there without storing their states. It keeps an update for each draft (a key, a value and a decay,
  small beside a state) in the slot of the draft's position. The next step applies the updates of the positions between
  the state's last token and its own first token.

All of this happens on the device. Tokens that are sampled again change only the position at which the next step begins.
A snapshot is a copy of a request's state after tokens of its prompt, so it needs no updates of drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from compiled_engine.config import RowState

# Names of the module buffers that hold the states.
CONV_STATE, MATRIX_STATE = "conv_state", "matrix_state"
# Names of the buffers that an engine with drafts has in addition for each matrix state.
MATRIX_DRAFTS, MATRIX_LENGTHS = "matrix_drafts", "matrix_lengths"


def with_drafts(states: Iterable[RowState], num_drafts: int) -> tuple[RowState, ...]:
    """Return the state tensors of an engine in which a step has up to `num_drafts` drafts for a request.

    states: those of an engine without drafts. Shapes: a convolution has (D channels, L last inputs), and gets a slot
    for each draft. A matrix state has (H heads, k elements of a key, v elements of a value); it stays as it is, and is
    followed by two more tensors (see Drafted in matrix_states.py), unless num_drafts is 0.
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
        # The previous step's drafts take up to num_drafts positions before the newest token, and this step's as many
        # after it. All of them must have different slots.
        shape = num_heads, 2 * num_drafts + 1, key + value + state.num_decays
        yield RowState(f"{owner}.{MATRIX_DRAFTS}", shape, "float32", in_snapshots=False)
        yield RowState(f"{owner}.{MATRIX_LENGTHS}", (num_heads, value), "int32")


def without_drafts(states: Iterable[RowState], num_drafts: int) -> list[RowState]:
    """Undo `with_drafts`: return the state tensors of an engine without drafts, for the same `num_drafts`."""
    found = []
    for state in states:
        kind = state.name.rpartition(".")[2]
        if kind == CONV_STATE:
            num_channels, num_slots = state.shape
            found.append(replace(state, shape=(num_channels, num_slots - num_drafts)))
        elif kind == MATRIX_STATE:
            found.append(state)
    return found


def divided(states: Sequence[RowState], num_ranks: int) -> tuple[RowState, ...]:
    """Return the state tensors of one of `num_ranks` ranks, which divide the heads.

    Heads of keys, or groups of heads, are divided too; if there are fewer of them than ranks, each rank has one, and
    several ranks have the same one. A convolution has the channels of its rank's queries, keys and values.
    """
    matrices = {state.name: state for state in states if state.name.endswith(f".{MATRIX_STATE}")}

    def of_rank(state: RowState) -> RowState:
        owner, _, kind = state.name.rpartition(".")
        if kind != CONV_STATE:
            groups = local_groups(state.num_groups, num_ranks)
            return replace(state, shape=(state.shape[0] // num_ranks, *state.shape[1:]), num_groups=groups)
        matrix = matrices.get(f"{owner}.{MATRIX_STATE}")
        if matrix is None:
            return replace(state, shape=(state.shape[0] // num_ranks, *state.shape[1:]))
        return replace(state, shape=(sum(channels(of_rank(matrix))), *state.shape[1:]))

    return tuple(of_rank(state) for state in states)


def local_groups(num_groups: int, num_ranks: int) -> int:
    """Return how many of the heads of keys, or groups of heads, one of `num_ranks` ranks has."""
    return num_groups and max(1, num_groups // num_ranks)


def channels(matrix: RowState) -> tuple[int, int, int]:
    """Return the numbers of channels of queries, keys and values that the convolution before a matrix state has."""
    num_heads, key, value = matrix.shape
    return matrix.num_groups * key, matrix.num_groups * key, num_heads * value
