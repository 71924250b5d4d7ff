"""What is to be said beside the figures of a load test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compiled_engine.bench.serving.figures import BUSY

# More tokens a part than this are worth a word.
SEVERAL = 1.005


def notes(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """How tokens were counted, and whether the client was the limit."""
    said = []
    if any("chunks" in run["tokens_counted_by"] for run in runs):
        said.append("The server counts no tokens: each part of an answer counts as one.")
    per_part = max((run["tokens_per_chunk"] or 1.0 for run in runs), default=1.0)
    if per_part > SEVERAL:
        said.append(f"Up to {per_part:.2f} tokens a part: ITL is the time between parts, TPOT that of a token.")
    for run in runs:
        client = run["client"]
        if client["is_suspect"]:
            is_busy = client["busiest_share_of_a_core"] > BUSY / 2
            advice = "Use more --client-processes." if is_busy else "Other work on its machine holds it up."
            lag, late = client["loop_lag_ms"]["p99"], client["late_sends_ms"]["p99"]
            said.append(
                f"{run['name']}: the client may be the limit: {client['busiest_share_of_a_core']:.0%} of a core; at the"
                f" 99th percentile it read {lag:.1f} ms and sent {late:.1f} ms late. {advice}"
            )
    return said
