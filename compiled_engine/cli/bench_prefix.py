"""`compiled-engine bench prefix`: the time to bring back an evicted prefix, and the gain for shared documents."""

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
    traffic: Annotated[bool, typer.Option("--traffic", help="Requests about shared documents instead.")] = False,
    requests: Annotated[int, typer.Option(min=1, help="Requests of --traffic.")] = 300,
    clients: Annotated[int, typer.Option(min=1, help="Clients of --traffic, each with a request at a time.")] = 8,
    warm_up: WarmUp = 1,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the first token of a long prompt whose prefix the KV cache has evicted, and other requests meanwhile.

    Three cases are compared: the prefix is computed, it is in the KV cache, and it comes back from host memory. With
    --kv-offloading-folder it comes back from files, since other prompts evict it from host memory too. These prompts
    take less time if the KV cache and host memory, which they fill, are small.

    With --traffic an engine without host memory and files is compared with one that has them. Clients ask about
    documents of --prefix-len tokens, chosen by Zipf's law, which together are five times as large as the KV cache.

    JSON: benchmark, first_token and others (each case with median and spread, in ms), others_alone, loaded_blocks,
    read_blocks, prefix_len, decodes, repeats, date, machine, model, options, versions, command. With --traffic:
    benchmark, engines (without_tiers and with_tiers, each with hit_rate by tier, ttft_ms with p50 and p99,
    requests_per_s, preemptions), documents, repeated (the most that hit rates can be), requests, clients, prefix_len.

    Examples:

      compiled-engine bench prefix --shape qwen3-8b --num-blocks 3000 --kv-offloading-size 24

      compiled-engine bench prefix --shape qwen3-8b --num-blocks 3000 --kv-offloading-size 5 --kv-offloading-folder kv

      compiled-engine bench prefix --traffic --prefix-len 400 --num-blocks 200 --kv-offloading-size 0.02
    """
    with bad_input_is_reported(), engine_options(engine, shape) as options:
        from compiled_engine.bench.results import conditions

        config = resolved(options)
        if not config.cache.host_blocks:
            raise ValueError("kv_offloading_size is None; allowed: GiB of host memory for the prefix")
        if traffic:
            found = _serve_traffic(config, options, prefix_len, requests, clients)
        else:
            found = _return_prefix(config, options, prefix_len, decodes, warm_up, repeats)
        result = found | {"command": command_line()} | conditions(config, options, shape)
    if as_json:
        print_json(result)
    elif traffic:
        _show_traffic(result)
    else:
        _show(result)


def _return_prefix(
    config: Any, options: dict[str, Any], prefix_len: int, decodes: int, warm_up: int, repeats: int
) -> dict[str, Any]:
    from compiled_engine.bench.prefix_return import prefix_return
    from compiled_engine.llm import LLM
    from compiled_engine.process.progress import RichProgress

    require_fit(config, decodes + 1, prefix_len + 1)
    with LLM(**options) as llm:
        found = prefix_return(llm, prefix_len, decodes, warm_up, repeats, RichProgress())
    return {"benchmark": "prefix", **found, "prefix_len": prefix_len, "decodes": decodes, "repeats": repeats}


def _serve_traffic(
    config: Any, options: dict[str, Any], prefix_len: int, requests: int, clients: int
) -> dict[str, Any]:
    from compiled_engine.bench.shared_documents import longest_request, make_traffic, serve_traffic
    from compiled_engine.llm import LLM
    from compiled_engine.process.progress import RichProgress

    require_fit(config, clients, longest_request(prefix_len))
    without = {name: value for name, value in options.items() if not name.startswith("kv_offloading_")}
    engines = {}
    with LLM(**without) as llm:
        served = make_traffic(llm, prefix_len, requests)
        engines["without_tiers"] = serve_traffic(llm, served, clients, RichProgress())
    with LLM(**options) as llm:
        engines["with_tiers"] = serve_traffic(llm, served, clients, RichProgress())
    about = {"documents": served.num_documents, "repeated": served.repeated, "requests": requests, "clients": clients}
    return {"benchmark": "prefix_traffic", "engines": engines, **about, "prefix_len": prefix_len}


def _show_traffic(result: dict[str, Any]) -> None:
    from rich.table import Table

    title = (
        f"{result['requests']:,} requests about {result['documents']:,} documents of {result['prefix_len']:,} tokens"
    )
    table = Table("", *(name.replace("_", " ") for name in result["engines"]), title=title)
    engines = [*result["engines"].values()]
    for tier in engines[0]["hit_rate"]:
        table.add_row(f"hit rate, {tier}", *(f"{engine['hit_rate'][tier]:.1%}" for engine in engines))
    for percentile in engines[0]["ttft_ms"]:
        table.add_row(f"TTFT {percentile}, ms", *(f"{engine['ttft_ms'][percentile]:.1f}" for engine in engines))
    table.add_row("requests/s", *(f"{engine['requests_per_s']:.2f}" for engine in engines))
    console().print(table)
    console().print(f"{result['repeated']:.1%} of all prompt tokens are of an earlier prompt", highlight=False)


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("prefix", "first token", "a step meanwhile", title=f"{result['prefix_len']:,} tokens, ms, medians")
    for case, first in result["first_token"].items():
        table.add_row(case, f"{first['median']:.1f}", f"{result['others'][case]['median']:.2f}")
    table.add_row("none", "", f"{result['others_alone']['median']:.2f}")
    console().print(table)
    said = f"{result['loaded_blocks']:,} blocks came from host memory, {result['read_blocks']:,} of them from files"
    console().print(said, highlight=False)
