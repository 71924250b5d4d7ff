"""`compiled-engine bench executor`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.bench_engine import (
    AsJson,
    Batch,
    Repeats,
    ShapeName,
    command_line,
    console,
    engine_options,
    print_json,
    require_fit,
    resolved,
)
from compiled_engine.cli.errors import bad_input_is_reported


@takes_engine_options
def executor(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    batch: Batch = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a round.")] = 64,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """What a decode step pays for running in a worker process: one engine with, one without, on the same device.

    Both are there at once and are measured in turns, with the scheduler, the way to the worker and back, and output.

    JSON: benchmark, results (a list of batch_size, in_process_ms and multiprocess_ms with median and spread, longer_us,
    ratio), steps, repeats, date, machine, model, options, versions, command.

    Examples:

      compiled-engine bench executor --batch 8

      compiled-engine bench executor --shape qwen3-0.6b --max-model-len 2048 --batch 256
    """
    from compiled_engine.bench.engine_steps import STEP_SAMPLES, outputs_needed
    from compiled_engine.bench.executor import CONTEXT, compare_executors, options_for
    from compiled_engine.bench.results import conditions
    from compiled_engine.process.progress import RichProgress

    with bad_input_is_reported(), engine_options(engine, shape) as given:
        sizes = sorted(batch or (1, 256))
        options = options_for(given, sizes[-1], steps)
        config = resolved(options)
        require_fit(config, sizes[-1], CONTEXT + outputs_needed(STEP_SAMPLES * steps))
        results = compare_executors(options, sizes, steps, repeats, RichProgress())
    head = {"benchmark": "executor", "results": results, "steps": steps, "repeats": repeats, "command": command_line()}
    result = head | conditions(config, given, shape)
    if as_json:
        print_json(result)
    else:
        _show(results)


def _show(results: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("decodes", "in process, ms", "in a worker, ms", "longer, us", "ratio", title="A step, medians")
    for record in results:
        times = (f"{record[name]['median']:.3f}" for name in ("in_process_ms", "multiprocess_ms"))
        table.add_row(str(record["batch_size"]), *times, f"{record['longer_us']:.0f}", f"{record['ratio']:.3f}")
    console().print(table)
