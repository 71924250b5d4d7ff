"""Render results as self-contained HTML pages: plots, figures, conditions, and the command that repeats them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

from compiled_engine.bench.plots import DARK, LIGHT, draw, subtitle_of, whole_name
from compiled_engine.bench.results import LATENCIES, has_figures

STYLE = """
:root { --paper: #fbfbf9; --ink: #1f2328; --muted: #646c76; --line: #e3e3de; --accent: #0a6c74; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #dfe3e7; --muted: #949ca6; --line: #2c3238; --accent: #63c3c9; --bad: #f0857c; }
}
body { margin: 0 auto; padding: 2rem 1.2rem 5rem; max-width: 86rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { margin: 0; font-size: 1.7rem; letter-spacing: -0.02em; }
h2 { margin: 2.6rem 0 0.6rem; font-size: 1.15rem; }
p { max-width: 46rem; }
.muted { color: var(--muted); } .bad { color: var(--bad); } .whole { font-weight: 650; color: var(--accent); }
figure { margin: 1.4rem 0; } img { display: block; width: 100%; max-width: 58rem; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.32rem 0 0.32rem 1.4rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--muted); font-weight: 500; font-size: 0.8rem; vertical-align: bottom; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
td.bad { text-align: left; }
td small { display: block; color: var(--muted); }
tr.bound td { color: var(--bad); border-bottom: none; }
pre { padding: 0.7rem 0.9rem; border: 1px solid var(--line); border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 1.4rem; margin: 0; font-size: 0.9rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def pictures(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a dict for each plot of a result: `text`, the plot's name; `light` and `dark`, PNGs in base64 by theme."""
    light, dark = draw(result, LIGHT), draw(result, DARK)
    return [
        {"text": name.replace("_", " "), "light": _base64(light[name]), "dark": _base64(dark[name])} for name in light
    ]


def _rendered(page: str, result: Mapping[str, Any], **more: Any) -> str:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=DictLoader({"frame": FRAME}),
    )
    return environment.from_string(page).render(result=result, style=STYLE, **more)


def facts(result: Mapping[str, Any], names: tuple[str, ...]) -> list[tuple[str, dict[str, str]]]:
    """Return (heading, fields with values as text) for each part of a result in `names`, except empty parts."""
    return [
        (name.capitalize(), {key: _shown(value) for key, value in result[name].items()})
        for name in names
        if result[name]
    ]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# The common frame. Each page fills the blocks.
FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{% block title %}{% endblock %}</title>
<style>{{ style | safe }}</style>
</head>
<body>
{% block head %}{% endblock %}
{% for plot in plots %}<figure><picture>
<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{{ plot.dark }}">
<img alt="{{ plot.text }}" src="data:image/png;base64,{{ plot.light }}">
</picture></figure>
{% endfor %}
{% block figures %}{% endblock %}
<h2>Repeat it</h2>
<pre>{{ result.command | default(command) }}</pre>
{% for title, facts in conditions %}<h2>{{ title }}</h2>
<dl>{% for name, value in facts.items() %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
{% endfor %}
</body>
</html>
"""


ABLATION = """{% extends "frame" %}
{% block title %}Ablation: {{ result.model.name }}{% endblock %}
{% block head %}
<h1>What each part of the engine is worth</h1>
<p class="muted">{{ subtitle }}. Medians of {{ result.repeats }} interleaved repeats, each in a fresh process with a
warm compile cache; below a figure its spread.</p>
{% for note in result.notes %}<p class="muted">{{ note }}.</p>
{% endfor %}
{% endblock %}
{% block figures %}
<h2>All figures</h2>
<div class="scroll"><table>
<thead><tr><th>variant</th>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>
<td{% if row.name == whole %} class="whole"{% endif %}>{{ row.name }}</td>
{% if row.error %}<td class="bad" colspan="{{ headings | length }}">failed: {{ row.error.splitlines()[-1] }}</td>
{% else %}{% for cell in row.cells %}<td>{{ cell.median }}<small>{{ cell.spread }}</small></td>{% endfor %}
{% endif %}</tr>
{% endfor %}<tr class="bound"><td>bound</td>{% for cell in bounds %}<td>{{ cell }}</td>{% endfor %}</tr>
</tbody>
</table></div>
{% with workload = result.workload, rates = result.rates %}<p class="muted">Step: the wall time of a
steady step of decodes. TPOT: (time for {{ workload.output_len }}
tokens - time for 1) / {{ workload.output_len - 1 }}, through generate, prompts of {{ workload.prompt_len }} tokens.
Mixed step: {{ workload.mixed_decodes }} decodes and a prompt of {{ workload.mixed_prompt_len }} tokens, in a steady
state. Prefill: {{ workload.prefill_prompts }} prompts of {{ workload.prefill_len }} tokens, until each has its first
token. Start-up: process start to first token. Kernels: of a decode step at batch 1. Memory: the peak that was reserved,
without the KV cache. The bound: every weight and every earlier key and value read once, every product computed, at
{{ "%.3g" | format(rates.bytes_per_s / 1e12) }} TB/s and {{ "%.3g" | format(rates.flops_per_s / 1e12) }} TFLOP/s
({{ rates.source }}).</p>{% endwith %}
{% for row in rows if row.error %}<h2 class="bad">{{ row.name }} failed</h2><pre>{{ row.error }}</pre>
{% endfor %}
{% endblock %}
"""


def render_ablation(result: Mapping[str, Any]) -> str:
    """Return an ablation's result as an HTML page with embedded plots, for light and dark themes."""
    headings, bounds = _headings_and_bounds(result)
    records = result["variants"]
    return _rendered(
        ABLATION,
        result,
        command="compiled-engine bench ablation",
        subtitle=subtitle_of(result),
        whole=whole_name(result),
        plots=pictures(result),
        headings=headings,
        bounds=bounds,
        rows=[_ablation_row(record, list(result["bound"]["tpot_ms"])) for record in records],
        conditions=facts(result, ("options", "workload", "model", "machine", "versions")),
    )


def _headings_and_bounds(result: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    bound = result["bound"]
    headings = [f"step, batch {batch}, ms" for batch in bound["step_ms"]]
    headings += [f"TPOT, batch {batch}, ms" for batch in bound["tpot_ms"]]
    headings += ["mixed step, ms", "prefill, tok/s", "start-up, s", "kernels", "memory, MiB", "graphs, MiB"]
    headings += ["image, ms"]
    bounds = [f"{value:.3f}" for name in ("step_ms", "tpot_ms") for value in bound[name].values()]
    return headings, [*bounds, f"{bound['mixed_step_ms']:.2f}", f"{bound['prefill_tokens_per_s']:,.0f}", *[""] * 5]


def _ablation_row(record: Mapping[str, Any], batches: list[str]) -> dict[str, Any]:
    if not has_figures(record):
        return {"name": record["name"], "error": record["error"]}
    memory = record["memory_bytes"] or {}
    cells = [_cell(record[name][batch], 3) for name in ("step_ms", "tpot_ms") for batch in batches]
    cells += [_cell(record["mixed_step_ms"], 2), _cell(record["prefill_tokens_per_s"], 0)]
    cells += [_cell(record["start_up_s"], 2), _cell(record["kernels"], 0)]
    cells += [_cell(memory.get(name), 0, 2**20) for name in ("without_kv_cache", "graphs_used")]
    cells.append(_cell(record.get("image_ms"), 1))
    return {"name": record["name"], "error": None, "cells": cells}


def _cell(measured: Mapping[str, Any] | None, digits: int, unit: float = 1) -> dict[str, str]:
    if measured is None:
        return {"median": "", "spread": ""}
    low, high = (f"{value / unit:,.{digits}f}" for value in measured["spread"])
    return {"median": f"{measured['median'] / unit:,.{digits}f}", "spread": f"{low} to {high}" if low != high else ""}


LOAD = """{% extends "frame" %}
{% block title %}Load test: {{ result.served_model }}{% endblock %}
{% block head %}
<h1>What clients see under load</h1>
<p class="muted">{{ result.served_model }} at {{ result.url }}, {{ result.load.endpoint }}, streaming. Figures are of
answers that are whole.</p>
{% for note in notes %}<p class="muted">{{ note }}</p>
{% endfor %}
{% endblock %}
{% block figures %}
<h2>Throughput</h2>
<div class="scroll"><table>
<thead><tr><th>rate</th>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% for latency in latencies %}<h2>{{ latency.name }}, ms</h2>
<div class="scroll"><table>
<thead><tr><th>rate</th>{% for heading in latency.headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in latency.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endfor %}
<p class="muted">TTFT: from sending a request, connecting included, to the first part of its answer with output.
E2EL: to the last one. TPOT: (E2EL - TTFT) / (output tokens - 1). ITL: between two parts with output.</p>
{% for error in errors %}<h2 class="bad">{{ error.title }}</h2><pre>{{ error.message }}</pre>
{% endfor %}
{% endblock %}
"""
HIDDEN = ("quantiles",)
HEADINGS = ("done", "failed", "seconds", "requests/s", "good/s", "output tok/s", "total tok/s", "concurrency",
            "tokens a part", "client, of a core", "client late p99, ms")  # fmt: skip

Run = Mapping[str, Any]


def render_load(result: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Return a load test's result as an HTML page with embedded plots, for light and dark themes.

    notes: shown beside the figures.
    """
    runs = result["runs"]
    return _rendered(
        LOAD,
        result,
        command="compiled-engine bench serve",
        notes=notes,
        plots=pictures(result),
        headings=HEADINGS,
        rows=[_load_row(run) for run in runs],
        latencies=[table for name in LATENCIES if (table := _latency(name, runs)) is not None],
        errors=[
            {"title": f"{run['name']}: {count} x {kind}", "message": run["first_errors"][kind]}
            for run in runs
            for kind, count in run["errors"].items()
        ],
        conditions=facts(result, ("load", "machine", "versions")),
    )


def _load_row(run: Run) -> list[str]:
    client, goodput = run["client"], run["goodput"]
    late = max(client["loop_lag_ms"]["p99"], client["late_sends_ms"]["p99"])
    return [
        run["name"],
        str(run["completed"]),
        str(sum(run["errors"].values())),
        f"{run['duration_s']:.2f}",
        f"{run['request_throughput']:,.2f}",
        "" if goodput is None else f"{goodput['request_throughput']:,.2f}",
        f"{run['output_throughput']:,.0f}",
        f"{run['total_token_throughput']:,.0f}" if run["prompt_tokens_known"] else "",
        f"{run['mean_concurrency']:.1f}",
        "" if run["tokens_per_chunk"] is None else f"{run['tokens_per_chunk']:.2f}",
        f"{client['busiest_share_of_a_core']:.0%}",
        f"{late:.2f}",
    ]


def _latency(name: str, runs: list[Run]) -> dict[str, Any] | None:
    measured = [run for run in runs if run[name] is not None]
    if not measured:
        return None
    headings = [key for key in measured[0][name] if key not in HIDDEN]
    rows = [[run["name"], *(f"{run[name][key]:,.2f}" for key in headings)] for run in measured]
    return {"name": LATENCIES[name], "headings": headings, "rows": rows}
