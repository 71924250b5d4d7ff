"""An ablation as one HTML page that needs nothing else: plots, tables, conditions, and how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from compiled_engine.bench.ablation_plots import draw_all
from compiled_engine.bench.ablation_subject import measured, subtitle_of, whole_name
from compiled_engine.bench.page_style import STYLE, facts, pictures

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Ablation: {{ result.model.name }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>What each part of the engine is worth</h1>
<p class="muted">{{ subtitle }}. Medians of {{ result.repeats }} interleaved repeats, each in a fresh process with a
warm compile cache; below a figure its spread.</p>
{% for note in result.notes %}<p class="muted">{{ note }}.</p>
{% endfor %}
{% for plot in plots %}<figure><picture>
<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{{ plot.dark }}">
<img alt="{{ plot.text }}" src="data:image/png;base64,{{ plot.light }}">
</picture></figure>
{% endfor %}
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
<h2>Repeat it</h2>
<pre>{{ result.command | default("compiled-engine bench ablation") }}</pre>
{% for title, facts in conditions %}<h2>{{ title }}</h2>
<dl>{% for name, value in facts.items() %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
{% endfor %}
</body>
</html>
"""


def write_page(result: Mapping[str, Any], folder: Path) -> Path:
    """Write ablation.html; its path."""
    path = folder / "ablation.html"
    path.write_text(render(result), encoding="utf-8")
    return path


def render(result: Mapping[str, Any]) -> str:
    """The page; plots are inside, once for light and once for dark."""
    headings, bounds = _headings_and_bounds(result)
    records = result["variants"]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(PAGE).render(
        result=result,
        subtitle=subtitle_of(result),
        whole=whole_name(records),
        style=STYLE,
        plots=pictures(lambda theme: draw_all(result, theme)),
        headings=headings,
        bounds=bounds,
        rows=[_row(record, list(result["bound"]["tpot_ms"])) for record in records],
        conditions=facts(result, ("options", "workload", "model", "machine", "versions")),
    )


def _headings_and_bounds(result: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    bound = result["bound"]
    headings = [f"step, batch {batch}, ms" for batch in bound["step_ms"]]
    headings += [f"TPOT, batch {batch}, ms" for batch in bound["tpot_ms"]]
    headings += ["mixed step, ms", "prefill, tok/s", "start-up, s", "kernels", "memory, MiB", "graphs, MiB"]
    bounds = [f"{value:.3f}" for name in ("step_ms", "tpot_ms") for value in bound[name].values()]
    return headings, [*bounds, f"{bound['mixed_step_ms']:.2f}", f"{bound['prefill_tokens_per_s']:,.0f}", "", "", "", ""]


def _row(record: Mapping[str, Any], batches: list[str]) -> dict[str, Any]:
    if not measured(record):
        return {"name": record["name"], "error": record["error"]}
    memory = record["memory_bytes"] or {}
    cells = [_cell(record[name][batch], 3) for name in ("step_ms", "tpot_ms") for batch in batches]
    cells += [_cell(record["mixed_step_ms"], 2), _cell(record["prefill_tokens_per_s"], 0)]
    cells += [_cell(record["start_up_s"], 2), _cell(record["kernels"], 0)]
    cells += [_cell(memory.get(name), 0, 2**20) for name in ("without_kv_cache", "graphs_used")]
    return {"name": record["name"], "error": None, "cells": cells}


def _cell(measured: Mapping[str, Any] | None, digits: int, unit: float = 1) -> dict[str, str]:
    if measured is None:
        return {"median": "", "spread": ""}
    low, high = (f"{value / unit:,.{digits}f}" for value in measured["spread"])
    return {"median": f"{measured['median'] / unit:,.{digits}f}", "spread": f"{low} to {high}" if low != high else ""}
