"""`compiled-engine bench prefix`: how soon a prefix comes back from host memory or files."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.bench_engine import (
    Repeats,
    ShapeName,
    WarmUp,
    command_line,
    engine_options,
    require_fit,
    resolved,
)
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import AsJson, console, print_json


@takes_engine_options
def prefix(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    prefix_len: Annotated[int, typer.Option(min=2, help="Tokens of the prefix.")] = 32_000,
    decodes: Annotated[int, typer.Option(min=1, help="Other requests that decode meanwhile.")] = 8,
    warm_up: WarmUp = 1,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the first token of a long prompt whose prefix the KV cache has evicted, and other requests meanwhile.

    Three cases are compared: the prefix is computed, it is in the KV cache, and it comes back from host memory. With
    --kv-offloading-folder it comes back from files, since other prompts evict it from host memory too. A small KV cache
    and host memory make that short: the other prompts fill them.

    JSON: benchmark, first_token and others (each case with median and spread, in ms), others_alone, loaded_blocks,
    read_blocks, prefix_len, decodes, repeats, date, machine, model, options, versions, command.

    Examples:

      compiled-engine bench prefix --shape qwen3-8b --num-blocks 3000 --kv-offloading-size 24

      compiled-engine bench prefix --shape qwen3-8b --num-blocks 3000 --kv-offloading-size 5 --kv-offloading-folder kv
    """
    with bad_input_is_reported(), engine_options(engine, shape) as options:
        from compiled_engine.bench.prefix_return import prefix_return
        from compiled_engine.bench.results import conditions
        from compiled_engine.llm import LLM
        from compiled_engine.process.progress import RichProgress

        config = resolved(options)
        require_fit(config, decodes + 1, prefix_len + 1)
        if not config.cache.host_blocks:
            raise ValueError("kv_offloading_size is None; allowed: GiB of host memory for the prefix")
        with LLM(**options) as llm:
            found = prefix_return(llm, prefix_len, decodes, warm_up, repeats, RichProgress())
    head = {"benchmark": "prefix", **found, "prefix_len": prefix_len, "decodes": decodes, "repeats": repeats}
    result = head | {"command": command_line()} | conditions(config, options, shape)
    if as_json:
        print_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("prefix", "first token", "a step meanwhile", title=f"{result['prefix_len']:,} tokens, ms, medians")
    for case, first in result["first_token"].items():
        table.add_row(case, f"{first['median']:.1f}", f"{result['others'][case]['median']:.2f}")
    table.add_row("none", "", f"{result['others_alone']['median']:.2f}")
    console().print(table)
    said = f"{result['loaded_blocks']:,} blocks came from host memory, {result['read_blocks']:,} of them from files"
    console().print(said, highlight=False)
