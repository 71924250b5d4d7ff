"""The tables of the documents: one GPU, one CPU, and the server.

Each function takes measurements, as loaded from JSON, and returns Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from table_text import Result, below, conditions, markdown, median, model_name

HIGHLIGHTS = (
    "0.6b-tpot-1",
    "0.6b-tpot-64",
    "8b-tpot-1",
    "8b-tpot-64",
    "0.6b-T",
    "8b-T",
    "8b-prefill-8x4000",
    "0.6b-prefill-1x32000",
    "0.6b-start-cold",
    "0.6b-start-warm",
)
# Contenders of `bench embed`, in the order of their columns.
EMBEDDERS = ("engine", "transformers", "sentence-transformers")


def ablation(result: Result) -> str:
    """Return a table of step times, prefill rate and kernels: a row for each variant of the engine, then the bound."""
    batches = list(result["bound"]["step_ms"])
    headings = ["variant", *(f"batch {batch}, ms" for batch in batches), "mixed step, ms", "prefill, tok/s", "kernels"]
    rows = []
    for record in result["variants"]:
        steps = [median(record["step_ms"][batch], 3) for batch in batches]
        rest = [median(record["mixed_step_ms"], 2), median(record["prefill_tokens_per_s"], 0)]
        rows.append([record["name"].replace("compiled + full without", "without"), *steps, *rest])
        rows[-1].append(median(record["kernels"], 0))
    bound = result["bound"]
    steps = [f"{bound['step_ms'][batch]:.3f}" for batch in batches]
    rows.append(["bound", *steps, f"{bound['mixed_step_ms']:.2f}", f"{bound['prefill_tokens_per_s']:,.0f}", ""])
    return below(markdown(headings, rows), result)


def quantised_linears(result: Result) -> str:
    """Return a table of the microseconds of each linear in bf16 and in two FP8 schemes, and of reading its codes."""
    headings = ["tokens", "linear", "bf16, us", "fp8, us", "fp8_block, us", "bound of fp8, us"]
    figures = ("bf16", "fp8", "fp8_block", "bound")
    rows = [[f"{r['tokens']}", f"`{r['linear']}`", *(f"{r[name]:.1f}" for name in figures)] for r in result["rows"]]
    return below(markdown(headings, rows), result)


def spreads(result: Result) -> str:
    """Return a table of the least, median and largest repeat of each figure of the first variant."""
    record = result["variants"][0]
    figures = {f"step, batch {batch}, ms": figure for batch, figure in record["step_ms"].items()}
    figures |= {f"TPOT, batch {batch}, ms": figure for batch, figure in record["tpot_ms"].items()}
    rows = [
        [name, *(f"{value:.3f}" for value in (figure["spread"][0], figure["median"], figure["spread"][1]))]
        for name, figure in figures.items()
    ]
    return below(markdown([record["name"], "least", "median", "most"], rows), result)


def pass_gains(*results: Result) -> str:
    """Return a table of the microseconds that a decode step takes longer without each pass.

    There is a column for each model and batch size.
    """
    batches = ("1", "8", "64")
    headings = ["without", *(f"{model_name(result)}, batch {batch}" for result in results for batch in batches)]
    prefix = "compiled + full without "
    variants = [{record["name"]: record["step_ms"] for record in result["variants"]} for result in results]
    names = [name for name in variants[0] if name.startswith(prefix) and "all passes" not in name]
    rows = [
        [
            f"`{name.removeprefix(prefix)}`",
            *(
                f"{round((steps[name][batch]['median'] - steps['compiled + full'][batch]['median']) * 1e3):+,}"
                for steps in variants
                for batch in batches
            ),
        ]
        for name in names
    ]
    return below(markdown(headings, rows), *results, with_command=False)


def graph_memory(*results: Result) -> str:
    """Return a table of the memory of CUDA graphs, as predicted and as used, by variant of the engine."""
    rows = []
    for result in results:
        for record in result["variants"]:
            memory = record["memory_bytes"]
            if record["captures"] and " without " not in record["name"]:
                sizes = [median(memory[name], 0, 1e-6) for name in ("graphs_predicted", "graphs_used")]
                capture = f"{record['start_up_stages_s']['capture']:.1f}"
                rows.append([f"{model_name(result)}, {record['name']}", f"{record['captures']}", *sizes, capture])
    headings = ["variant", "graphs", "predicted, MB", "used, MB", "capture, s"]
    return below(markdown(headings, rows), *results, with_command=False)


def step_split(*results: Result) -> str:
    """Return a table of the microseconds that each part of a decode step takes, by model and batch size."""
    names = ["schedule", "prepare", "launch", "output", "host", "wait", "step", "device"]
    rows = []
    for result in results:
        for record in result["results"]:
            cells = [median(record[name], 0) for name in names]
            idle = f"{record['device_idle']['median']:.1%}"
            rows.append([f"{model_name(result)}, batch {record['batch_size']}", *cells, idle])
    return below(markdown(["", *names, "device idle"], rows), *results)


def start_up(*results: Result) -> str:
    """Return a table of the seconds of cold and warm starts by stage; the parts of a stage are indented below it."""
    starts = [(result, kind) for result in results for kind in ("cold", "warm")]
    spans = [result["results"][kind]["start_up"] for result, kind in starts]
    stages: dict[str, str | None] = {}
    for found in sorted(spans, key=len, reverse=True):
        stages |= {span["name"]: span["parent"] for span in found if span["name"] not in stages}
    top = [name for name, parent in stages.items() if parent is None]
    rows = []
    for name in top:
        parts = [part for part, parent in stages.items() if parent == name]
        rows += [[name, *(_seconds(found, name) for found in spans)]]
        rows += [[f"– {part}", *(_seconds(found, part) for found in spans)] for part in parts]
    if all("torch_alone" in result for result in results):
        rows.append(["bound: PyTorch alone", *(median(result["torch_alone"], 1) for result, _ in starts)])
    totals = (result["results"][kind]["seconds"] for result, kind in starts)
    rows.append(["**process start to first token**", *(f"**{median(total, 1)}**" for total in totals)])
    headings = ["seconds", *(f"{model_name(result)}, {kind}" for result, kind in starts)]
    table = below(markdown(headings, rows), *results)
    if "tokenizer" not in stages:
        table += "\n\nThe checkpoint had no tokenizer: importing transformers and loading one come on top."
    return table


def _seconds(spans: Sequence[Mapping[str, Any]], name: str) -> str:
    found = [span["seconds"] for span in spans if span["name"] == name]
    return f"{sum(found):.1f}" if found else ""


def loading(result: Result) -> str:
    """Return a table of the rates at which a checkpoint's files are read and the checkpoint is loaded."""
    names = {"read_gb_per_s": "read files, GB/s", "load_gb_per_s": "load, GB/s"}
    rows = [[shown, *(f"{rate:.1f}" for rate in sorted(result[name]))] for name, shown in names.items()]
    return below(markdown(["", "slowest", *[""] * (len(rows[0]) - 3), "fastest"], rows), result)


