"""Results of benchmarks as tables on a terminal, each figure beside its bound."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from compiled_engine.bench.ablation_subject import measured

BAR_WIDTH = 40
CACHES = "; a small model may stay in caches, and be faster"


def console(width: int = 160) -> Console:
    """Without a terminal nothing says how wide the output may be: `width`, wide enough for every column."""
    return Console(width=None if sys.stdout.isatty() else width)


def print_beside_transformers(result: Mapping[str, Any], out: Console) -> None:
    """A table for one request and one for many, the fastest way of transformers by name."""
    repeats, model = result["repeats"], result["model"]
    for name, requests in (("one", 1), ("many", result["workload"]["requests"])):
        found = result["results"][name]
        title = f"{model['name']}, {model['dtype']}, {result['machine']['device']}, requests: {requests}"
        table = Table("", "threads", "tok/s", *_spread_headings(repeats), title=title)
        table.add_row("engine", "", *_with_spread(found["engine"], 0, repeats))
        for record in found["transformers"]:
            row = _with_spread(record["tokens_per_s"], 0, repeats)
            table.add_row(f"transformers {record['way']}", str(record["threads"]), *row)
        out.print(aligned(table, 1))
        out.print(
            f"share of the memory bandwidth that the engine reads at: {found['bandwidth_share']:.0%}", highlight=False
        )
        fastest = found["fastest"]
        if fastest is not None:
            out.print(
                f"{found['ratio']:.2f} times the fastest way of transformers: {fastest['way']}, threads:"
                f" {fastest['threads']}",
                highlight=False,
            )


def _spread_headings(repeats: int) -> list[str]:
    """One measurement has no spread."""
    return ["from", "to"] if repeats > 1 else []


def _with_spread(measured: Mapping[str, Any], digits: int, repeats: int) -> list[str]:
    values = [measured["median"], *(measured["spread"] if repeats > 1 else ())]
    return [f"{value:,.{digits}f}" for value in values]


def print_rates(rates: Mapping[str, Any], out: Console) -> None:
    """What the bounds assume."""
    out.print(
        f"bound: {rates['bytes_per_s'] / 1e12:.3g} TB/s and {rates['flops_per_s'] / 1e12:.3g} TFLOP/s,"
        f" {rates['source']}" + CACHES * (not rates["source"].startswith("known")),
        style="dim",
        highlight=False,
    )


def ablation_table(result: Mapping[str, Any]) -> Table:
    """A row a variant, medians; the last row has the bounds."""
    batches = list(result["bound"]["tpot_ms"])
    with_kernels = any(record.get("kernels") for record in result["variants"])
    with_memory = any(record.get("memory_bytes") for record in result["variants"])
    headings = [f"{name}\nB={batch}, ms" for name in ("step", "TPOT") for batch in batches]
    headings += ["mixed\nstep, ms", "prefill,\ntok/s", "start-up,\ns"]
    headings += ["kernels"] * with_kernels + ["MiB\nwithout KV", "graphs MiB\n(predicted)"] * with_memory
    model = result["model"]
    device = result["machine"].get("gpu") or result["machine"]["processor"]
    title = f"{model['name']}, {model['dtype']}, {device}"
    table = aligned(Table("variant", *headings, title=title, box=SIMPLE_HEAD, show_edge=False), 1)
    for record in result["variants"]:
        if not measured(record):
            table.add_row(record["name"], "failed")
            continue
        row = [_median(record[name][batch], 3) for name in ("step_ms", "tpot_ms") for batch in batches]
        row += [_median(record["mixed_step_ms"], 2), _median(record["prefill_tokens_per_s"], 0)]
        row += [_median(record["start_up_s"], 1)]
        row += [_median(record["kernels"], 0)] * with_kernels
        row += _memory(record["memory_bytes"]) * with_memory
        table.add_row(record["name"], *row)
    bound = result["bound"]
    row = [f"{bound[name][batch]:.3f}" for name in ("step_ms", "tpot_ms") for batch in batches]
    table.add_section()
    table.add_row("bound", *row, f"{bound['mixed_step_ms']:.2f}", f"{bound['prefill_tokens_per_s']:,.0f}")
    return table


def print_ablation(result: Mapping[str, Any]) -> None:
    out = console()
    out.print(ablation_table(result))
    print_rates(result["rates"], out)
    for note in result["notes"]:
        out.print(note, highlight=False)


def print_waterfall(spans: list[dict[str, Any]], out: Console) -> None:
    """Stages of a start as bars on one scale, parts of a stage below it."""
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


def _median(measured: Mapping[str, Any] | None, digits: int) -> str:
    return "" if measured is None else f"{measured['median']:,.{digits}f}"


def _memory(measured: Mapping[str, Any] | None) -> list[str]:
    if measured is None:
        return ["", ""]
    mebibytes = {name: figures["median"] / 2**20 for name, figures in measured.items()}
    graphs = f"{mebibytes['graphs_used']:,.0f} ({mebibytes['graphs_predicted']:,.0f})"
    return [f"{mebibytes['without_kv_cache']:,.0f}", graphs]


def aligned(table: Table, num_names: int) -> Table:
    """Figures to the right."""
    for column in table.columns[num_names:]:
        column.justify = "right"
    for column in table.columns[:num_names]:
        column.no_wrap = True
    return table
