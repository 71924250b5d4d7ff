"""Compare variants of an ablation on a text, by their loss and their divergence from a base variant.

Each variant runs in its own process. The base runs first and writes its distributions to a file, which the other
variants read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from compiled_engine.bench.held_out_loss import WINDOW, score, windows_of
from compiled_engine.bench.processes import ProcessError, run_worker
from compiled_engine.bench.variants import Variant
from compiled_engine.llm import LLM
from compiled_engine.process.progress import Progress

# Upper bounds on a text's windows, and on the bytes of its tokens' distributions.
MOST_WINDOWS, MOST_BYTES = 16, 2**30


@dataclass(frozen=True)
class TextWorkload:
    """Workload that scores the first `num_windows` windows of a text."""

    text: str
    num_windows: int
    base: str = ""  # file of the distributions to compare with
    is_base: bool = False  # write that file instead

    def task(self) -> dict[str, Any]:
        """Return the workload as JSON for a worker."""
        return {"kind": "text", "fields": asdict(self)}

    def measure(self, llm: LLM) -> dict[str, Any]:
        """Return a dict with num_tokens, the number of scored tokens, and row, the record of held_out_loss.score.

        The base variant (is_base) also writes its distributions to the file.
        """
        windows = windows_of(llm, self.text)[: self.num_windows]
        base = None
        if not self.is_base:
            with np.load(self.base) as arrays:
                base = [arrays[f"arr_{index}"] for index in range(len(windows))]
        row, distributions = score(llm, windows, base)
        if self.is_base:
            np.savez(self.base, *distributions)
        return {"num_tokens": sum(len(window) - 1 for window in windows), "row": row}


def most_windows(vocab_size: int) -> int:
    """Return how many windows of a text to score: at least 1, and at most MOST_WINDOWS.

    Within these limits, the windows' distributions over the vocabulary take at most MOST_BYTES.
    """
    return max(1, min(MOST_WINDOWS, MOST_BYTES // (4 * vocab_size * WINDOW)))


def compare_on_text(
    base: Variant,
    others: Sequence[Variant],
    shared: Mapping[str, Any],
    workload: TextWorkload,
    progress: Progress,
    run: Callable[[Mapping[str, Any], Mapping[str, Any] | None], dict[str, Any]] = run_worker,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return (figures, errors), each by name of the variant, of `base` and `others`.

    shared: engine options common to all variants. run: runs a workload in a worker process.

    Figures are num_tokens and loss (nats per token). Those of `others` also have difference, divergence
    (Kullback-Leibler from the base in nats: mean, p99) and same_best. If the base fails, no other variant is run.
    """
    found: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        file = str(Path(folder) / "base.npz")
        for variant in (base, *others):
            own = replace(workload, base=file, is_base=variant is base)
            with progress.stage(f"loss: {variant.name}", total=1) as advance:
                try:
                    result = run(variant.engine_options(shared), own.task())
                except ProcessError as error:
                    errors[variant.name] = str(error)
                    if variant is base:
                        break
                else:
                    figures = {"num_tokens": result["num_tokens"], **result["row"]}
                    if variant is not base:
                        figures["difference"] = figures["loss"] - found[base.name]["loss"]
                    found[variant.name] = figures
                advance(1)
    return found, errors
