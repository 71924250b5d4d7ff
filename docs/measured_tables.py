"""The tables of the documents: each function takes measurements, as loaded from JSON, and returns Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
# Versions that matter for speed, by the names that they are shown under.
SHOWN_VERSIONS = {"torch": "torch", "triton": "Triton", "cuda": "CUDA", "transformers": "transformers", "vllm": "vLLM"}


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, figures to the right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def conditions(result: Result, *, with_command: bool = True) -> str:
    """Where, with what and when a result was measured, how often, and how to measure it again."""
    machine, versions = result["machine"], result["versions"]
    count = {1: "one", 2: "two"}[machine.get("gpus", 1)]
    parts = [f"{count} {machine['gpu']}{'s' * (count != 'one')}"] if "gpu" in machine else []
    if "cores" in machine:
        parts.append(f"{machine['cores']} cores of {machine['processor'].replace('(R)', '')}")
    parts += [f"{shown} {versions[name]}" for name, shown in SHOWN_VERSIONS.items() if name in versions]
    parts += [result["model"]["dtype"]] if "model" in result else []
    repeats = result.get("repeats", 0)
    parts += [f"medians of {repeats} repeats"] if repeats > 1 else ["one run"] if repeats else []
    text = f"Measured {result['date']}: {', '.join(parts)}."
    return text + (f"\n`{result['command']}`" if with_command and "command" in result else "")


def below(table: str, *results: Result, with_command: bool = True) -> str:
    """A table with the conditions of its results, equal ones once."""
    notes = dict.fromkeys(conditions(result, with_command=with_command) for result in results)
    return "\n\n".join([table, *notes])


def model_name(result: Result) -> str:
    return result["model"]["name"].replace("qwen", "Qwen").replace("b", "B")


def median(figure: Mapping[str, Any] | None, digits: int, factor: float = 1.0) -> str:
    return "" if figure is None else f"{figure['median'] * factor:,.{digits}f}"


def ablation(result: Result) -> str:
    """A row for each variant, the bound below."""
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


def spreads(result: Result) -> str:
    """How far repeats differ: least, median and most of each figure of the first variant."""
    record = result["variants"][0]
    figures = {f"step, batch {batch}, ms": figure for batch, figure in record["step_ms"].items()}
    figures |= {f"TPOT, batch {batch}, ms": figure for batch, figure in record["tpot_ms"].items()}
    rows = [
        [name, *(f"{value:.3f}" for value in (figure["spread"][0], figure["median"], figure["spread"][1]))]
        for name, figure in figures.items()
    ]
    return below(markdown([record["name"], "least", "median", "most"], rows), result)


def pass_gains(*results: Result) -> str:
    """What leaving a pass out costs a decode step, in microseconds: a column for each model and batch size."""
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
    """What CUDA graphs were predicted to take, and took."""
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
    """Microseconds of a decode step, by part."""
    names = ["schedule", "prepare", "launch", "output", "host", "wait", "step", "device"]
    rows = []
    for result in results:
        for record in result["results"]:
            cells = [median(record[name], 0) for name in names]
            idle = f"{record['device_idle']['median']:.1%}"
            rows.append([f"{model_name(result)}, batch {record['batch_size']}", *cells, idle])
    return below(markdown(["", *names, "device idle"], rows), *results)


def start_up(*results: Result) -> str:
    """Seconds of cold and warm starts by stage, parts of a stage indented."""
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
    """How fast a checkpoint is read and loaded."""
    names = {"read_gb_per_s": "read files, GB/s", "load_gb_per_s": "load, GB/s"}
    rows = [[shown, *(f"{rate:.1f}" for rate in sorted(result[name]))] for name, shown in names.items()]
    return below(markdown(["", "slowest", *[""] * (len(rows[0]) - 3), "fastest"], rows), result)


def beside_transformers(result: Result) -> str:
    """Output tokens per second of the engine and of every way of transformers, and how they compare."""
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
    """The engine itself and each of its servers: throughput, latencies under steady load, and the time of a start."""
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
    """The rows of the table beside a peer's, this engine's before, their bounds, and what was aimed at."""
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
    """The plots of a table's curves, which `figures.py --plots` draws."""
    names = dict.fromkeys((row["model"], row["curve"]) for row in result["rows"] if "curve" in row)
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