def beside_transformers(result: Result) -> str:
    """Return a table of output tokens per second of the engine and of every way to run transformers."""
    rows, said = [], []
    repeated = result["repeats"] > 1
    for name, requests in (("one", "1 request"), ("many", f"{result['workload']['requests']} requests")):
        found = result["results"][name]
        records = [("engine", "", found["engine"])]
        records += [(f"transformers {r['way']}", str(r["threads"]), r["tokens_per_s"]) for r in found["transformers"]]
        for label, threads, figure in records:
            spread = " to ".join(f"{value:,.0f}" for value in figure["spread"])
            digits = 0 if figure["median"] >= 100 else 1
            rows.append([f"{requests}: {label}", threads, median(figure, digits), *([spread] if repeated else [])])
        fastest = found["fastest"]
        share = found.get("bandwidth_share")
        said.append(
            f"{requests}: {found['ratio']:.2f} times the fastest way of transformers"
            f" ({fastest['way']}, threads: {fastest['threads']})"
            + ("." if share is None else f"; a step reads weights and caches at {share:.0%} of the memory's bandwidth.")
        )
    headings = ["", "threads", "tok/s", *(["spread"] if repeated else [])]
    return "\n\n".join([markdown(headings, rows), "\n".join(said), conditions(result)])


def through_http(result: Result) -> str:
    """Return a table of the engine without a server, and with each server, compared.

    Columns: throughput, latencies under steady load, and the time until the start has ended.
    """
    ready = {name: median(seconds, 1) for name, seconds in result.get("ready_s", {}).items()}
    offline = result["offline"]
    rows = [["offline", median(offline["output_throughput"], 0), *[""] * 7, ready.get("offline", "")]]
    for server in result["servers"]:
        steady = server["steady"]
        name = "server" if not server["arguments"] else f"server, `{' '.join(server['arguments'])}`"
        row = [name, median(server["output_throughput"], 0), f"{server['ratio']:.1%}"]
        row += [f"{server[load]['request_throughput']:.1f}" for load in ("saturated", "steady")]
        row += [f"{steady['ttft_ms'][key]:.1f}" for key in ("median", "p99")]
        row += [f"{steady['itl_ms'][key]:.2f}" for key in ("median", "p99")]
        rows.append([*row, "" if server["arguments"] else ready.get("server", "")])
    headings = ["", "output tok/s", "of offline", "saturated, requests/s", "steady, requests/s"]
    headings += ["TTFT, ms", "TTFT p99, ms", "ITL, ms", "ITL p99, ms", "ready after, s"]
    return below(markdown(headings, rows), result)


