"""The ops that a graph is split at: those that touch the KV cache. The stitched forward calls them directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiled_engine.attention.op import ATTENTION_OPS
from compiled_engine.passes.rope_kv_write import rope_kv_write

SPLITTING_OPS: dict[str, Callable[..., Any]] = ATTENTION_OPS | {"compiled_engine::rope_kv_write": rope_kv_write}
