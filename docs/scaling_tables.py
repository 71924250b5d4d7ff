"""The tables of the documents on several ranks: collectives, steps, stages, replicas, and families in layouts.

Each function takes measurements, as loaded from JSON, and returns Markdown.
"""

from __future__ import annotations

from table_text import Result, below, markdown


def _linear(result: Result, kind: str) -> tuple[list[Result], float, float]:
    """Fit a line through a collective's measurements of the fewest and of the most bytes.

    Returns (measurements in order of bytes, seconds for no bytes, bytes per second).
    """
    found = sorted((e for e in result["collectives"] if e["kind"] == kind), key=lambda entry: entry["bytes"])
    least, most = ((entry["bytes"], entry["microseconds"]["median"] * 1e-6) for entry in (found[0], found[-1]))
    rate = (most[0] - least[0]) / (most[1] - least[1])
    return found, least[1] - least[0] / rate, rate


def collectives(result: Result) -> str:
    """Return a table of each kind of collective by size: the time that `_linear` predicts, and the measured time."""
    rows = []
    for kind in dict.fromkeys(entry["kind"] for entry in result["collectives"]):
        found, latency_s, rate = _linear(result, kind)
        for entry in found:
            predicted = (latency_s + entry["bytes"] / rate) * 1e6
            measured = f"{entry['microseconds']['median']:.1f}"
            rows.append([f"`{kind}`", f"{entry['bytes'] / 1024:,.0f}", f"{predicted:.1f}", measured])
    return below(markdown(["collective", "KiB a rank", "predicted, microseconds", "measured"], rows), result)


def tensor_parallel_steps(result: Result) -> str:
    """Return a table of a decode step's estimated milliseconds by the number of ranks.

    The estimate counts the time to read the weights, and that of the fused sums over ranks.
    """
    _, latency_s, rate = _linear(result, "tagged push with norm")
    memory_rate, counts, rows = result["rates"]["memory_bytes_per_s"], (1, 2, 4, 8), []
    for name, shape in result["shapes"].items():
        for batch in (1, 64):
            cells = []
            for ranks in counts:
                sent = (ranks - 1) * batch * shape["hidden_size"] * 2
                sums = 2 * shape["layers"] * (latency_s + sent / rate) if ranks > 1 else 0.0
                weights = shape["weight_bytes"] / ranks / memory_rate
                cells.append(f"{(weights + sums) * 1e3:.2f}")
            rows.append([name, str(batch), *cells])
    return below(markdown(["model", "batch", *(f"{count} ranks" for count in counts)], rows), result)


def tensor_parallel(result: Result) -> str:
    """Return a table of the engine's figures on two ranks, vLLM's on two ranks, and the bounds."""
    rows = []
    for entry in result["rows"]:
        shown = [entry[name] for name in ("median", "vllm", "bound")]
        cells = ["" if value is None else f"{value:,.{entry['digits']}f}" for value in shown]
        rows.append([f"{entry['what']}, {entry['unit']}", *cells])
    return below(markdown(["two ranks", "this engine", "vLLM 0.25.1", "bound"], rows), result)


def data_parallel(result: Result) -> str:
    """Return a table of the throughput of two replicas, and of one engine on one GPU."""
    rows = []
    for row in result["rows"]:
        one, two = row["one"]["median"], row["two"]["median"]
        given = [f"{row['one_requests']:,}", f"{one:,.0f}", f"{row['two_requests']:,}", f"{two:,.0f}"]
        rows.append([row["model"], *given, f"{two / one:.2f}"])
    headings = ["model", "requests, one GPU", "output tok/s", "requests, two replicas", "output tok/s", "ratio"]
    return below(markdown(headings, rows), result)


def divided_families(result: Result) -> str:
    """Return a table of families on several ranks: largest differences of a log-probability, and sums compared.

    The differences are listed by mode. The sums over ranks that were compared with the undivided graph are counted for
    each compile range.
    """
    modes = [mode for mode in ("eager", "compiled") if any(mode in record for record in result["results"])]
    rows = []
    for record in result["results"]:
        sums = [str(p["matches"]) for p in record.get("passes", ()) if p["name"] == "tensor_parallel"]
        found = [f"{record[mode]['largest']:.0e}" if mode in record else "" for mode in modes]
        rows.append([record["family"], record["implementation"], *found, " and ".join(sums)])
    headings = [f"model type, {result['ranks']} ranks", "code", *modes, "sums compared"]
    return below(markdown(headings, rows), result)


def layouts(result: Result) -> str:
    """Return a table of the largest difference of a log-probability, by family and by layout of ranks."""
    rows = []
    for record in result["results"]:
        cells = [record.get(name, {}) for name in result["layouts"]]
        found = [f"{cell['largest']:.0e}" if "largest" in cell else "refused" * bool(cell) for cell in cells]
        rows.append([record["family"], record["implementation"], *found])
    return below(markdown(["model type", "code", *result["layouts"]], rows), result)


def pipeline_parallel(result: Result) -> str:
    """Return a table of the throughput of two pipeline stages, and of one GPU."""
    rows = []
    for row in result["rows"]:
        one, two = row["one"]["median"], row["two"]["median"]
        rows.append([row["what"], f"{row['two_requests']:,}", f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}"])
    return below(markdown(["Qwen3-8B", "requests", "one GPU", "two stages", "ratio"], rows), result)