def performance(result: Result, peers: Result) -> str:
    """Return a table of all measured rows: vLLM's figure, this engine's before and now, the bound, and the aim."""
    known = {row["id"]: row for row in peers["rows"]}
    headings = [peers["engines"]["vllm"], "before", "now", "spread", "n", "bound", "share of bound", "aim"]
    rows = []
    for row in result["rows"]:
        if "curve" in row or "error" in row:
            continue
        peer, measured = known.get(row["id"], {}), row["measured"]
        low, high = (_figure(row, value) for value in measured["spread"])
        rows.append(
            [
                f"`{row['id']}` {row['what']}, {row['unit']}",
                *(_range(row, peer.get(name)) for name in ("vllm", "compiled_engine")),
                f"**{_figure(row, measured['median'])}**",
                low if low == high else f"{low} to {high}",
                str(measured["n"]),
                _figure(row, row["bound"]),
                f"{row['share_of_bound']:.0%}",
                _range(row, peer.get("aim")),
            ]
        )
    return below(markdown(["", *headings], rows), result)


def curves(result: Result) -> str:
    """Return the pictures of the result's curves that have at least two points. `figures.py --plots` draws them."""
    points = [(row["model"], row["curve"]) for row in result["rows"] if "curve" in row and "measured" in row]
    names = dict.fromkeys(name for name in points if points.count(name) > 1)
    pictures = [
        f"![{model}: time and throughput against {curve}](images/curve_{model.lower().replace(' ', '_')}_{curve}.png)"
        for model, curve in names
    ]
    return below("\n".join(pictures), result)


def _figure(row: Result, value: float) -> str:
    digits = {"ms": 2, "s": 1}.get(row["unit"], 0)
    return f"{value:,.{digits}f}"


def _range(row: Result, value: float | Sequence[float] | None) -> str:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return " to ".join(_figure(row, number) for number in values)


def losses(result: Result) -> str:
    """Return a table of the rows of `bench loss`, each beside the figures of the same formulas in plain PyTorch."""
    headings = ["", "loss", "difference", "divergence", "99th percentile", "same best token"]
    headings += ["plain PyTorch: difference", "divergence", "same best token"]
    rows = []
    for row in result["rows"]:
        cells = [row["name"], f"{row['loss']:.4f}"]
        plain = result["plain_pytorch"].get(row["name"])
        cells += _loss_cells(row, ("mean", "p99")) if "divergence" in row else [""] * 4
        cells += _loss_cells(plain, ("mean",)) if plain else [""] * 3
        rows.append(cells)
    return below(markdown(headings, rows), result)


