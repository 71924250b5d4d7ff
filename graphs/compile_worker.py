"""A process that compiles pieces: one JSON line in for each piece key, one JSON line out.

It is a fresh process, not a fork, so it inherits no threads, no CUDA context and nothing that the caller's own
torch.compile has left behind.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """First line: {"entry": folder, "modules": [names], "settings": {Inductor's}}; then {"key": ...} until the end.

    Answers {"ready": true}, then {"seconds": s}, {"unknown": message} for an op that is not known here, or
    {"error": text}.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints is not an answer
    order = json.loads(sys.stdin.readline())
    import torch._inductor.config as inductor_config

    from compiled_engine.graphs.compile_piece import compile_piece
    from compiled_engine.graphs.piece import UnknownTarget

    for module in order["modules"]:
        importlib.import_module(module)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer({"ready": True})
    # Workers are many already: Inductor starts none of its own.
    with inductor_config.patch(order["settings"] | {"compile_threads": 1}):
        for line in sys.stdin:
            try:
                answer({"seconds": compile_piece(Path(order["entry"]), json.loads(line)["key"])})
            except UnknownTarget as error:
                answer({"unknown": str(error)})
            except Exception:
                answer({"error": traceback.format_exc()})
