"""Options of an engine that starts at once, on a CPU, and prompts for it."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "mode": "eager",
    "device": "cpu",
    "progress": False,
    "max_model_len": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "num_blocks": 64,
}
# Few tokens a step, so that prompts come in chunks. Engines add a number of blocks.
CHUNKED: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "progress": False,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "block_size": 4,
}
PROMPTS = ["def add(a, b):\n", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n"]
