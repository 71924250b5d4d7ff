"""A load test as one HTML page that needs nothing else: plots, figures, conditions, and how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, StrictUndefined

from compiled_engine.bench.page_style import STYLE, facts, pictures
from compiled_engine.bench.serving.notes import notes
from compiled_engine.bench.serving.plots import SHOWN, draw_all

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Load test: {{ result.served_model }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>What clients see under load</h1>
<p class="muted">{{ result.served_model }} at {{ result.url }}, {{ result.load.endpoint }}, streaming. Figures are of
answers that are whole.</p>
{% for note in notes %}<p class="muted">{{ note }}</p>
{% endfor %}
{% for plot in plots %}<figure><picture>
<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{{ plot.dark }}">
<img alt="{{ plot.text }}" src="data:image/png;base64,{{ plot.light }}">
</picture></figure>
{% endfor %}
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
<h2>Repeat it</h2>
<pre>{{ result.command | default("compiled-engine bench serve") }}</pre>
{% for title, found in conditions %}<h2>{{ title }}</h2>
<dl>{% for name, value in found.items() %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
{% endfor %}
</body>
</html>
"""
HIDDEN = ("quantiles",)
HEADINGS = ("done", "failed", "seconds", "requests/s", "good/s", "output tok/s", "total tok/s", "concurrency",
            "tokens a part", "client, of a core", "client late p99, ms")  # fmt: skip

Run = Mapping[str, Any]


def render(result: Mapping[str, Any]) -> str:
    """The page; plots are inside, once for light and once for dark."""
    runs = result["runs"]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(PAGE).render(
        result=result,
        style=STYLE,
        notes=notes(runs),
        plots=pictures(lambda theme: draw_all(result, theme)),
        headings=HEADINGS,
        rows=[_row(run) for run in runs],
        latencies=[table for name in SHOWN if (table := _latency(name, runs)) is not None],
        errors=[
            {"title": f"{run['name']}: {count} x {kind}", "message": run["first_errors"][kind]}
            for run in runs
            for kind, count in run["errors"].items()
        ],
        conditions=facts(result, ("load", "machine", "versions")),
    )


def _row(run: Run) -> list[str]:
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
    return {"name": SHOWN[name], "headings": headings, "rows": rows}
