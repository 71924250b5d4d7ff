"""The tables of the documents on families of models.

Each function takes measurements, as loaded from JSON, and returns Markdown.
"""

from __future__ import annotations

from table_text import Result, below, markdown

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


def families(result: Result, *compiled: Result) -> str:
    """Return a table with a row for each family: differences of log-probabilities, and matches of passes.

    A difference is the largest from transformers, by mode. Matches are shown with the passes' contracts. compiled:
    results of the compiled engine, with its output tokens per second where they were measured.
    """
    elsewhere = {record["family"]: record for each in compiled for record in each["results"]}
    modes = ["eager", "fused", *(["compiled"] if compiled else [])]
    rated = any(record.get("compiled", {}).get("tokens_per_s") for record in elsewhere.values())
    shown = [{"fused": "after passes"}.get(mode, mode) for mode in modes]
    headings = ["model type", *shown, *(["tok/s"] if rated else []), *SHOWN_PASSES.values()]
    rows = []
    for record in result["results"]:
        if "refused" in record:
            rows.append([record["family"], "refused", *[""] * (len(headings) - 2)])
            continue
        passes = {report["name"]: report for report in record["passes"]}
        counts = [passes[name] for name in SHOWN_PASSES]
        matches = [f"{report['matches']}/{report['contract']}" for report in counts]
        every = elsewhere.get(record["family"], {}) | record
        found = [f"{every[mode]['largest']:.0e}" if mode in every else "" for mode in modes]
        if rated:
            rate = every.get("compiled", {}).get("tokens_per_s")
            found.append("" if rate is None else f"{rate:,.0f}")
        rows.append([record["family"], *found, *matches])
    return below(markdown(headings, rows), result, *compiled)


def family_counts(*results: Result) -> str:
    """Return a table with a row for each way to run: eager, after passes, compiled.

    Columns: the families that any result has in this way, those that are right, the largest difference, and the
    families with the greedy tokens of transformers among those whose tokens were compared.
    """
    ways = {"eager": "eager", "fused": "after passes", "compiled": "compiled"}
    rows = []
    for mode, shown in ways.items():
        found = {each["family"]: each[mode] for result in results for each in result["results"] if mode in each}
        compared = [each["tokens_equal"] for each in found.values() if each.get("tokens_equal") is not None]
        largest = max(each["largest"] for each in found.values())
        right = sum(each["right"] for each in found.values())
        tokens = f"{sum(compared)} of {len(compared)}" if compared else ""
        rows.append([shown, str(len(found)), str(right), f"{largest:.0e}", tokens])
    return markdown(["", "families", "right", "largest difference", "greedy tokens equal"], rows)


def families_on_a_gpu(result: Result) -> str:
    """Return a table of differences of log-probabilities of families in CUDA graphs.

    In fp32 these are the largest differences: from transformers in fp32, from transformers in float64, and between
    these two. In bf16 they are the mean difference of the engine, and that of transformers.
    """
    found = {(record["family"], record["dtype"]): record["graphed"] for record in result["results"]}
    rows = []
    for name in dict.fromkeys(record["family"] for record in result["results"]):
        exact, narrow = found.get((name, "float32")), found.get((name, "bfloat16"))
        keys = "largest", "from_float64", "transformers_from_float64"
        cells = ["" if exact is None else f"{exact[key]:.0e}" for key in keys]
        cells += ["" if narrow is None else f"{narrow[key]:.3f}" for key in ("mean", "mean_of_transformers")]
        rows.append([name, *cells])
    headings = ["model type", "float32, largest", "from float64", "transformers in float32, from float64"]
    headings += ["bfloat16, mean", "transformers in bfloat16, mean"]
    return below(markdown(headings, rows), result)