def _loss_cells(row: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    divergences = [f"{row['divergence'][kind]:.1e}" for kind in kinds]
    return [f"{row['difference']:+.4f}", *divergences, f"{row['same_best']:.3f}"]


def peers(result: Result) -> str:
    """Return a table of the figures of all engines, and the bounds, in the rows that several engines have."""
    rows = [row for row in result["rows"] if len(row.keys() & result["engines"].keys()) > 1]
    return _compared(result, rows, {**result["engines"], "bound": "bound"})


def highlights(result: Result, starts: Result, peers: Result) -> str:
    """Return a table of the rows named in HIGHLIGHTS: vLLM's figure, this engine's, and the bound."""
    known = {row["id"]: row for row in peers["rows"]}
    measured = {row["id"]: row for row in (*result["rows"], *starts["rows"]) if "measured" in row}
    rows = [
        [
            f"{measured[name]['model']}, {measured[name]['what']}, {measured[name]['unit']}",
            _range(measured[name], known[name]["vllm"]),
            f"**{_figure(measured[name], measured[name]['measured']['median'])}**",
            _figure(measured[name], measured[name]["bound"]),
        ]
        for name in HIGHLIGHTS
    ]
    headings = ["", peers["engines"]["vllm"], "this engine", "bound"]
    return below(markdown(headings, rows), result, peers, with_command=False)


def _compared(result: Result, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Return a table with a row for each of `rows`, and a column for each of `columns` (key -> heading).

    A figure may be a range: two numbers.
    """

    def cell(row: Mapping[str, Any], name: str) -> str:
        value = row.get(name, [])
        return " to ".join(f"{number:,.{row['digits']}f}" for number in (value if isinstance(value, list) else [value]))

    table = [[f"{row['what']}, {row['unit']}", *(cell(row, name) for name in columns)] for row in rows]
    return below(markdown(["", *columns.values()], table), result)


def grid(result: Result) -> str:
    """Return a table whose columns the result describes, by a row's key, the heading, and the number of digits.

    Without digits the cell is text; with "auto" a figure has two digits below 100, otherwise none. Figures that were
    not measured are empty.
    """

    def cell(value: Any, digits: int | str | None) -> str:
        if value is None or digits is None:
            return "" if value is None else value
        shown = (2 if value < 100 else 0) if digits == "auto" else digits
        return f"{value:,.{shown}f}"

    rows = [[cell(row.get(key), digits) for key, _, digits in result["columns"]] for row in result["rows"]]
    return below(markdown([heading for _, heading, _ in result["columns"]], rows), result)


def embeddings(*results: Result) -> str:
    """Return a table of texts per second of the engine and of other embedders, by model and workload."""
    rows = [(result, row) for result in results for row in result["results"]]
    names = [name for name in EMBEDDERS if any(name in row["contenders"] for _, row in rows)]
    headings = ["model", "texts x tokens", *(f"{name}, texts/s" for name in names), "best to best"]
    cells = []
    for result, row in rows:
        rates = [row["contenders"].get(name) for name in names]
        figures = ["" if rate is None else f"{rate['texts_per_s']['median']:,.0f}" for rate in rates]
        workload = row["workload"].replace("x", " x ")
        cells.append([result["model"]["name"], workload, *figures, f"{row['ratio']:.2f}"])
    return below(markdown(headings, cells), *results)


def prefix_traffic(result: Result) -> str:
    """Return a table of hit rates and latencies for requests about shared documents.

    Compared are an engine that keeps KV blocks in host memory and files, and one that does not.
    """
    engines = result["engines"]
    rows = [
        [f"hit rate, {shown}", *(f"{engine['hit_rate'][tier]:.1%}" for engine in engines.values())]
        for tier, shown in (("device", "KV cache"), ("host", "host memory"), ("files", "files"), ("all", "together"))
    ]
    for percentile in ("p50", "p99"):
        rows.append([f"TTFT {percentile}, ms", *(f"{each['ttft_ms'][percentile]:,.0f}" for each in engines.values())])
    rows.append(["requests/s", *(f"{engine['requests_per_s']:.2f}" for engine in engines.values())])
    about = (
        f"{result['model']['name']}, {result['requests']:,} requests of {result['clients']} clients about "
        f"{result['documents']} documents of {result['prefix_len']:,} tokens; of all prompt tokens "
        f"{result['repeated']:.1%} are of an earlier prompt:"
    )
    headings = ["", *(name.replace("_", " ") for name in engines)]
    return f"{about}\n\n{below(markdown(headings, rows), result)}"


def kv_cache_loss(result: Result) -> str:
    """Return a table of the loss of accuracy by each format of the KV cache."""
    headings = ["cache", "loss added", "KL", "KL at position 100", "KL at 1,500 to 2,000", "same token"]
    rows = [
        [
            f"`{name}`",
            f"{figures['loss_added']:+.5f}",
            *(f"{figures[key]:.1e}" for key in ("kl", "kl_early", "kl_late")),
            f"{figures['greedy_same']:.1%}",
        ]
        for name, figures in result["formats"].items()
    ]
    return below(f"Over {result['tokens']:,} tokens:\n\n{markdown(headings, rows)}", result)
