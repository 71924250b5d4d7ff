"""`compiled-engine bench step`: where the time of a decode step goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.bench_engine import (
    Batch,
    Repeats,
    ShapeName,
    WarmUp,
    command_line,
    engine_options,
    require_fit,
    resolved,
)
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import AsJson, console, make_folder, print_json


@takes_engine_options
def step(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    batch: Batch = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a round.")] = 64,
    warm_up: WarmUp = 1,
    repeats: Repeats = 3,
    profile: Annotated[
        Path | None, typer.Option(help="Folder for a trace of some steps, which opens in Perfetto.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Split the time of a decode step, in microseconds: schedule, prepare, launch, wait, output, device.

    host is all but waiting. device is from a step's first kernel to its last one, device idle the share of the time in
    which no step was on the device. With drafts it shows the tokens that a step yields for a request, and the time of a
    token. If the engine chooses the number or the sharpness of drafts, it shows the times and the acceptance that
    decide.

    JSON: benchmark, results (a list of batch_size and each figure with median and spread), repeats, date, machine,
    model, options, versions, command; drafts, if the engine chooses their number or sharpness: the metrics that decide,
    by name.

    Examples:

      compiled-engine bench step --batch 1 --batch 8

      compiled-engine bench step --shape qwen3-0.6b --max-model-len 4096 --batch 256 --profile traces

      compiled-engine bench step --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'
    """
    from compiled_engine.bench.engine_steps import CONTEXT, draft_choice, outputs_needed, step_split
    from compiled_engine.bench.engine_steps import profile as write_profile
    from compiled_engine.bench.results import conditions
    from compiled_engine.llm import LLM
    from compiled_engine.process.progress import RichProgress

    with bad_input_is_reported(), engine_options(engine, shape) as options:
        config = resolved(options)
        sizes = sorted(batch or [size for size in (1, 8, 64, 256) if size <= config.scheduler.max_num_seqs])
        require_fit(config, sizes[-1], CONTEXT + outputs_needed(2 * steps, config.max_new_tokens_per_step))
        if profile is not None:
            make_folder("profile", profile)
        with LLM(**options) as llm:
            results = step_split(llm, sizes, steps, warm_up, repeats, RichProgress())
            choice = draft_choice(llm.metrics())
            if profile is not None:
                for size in sizes:
                    write_profile(llm, size, 8, str(profile / f"decode_{size}.json"))
    head = {"benchmark": "step", "results": results, "repeats": repeats, "command": command_line()}
    head |= {"drafts": choice} if choice else {}
    result = head | conditions(config, options, shape)
    if as_json:
        print_json(result)
    else:
        _show(results)
        if choice:
            _show_choice(choice)


def _show(results: list[dict[str, Any]]) -> None:
    from rich.table import Table

    names = ("schedule", "prepare", "launch", "wait", "output", "host", "step", "device")
    drafts = any(record["tokens"] for record in results)
    headings = ["tokens a step", "a token"] if drafts else []
    table = Table("batch", *names, "device idle", *headings, title="Microseconds a step, medians")
    for record in results:
        cells = ["" if record[name] is None else f"{record[name]['median']:.0f}" for name in names]
        idle = "" if record["device_idle"] is None else f"{record['device_idle']['median']:.1%}"
        by_token = [f"{record['tokens']['median']:.2f}", f"{record['token']['median']:.0f}"] if drafts else []
        table.add_row(str(record["batch_size"]), *cells, idle, *by_token)
    console().print(table)


def _show_choice(choice: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    if "draft_sharpness" in choice:
        shares = ", ".join(f"{share:.2f} with {name}" for name, share in choice["draft_sharpness_shares"].items())
        said = f"sharpness of drafts: {choice['draft_sharpness']}; share of right first drafts: {shares}"
        out.print(said, highlight=False)
    if "draft_lengths" not in choice:
        return
    lengths = list(choice["draft_lengths"])
    headings = [f"{length} drafts, ms" for length in lengths]
    table = Table("requests", *headings, "chosen", title="Numbers of drafts: mean times of their steps")
    for size, times in choice["draft_step_ms"].items():
        cells = [f"{times[length]:.3f}" if length in times else "" for length in lengths]
        table.add_row(f"up to {size}", *cells, str(choice["draft_length_chosen"][size]))
    out.print(table)
    shares = ", ".join(f"{share:.2f}" for share in choice["draft_shares"])
    out.print(f"share of right drafts by position, if those before are right: {shares}", highlight=False)
    if "rested" in choice:
        out.print(f"requests that have no drafts any more, so that the head rests: {choice['rested']}", highlight=False)
