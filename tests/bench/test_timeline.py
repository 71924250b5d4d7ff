"""Where the seconds of a start are counted from."""

from __future__ import annotations

import subprocess
import sys
import time

from compiled_engine.process.timeline import Timeline


def test_time_counts_from_the_start_of_the_process() -> None:
    source = (
        "import time; time.sleep(0.2); from compiled_engine.process import timeline; print(timeline.Timeline().now())"
    )
    start = time.perf_counter()
    told = float(subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout)
    assert 0.2 <= told <= time.perf_counter() - start + 0.02  # the kernel's clock ticks in hundredths


def test_timelines_of_a_process_share_their_origin() -> None:
    """Spans of two of them can then be compared to the microsecond, however busy the machine is."""
    assert len({Timeline().origin_s for _ in range(100)}) == 1


def test_spans_know_what_they_are_a_part_of() -> None:
    timeline = Timeline()
    with timeline.span("compile"), timeline.span("trace"):
        pass
    outer, inner = timeline.as_records()
    assert (outer["name"], outer["parent"], inner["name"], inner["parent"]) == ("compile", None, "trace", "compile")
    assert outer["start_s"] <= inner["start_s"] <= timeline.now()
