"""A process that compiles pieces: one JSON line in for each piece key, one JSON line out."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

from compiled_engine.process.worker_process import messages_and_answer


def main() -> None:
    """First line: {"entry": folder, "modules": [names], "settings": {Inductor's}}; then {"key": ...} until the end.

    Answers {"ready": true}, then {"seconds": s}, {"unknown": message} for an op that is not known here, or
    {"error": text}.
    """
    messages, answer = messages_and_answer()
    order = next(messages)
    import torch._inductor.config as inductor_config

    from compiled_engine.graphs.compiler.compile_piece import compile_piece
    from compiled_engine.graphs.compiler.piece import UnknownTarget

    for module in order["modules"]:
        importlib.import_module(module)

    answer({"ready": True})
    # Workers are many already: Inductor starts none of its own.
    with inductor_config.patch(order["settings"] | {"compile_threads": 1}):
        for message in messages:
            try:
                answer({"seconds": compile_piece(Path(order["entry"]), message["key"])})
            except UnknownTarget as error:
                answer({"unknown": str(error)})
            except Exception:
                answer({"error": traceback.format_exc()})
