"""`compiled-engine bench startup`: the time from process start to first token, by stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.bench_engine import Repeats, ShapeName, command_line, engine_options, resolved
from compiled_engine.cli.errors import BadInputError, bad_input_is_reported
from compiled_engine.cli.output import AsJson, console, print_json

BAR_WIDTH = 40


@takes_engine_options
def startup(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="Uncounted pairs of starts.")] = 0,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the seconds from the start of a process to its first token, cold (empty compile cache) and warm.

    Every start is a fresh process, and its imports count. Each pair of a cold and a warm start has a temporary cache.
    With --shape the checkpoint has a tokenizer of 151,000 tokens, as the real ones have. The bound is a process that
    imports PyTorch and computes a number on the device, measured in turn with the starts.

    JSON: benchmark, results (cold, warm: seconds with median and spread, cache, start_up: the stages), torch_alone (the
    bound, with median and spread), repeats, date, machine, model, options, versions, command.

    Examples:

      compiled-engine bench startup --repeats 1

      compiled-engine bench startup --shape qwen3-0.6b --max-model-len 4096 --json
    """
    with bad_input_is_reported(), engine_options(engine, shape) as options:
        for name in ("cache_dir", "compile_cache"):
            if name in options:
                raise ValueError(f"{name} is {str(options[name])!r}; allowed: none, since each start has its own cache")
        config = resolved(options)

        from compiled_engine.bench.large_tokenizer import write_tokenizer
        from compiled_engine.bench.processes import ProcessError
        from compiled_engine.bench.results import conditions, plain_options
        from compiled_engine.bench.start_up import measure
        from compiled_engine.process.progress import RichProgress

        if shape is not None and "tokenizer" not in options:
            write_tokenizer(config.model.path)
        head = {"benchmark": "startup", "repeats": repeats, "command": command_line()}
        head |= conditions(config, options, shape)
        try:
            starts = measure(plain_options(options), config.device, warm_up, repeats, RichProgress())
        except ProcessError as error:
            raise BadInputError(f"a start failed: {error}") from error
    result = head | {"results": starts.kinds, "torch_alone": starts.torch_alone}
    if as_json:
        print_json(result)
    else:
        _show(result)


def _show(result: Mapping[str, Any]) -> None:
    out = console()
    for kind, record in result["results"].items():
        low, high = record["seconds"]["spread"]
        spread = f", from {low:.2f} to {high:.2f}" if result["repeats"] > 1 else ""
        seconds = f"{record['seconds']['median']:.2f} s{spread}"
        out.print(
            f"{kind}: {seconds}, bound {result['torch_alone']['median']:.2f} (cache: {record['cache']})", style="bold"
        )
        _print_waterfall(record["start_up"], out)


def _print_waterfall(spans: list[dict[str, Any]], out: Console) -> None:
    """Print the stages of a start as bars on one time scale, with parts of a stage below it."""
    end = max(span["start_s"] + span["seconds"] for span in spans)
    depths: dict[str, int] = {}
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    for span in spans:
        depth = depths.get(span["parent"], -1) + 1
        depths[span["name"]] = depth
        left = round(span["start_s"] / end * BAR_WIDTH)
        width = max(1, round(span["seconds"] / end * BAR_WIDTH))
        table.add_row("  " * depth + span["name"], f"{span['seconds']:.2f} s", " " * left + "█" * width)
    out.print(table)
