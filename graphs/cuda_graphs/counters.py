"""CUDA graph counters: replays, padding, and fallbacks with their reason."""

from __future__ import annotations

import logging
from collections import Counter
from enum import Enum
from typing import Any

from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.graphs.cuda_graphs.key import GraphKey

log = logging.getLogger("compiled_engine")


class Fallback(Enum):
    """Why a batch runs without a graph although graphs are enabled."""

    NO_SUCH_GRAPH = "the mode captures only decodes"
    TOO_LARGE = "larger than every captured size"
    DECODES_TOO_LARGE = "more decodes than every captured size"
    HIDDEN_STATES = "prompt log-probabilities need the hidden states"


class GraphCounters:
    """Counts batches; logs a warning at the first batch of decodes that is too large for all graphs."""

    def __init__(self, dispatcher: Dispatcher):
        self._dispatcher = dispatcher
        self._replays: Counter[GraphKey] = Counter()
        self._padded_tokens = 0
        self._fallbacks: Counter[Fallback] = Counter()
        self._decodes: Counter[int] = Counter()
        self._mixed: Counter[int] = Counter()

    def batch(self, num_tokens: int, decodes_only: bool) -> None:
        """Count a batch, whether it is replayed or not."""
        (self._decodes if decodes_only else self._mixed)[num_tokens] += 1

    def replay(self, key: GraphKey, num_tokens: int) -> None:
        self._replays[key] += 1
        self._padded_tokens += key.num_tokens - num_tokens

    def no_key(self, num_tokens: int, decodes_only: bool) -> None:
        """Count a batch for which the dispatcher has no graph."""
        if decodes_only and self._dispatcher.keys:
            self.fallback(Fallback.DECODES_TOO_LARGE, f"{num_tokens} decodes")
        elif self._dispatcher.token_keys:
            self.fallback(Fallback.TOO_LARGE, f"{num_tokens} tokens")
        elif self._dispatcher.decode_keys:
            self.fallback(Fallback.NO_SUCH_GRAPH, f"{num_tokens} tokens")

    def fallback(self, reason: Fallback, batch: str) -> None:
        """Count a batch that runs without a graph. batch: its description for the warning."""
        self._fallbacks[reason] += 1
        if reason is Fallback.DECODES_TOO_LARGE and self._fallbacks[reason] == 1:
            log.warning("a batch runs without a CUDA graph: %s (%s)", reason.value, batch)

    def metrics(self) -> dict[str, Any]:
        """Return the counts since the start; `batch_histogram` shows which sizes are worth capturing."""
        return {
            "graph_replays": self._replays.total(),
            "graph_replays_by_key": {key.name: count for key, count in self._replays.items()},
            "graph_padded_tokens": self._padded_tokens,
            "graph_fallbacks": self._fallbacks.total(),
            "graph_fallbacks_by_reason": {reason.value: count for reason, count in self._fallbacks.items()},
            "batch_histogram": {"decodes": dict(self._decodes), "mixed": dict(self._mixed)},
        }