def peers(result: Result) -> str:
    """Each engine's figures, and the bound, of the rows that other engines have too."""
    rows = [row for row in result["rows"] if len(row.keys() & result["engines"].keys()) > 1]
    return _compared(result, rows, {**result["engines"], "bound": "bound"})


def highlights(result: Result) -> str:
    """The rows of a comparison that are marked as such, without the bound."""
    return _compared(result, [row for row in result["rows"] if row.get("highlight")], result["engines"])


def _compared(result: Result, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A figure may be a range: two numbers."""

    def cell(row: Mapping[str, Any], name: str) -> str:
        value = row.get(name, [])
        return " to ".join(f"{number:,.{row['digits']}f}" for number in (value if isinstance(value, list) else [value]))

    table = [[f"{row['what']}, {row['unit']}", *(cell(row, name) for name in columns)] for row in rows]
    return below(markdown(["", *columns.values()], table), result)


def _linear(result: Result, kind: str) -> tuple[list[Result], float, float]:
    """A collective's measurements by size; seconds that any takes, and bytes a second beyond, from the two ends."""
    found = sorted((e for e in result["collectives"] if e["kind"] == kind), key=lambda entry: entry["bytes"])
    least, most = ((entry["bytes"], entry["microseconds"]["median"] * 1e-6) for entry in (found[0], found[-1]))
    rate = (most[0] - least[0]) / (most[1] - least[1])
    return found, least[1] - least[0] / rate, rate


def collectives(result: Result) -> str:
    """Each kind at each size, beside what the line through the ends of the kind says."""
    rows = []
    for kind in dict.fromkeys(entry["kind"] for entry in result["collectives"]):
        found, latency_s, rate = _linear(result, kind)
        for entry in found:
            predicted = (latency_s + entry["bytes"] / rate) * 1e6
            measured = f"{entry['microseconds']['median']:.1f}"
            rows.append([f"`{kind}`", f"{entry['bytes'] / 1024:,.0f}", f"{predicted:.1f}", measured])
    return below(markdown(["collective", "KiB a rank", "predicted, microseconds", "measured"], rows), result)


def tensor_parallel_steps(result: Result) -> str:
    """What the weights and the fused sums of a decode step take, in ms, by the number of ranks."""
    _, latency_s, rate = _linear(result, "push with norm")
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


def executor_overhead(result: Result) -> str:
    """What a step's way to a worker and back takes, by its decodes."""
    names = {"round_trip_us": "round trip", "encode_step_us": "encode step", "decode_step_us": "decode step"}
    names |= {"encode_result_us": "encode tokens", "decode_result_us": "decode tokens"}
    rows = [[str(s["decodes"]), *(f"{s[name]:.1f}" for name in names), str(s["step_bytes"])] for s in result["steps"]]
    return below(
        markdown(["decodes", *(f"{n}, microseconds" for n in names.values()), "bytes of the step"], rows), result
    )


def tensor_parallel(result: Result) -> str:
    """What two ranks reach, beside vLLM with as many and the bound."""
    rows = []
    for entry in result["rows"]:
        shown = [entry[name] for name in ("median", "vllm", "bound")]
        cells = ["" if value is None else f"{value:,.{entry['digits']}f}" for value in shown]
        rows.append([f"{entry['what']}, {entry['unit']}", *cells])
    return below(markdown(["two ranks", "this engine", "vLLM 0.25.1", "bound"], rows), result)


def data_parallel(result: Result) -> str:
    """What two replicas reach beside one engine on one GPU."""
    rows = []
    for row in result["rows"]:
        one, two = row["one"]["median"], row["two"]["median"]
        given = [f"{row['one_requests']:,}", f"{one:,.0f}", f"{row['two_requests']:,}", f"{two:,.0f}"]
        rows.append([row["model"], *given, f"{two / one:.2f}"])
    headings = ["model", "requests, one GPU", "output tok/s", "requests, two replicas", "output tok/s", "ratio"]
    return below(markdown(headings, rows), result)


# Passes whose matches the table of families shows, by what they fuse.
SHOWN_PASSES = {
    "merge_linears": "merged linears",
    "experts": "experts",
    "residual_rms_norm": "sums + norms",
    "rms_norm": "norms",
    "layer_norm": "layer norms",
    "rope_angles": "angles",
    "rope_kv_write": "rope + KV",
    "rope_attend": "with attention",
    "silu_mul": "gates",
    "small_batch_linear": "linears",
}


def families(result: Result, compiled: Result) -> str:
    """A row for each family: the largest difference of a log-probability, of the `compiled` engine too, with its output
    tokens per second, and matches of passes / their contracts."""
    headings = ["model type", "eager", "after passes", "compiled", "tok/s", *SHOWN_PASSES.values()]
    elsewhere = {record["family"]: record for record in compiled["results"]}
    rows = []
    for record in result["results"]:
        if "refused" in record:
            rows.append([record["family"], "refused", *[""] * (len(headings) - 2)])
            continue
        passes = {report["name"]: report for report in record["passes"]}
        counts = [passes[name] for name in SHOWN_PASSES]
        matches = [f"{report['matches']}/{report['contract']}" for report in counts]
        every = elsewhere.get(record["family"], {}) | record
        found = [f"{every[mode]['largest']:.0e}" if mode in every else "" for mode in ("eager", "fused", "compiled")]
        rate = every.get("compiled", {}).get("tokens_per_s")
        rows.append([record["family"], *found, "" if rate is None else f"{rate:,.0f}", *matches])
    return below(markdown(headings, rows), result, compiled)


def families_on_a_gpu(result: Result) -> str:
    """Families in CUDA graphs: in fp32 the largest difference, in bf16 the mean one beside that of transformers."""
    found = {(record["family"], record["dtype"]): record["graphed"] for record in result["results"]}
    rows = []
    for name in dict.fromkeys(record["family"] for record in result["results"]):
        exact, narrow = found.get((name, "float32")), found.get((name, "bfloat16"))
        cells = ["" if exact is None else f"{exact['largest']:.0e}"]
        cells += ["" if narrow is None else f"{narrow[key]:.3f}" for key in ("mean", "mean_of_transformers")]
        rows.append([name, *cells])
    headings = ["model type", "float32, largest", "bfloat16, mean", "transformers in bfloat16, mean"]
    return below(markdown(headings, rows), result)


def divided_families(result: Result) -> str:
    """Of each family on several ranks, in each mode the largest difference of a log-probability, and how many sums over
    ranks were compared with the undivided graph, of both compile ranges."""
    modes = [mode for mode in ("eager", "compiled") if any(mode in record for record in result["results"])]
    rows = []
    for record in result["results"]:
        sums = [str(p["matches"]) for p in record.get("passes", ()) if p["name"] == "tensor_parallel"]
        found = [f"{record[mode]['largest']:.0e}" if mode in record else "" for mode in modes]
        rows.append([record["family"], record["implementation"], *found, " and ".join(sums)])
    headings = [f"model type, {result['ranks']} ranks", "code", *modes, "sums compared"]
    return below(markdown(headings, rows), result)


def executors(*results: Result) -> str:
    """What a decode step takes with and without a worker process, with async scheduling and without."""
    rows = []
    for result in results:
        how = "no" if "--no-async-scheduling" in result["command"] else "yes"
        for record in result["results"]:
            times = [f"{record[name]['median']:.3f}" for name in ("in_process_ms", "multiprocess_ms")]
            longer = [f"{record['longer_us']:,.0f}", f"{record['ratio']:.3f}"]
            rows.append([str(record["batch_size"]), how, *times, *longer])
    headings = ["decodes", "async scheduling", "in process, ms a step", "in a worker", "longer, microseconds", "ratio"]
    return below(markdown(headings, rows), *results)


def layouts(result: Result) -> str:
    """Of each family the largest difference of a log-probability, layout by layout."""
    rows = []
    for record in result["results"]:
        cells = [record.get(name, {}) for name in result["layouts"]]
        found = [f"{cell['largest']:.0e}" if "largest" in cell else "refused" * bool(cell) for cell in cells]
        rows.append([record["family"], record["implementation"], *found])
    return below(markdown(["model type", "code", *result["layouts"]], rows), result)


def pipeline_parallel(result: Result) -> str:
    """What two stages reach beside one GPU."""
    rows = []
    for row in result["rows"]:
        one, two = row["one"]["median"], row["two"]["median"]
        rows.append([row["what"], f"{row['two_requests']:,}", f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}"])
    return below(markdown(["Qwen3-8B", "requests", "one GPU", "two stages", "ratio"], rows), result)
