"""Main program of worker processes that compile pieces."""

from __future__ import annotations

import importlib
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from compiled_engine.process.worker_program import Answer, Messages, Work, run_workers


def main() -> None:
    """Run the workers, see run_workers.

    - The first message, for all workers, is {"entry": folder, "modules": [names], "settings": {Inductor's}}.
    - Each later message is {"key": key of the piece to compile}.
    - An answer is {"seconds": s}, {"unknown": message} for an op that is not registered in the worker, or {"error":
      text}.
    """
    run_workers(_prepare)


def _prepare(order: dict[str, Any]) -> Work:
    from compiled_engine.graphs.compiler.compat import import_compiler

    importlib.import_module("compiled_engine.graphs.compiler.compile_piece")
    import_compiler()
    return partial(_compile_pieces, order)


def _compile_pieces(order: dict[str, Any], messages: Messages, answer: Answer) -> None:
    import torch._inductor.config as inductor_config

    from compiled_engine.graphs.compiler.compile_piece import compile_piece
    from compiled_engine.graphs.compiler.piece import UnknownTarget

    # After the fork, so that side effects of importing a user's module are not shared.
    for module in order["modules"]:
        importlib.import_module(module)
    # There are many workers already, so Inductor must not start more.
    with inductor_config.patch(order["settings"] | {"compile_threads": 1}):
        for message in messages:
            try:
                answer({"seconds": compile_piece(Path(order["entry"]), message["key"])})
            except UnknownTarget as error:
                answer({"unknown": str(error)})
            except Exception:
                answer({"error": traceback.format_exc()})
