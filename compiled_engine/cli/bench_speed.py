"""`compiled-engine bench latency`, `throughput`, `prefill` and `startup`: the engine's speed, beside lower bounds."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.bench_engine import (
    AsJson,
    Batch,
    Repeats,
    ShapeName,
    WarmUp,
    command_line,
    engine_options,
    print_json,
    require_fit,
    resolved,
    rounds,
)
from compiled_engine.cli.bench_engine import engine as started
from compiled_engine.cli.errors import BadInputError, bad_input_is_reported

WORKLOAD_T = {"requests": 256, "shortest": 100, "longest": 1024}
T_LIMITS = {"max_num_seqs": 256, "max_model_len": 4096}


@takes_engine_options
def latency(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    batch: Batch = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens to generate for each.")] = 257,
    warm_up: WarmUp = 1,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Time per output token at fixed batch sizes: (time for 257 tokens - time for 1) / 256, through generate.

    JSON: benchmark, results (a list of batch_size, tpot_ms with median and spread, bound_ms), workload, repeats,
    date, machine, model, options, versions, rates, command.

    Examples:

      compiled-engine bench latency --batch 1 --batch 8

      compiled-engine bench latency --shape qwen3-0.6b --mode graphed --json
    """
    with bad_input_is_reported(), engine_options(engine, shape) as options:
        batch_sizes = batch or [1, 8, 64]
        config = resolved(options)
        require_fit(config, max(batch_sizes), prompt_len + output_len)

        from compiled_engine.bench.bounds import tpot_seconds
        from compiled_engine.bench.workloads import latency as measure

        repeated = rounds(warm_up, repeats, config.model.seed)
        result, sizes, rates = _conditions("latency", config, options, shape, repeats)
        with started(options) as llm:
            rows = measure(llm, batch_sizes, prompt_len, output_len, repeated, _progress())
    for row in rows:
        row["bound_ms"] = tpot_seconds(sizes, rates, row["batch_size"], prompt_len, output_len) * 1e3
    result |= {"results": rows, "workload": {"prompt_len": prompt_len, "output_len": output_len}}
    table = [([str(row["batch_size"])], row["tpot_ms"], row["bound_ms"]) for row in rows]
    _show(result, ("batch",), "ms per token", table, rate=False, digits=3, as_json=as_json)


@takes_engine_options
def throughput(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    workload: Annotated[
        str | None,
        typer.Option(help="T: 256 requests of 100 to 1024 tokens, --max-num-seqs 256, --max-model-len 4096."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests, all there at the start: 256.")] = None,
    shortest: Annotated[int | None, typer.Option(min=1, help="Least tokens of a prompt and of an output: 100.")] = None,
    longest: Annotated[int | None, typer.Option(min=1, help="Most tokens of a prompt and of an output: 1024.")] = None,
    warm_up: WarmUp = 1,
    repeats: Repeats = 1,
    as_json: AsJson = False,
) -> None:
    """Output tokens per second of many requests of random lengths at temperature 0.6.

    Workload T with seed 0 has 142,827 tokens in its prompts and generates 133,966.

    JSON: benchmark, results (requests, input_tokens, output_tokens, output_tokens_per_s with median and spread,
    bound_tokens_per_s), workload, repeats, date, machine, model, options, versions, rates, command.

    Examples:

      compiled-engine bench throughput --requests 32 --shortest 16 --longest 64

      compiled-engine bench throughput --shape qwen3-0.6b --workload T --json
    """
    with bad_input_is_reported(), engine_options(engine, shape) as given:
        asked = {"requests": requests, "shortest": shortest, "longest": longest}
        chosen = _throughput_workload(workload, {name: value for name, value in asked.items() if value is not None})
        options = given if workload is None else T_LIMITS | given
        try:
            config = resolved(options)
        except ValueError as error:
            limits = ", ".join(f"{name} {value}" for name, value in T_LIMITS.items())
            raise ValueError(f"{error} (workload {workload} has {limits})" if workload else str(error)) from error
        require_fit(config, 1, 2 * chosen["longest"])

        from compiled_engine.bench.bounds import workload_seconds
        from compiled_engine.bench.workloads import throughput as measure
        from compiled_engine.bench.workloads import throughput_lengths

        numbers = (chosen["requests"], chosen["shortest"], chosen["longest"])
        repeated = rounds(warm_up, repeats, config.model.seed)
        result, sizes, rates = _conditions("throughput", config, options, shape, repeats)
        with started(options) as llm:
            figures = measure(llm, *numbers, repeated, _progress())
    prompts, output_lens = throughput_lengths(*numbers, config.model.seed)
    least_s = workload_seconds(sizes, rates, [*map(len, prompts)], output_lens, config.scheduler.max_num_seqs)
    figures["bound_tokens_per_s"] = sum(output_lens) / least_s
    result |= {"results": figures, "workload": chosen | {"temperature": 0.6, "seed": config.model.seed}}
    names = [f"{figures[name]:,}" for name in ("requests", "input_tokens", "output_tokens")]
    table = [(names, figures["output_tokens_per_s"], figures["bound_tokens_per_s"])]
    headings = ("requests", "tokens in", "tokens out")
    _show(result, headings, "output tok/s", table, rate=True, digits=0, as_json=as_json)


@takes_engine_options
def prefill(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, all there at the start.")] = 8,
    prompt_len: Annotated[int | None, typer.Option(min=1, help="Tokens of each: 4000, or what the model has.")] = None,
    warm_up: WarmUp = 1,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Prompt tokens per second, from the call to the first token of every prompt.

    JSON: benchmark, results (prompts, prompt_len, tokens_per_s with median and spread, bound_tokens_per_s), workload,
    repeats, date, machine, model, options, versions, rates, command.

    Examples:

      compiled-engine bench prefill --prompts 2 --prompt-len 200

      compiled-engine bench prefill --shape qwen3-0.6b --max-model-len 4096 --json
    """
    with bad_input_is_reported(), engine_options(engine, shape) as options:
        config = resolved(options)
        length = prompt_len or max(1, min(4000, config.model.max_model_len - 1))
        require_fit(config, 1, length + 1)

        from compiled_engine.bench.bounds import prefill_seconds
        from compiled_engine.bench.workloads import prefill as measure

        repeated = rounds(warm_up, repeats, config.model.seed)
        result, sizes, rates = _conditions("prefill", config, options, shape, repeats)
        with started(options) as llm:
            figures = measure(llm, prompts, length, repeated, _progress())
    figures["bound_tokens_per_s"] = prompts * length / prefill_seconds(sizes, rates, [length] * prompts)
    result |= {"results": figures, "workload": {"prompts": prompts, "prompt_len": length}}
    table = [([str(prompts), f"{length:,}"], figures["tokens_per_s"], figures["bound_tokens_per_s"])]
    _show(result, ("prompts", "tokens each"), "tok/s", table, rate=True, digits=0, as_json=as_json)


@takes_engine_options
def startup(
    *,
    engine: dict[str, Any],
    shape: ShapeName = None,
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="Pairs of starts that do not count.")] = 0,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Seconds from the start of a process to its first token, cold (empty compile cache) and warm.

    Every start is a fresh process, and its imports count; each pair has a temporary cache. With --shape the checkpoint
    has a tokenizer of 151,000 tokens, as the real ones have. The bound is the time to write the weights.

    JSON: benchmark, results (cold, warm: seconds with median and spread, cache, start_up: the stages), bound_s,
    repeats, date, machine, model, options, versions, rates, command.

    Examples:

      compiled-engine bench startup --repeats 1

      compiled-engine bench startup --shape qwen3-0.6b --max-model-len 4096 --json
    """
    with bad_input_is_reported(), engine_options(engine, shape) as options:
        for name in ("cache_dir", "compile_cache"):
            if name in options:
                raise ValueError(f"{name} is {str(options[name])!r}; allowed: none, since each start has its own cache")
        config = resolved(options)

        from compiled_engine.bench.fresh_process import WorkerError
        from compiled_engine.bench.large_tokenizer import write_tokenizer
        from compiled_engine.bench.machine import plain_options
        from compiled_engine.bench.start_up import measure, weights_bound_seconds

        if shape is not None and "tokenizer" not in options:
            write_tokenizer(config.model.path)
        result, sizes, rates = _conditions("startup", config, options, shape, repeats)
        try:
            kinds = measure(plain_options(options), warm_up, repeats, _progress())
        except WorkerError as error:
            raise BadInputError(f"a start failed: {error}") from error
    bound_s = weights_bound_seconds(sizes.weight_bytes, rates.bytes_per_s)
    result |= {"results": kinds, "bound_s": bound_s}
    if not as_json:
        from compiled_engine.cli.bench_text import console, print_waterfall

        for kind, record in kinds.items():
            console().print(f"{kind}: {record['seconds']['median']:.2f} s (cache: {record['cache']})", style="bold")
            print_waterfall(record["start_up"], console())
    table = [([kind], record["seconds"], bound_s) for kind, record in kinds.items()]
    _show(result, ("start",), "seconds", table, rate=False, digits=3, as_json=as_json)


def _throughput_workload(name: str | None, asked: dict[str, int]) -> dict[str, int]:
    """The numbers of a workload. ValueError for an unknown name, or for numbers that contradict each other."""
    if name is not None:
        if name != "T":
            raise ValueError(f"workload is {name!r}; allowed: T")
        for option, value in asked.items():
            raise ValueError(f"{option} is {value} and workload is {name!r}; allowed: one of the two")
    chosen = WORKLOAD_T | asked
    if chosen["shortest"] > chosen["longest"]:
        raise ValueError(f"shortest is {chosen['shortest']}; allowed: at most longest ({chosen['longest']})")
    return chosen


def _conditions(
    benchmark: str, config: Any, options: dict[str, Any], shape: str | None, repeats: int
) -> tuple[dict[str, Any], Any, Any]:
    """The start of a result, and what bounds are made of: sizes of the model and rates of the device."""
    from compiled_engine.bench.bounds import model_sizes
    from compiled_engine.bench.device_rates import device_rates
    from compiled_engine.bench.machine import conditions

    rates = device_rates(config.device, config.model.dtype)
    head = {"benchmark": benchmark, "repeats": repeats, "command": command_line()}
    return head | conditions(config, options, shape, rates), model_sizes(config.model), rates


def _progress() -> Any:
    from compiled_engine.process.progress import RichProgress

    return RichProgress()


def _show(
    result: dict[str, Any],
    headings: tuple[str, ...],
    unit: str,
    rows: list[tuple[list[str], dict[str, Any], float]],
    *,
    rate: bool,
    digits: int,
    as_json: bool,
) -> None:
    """A table of figures with their bounds, or JSON."""
    if as_json:
        print_json(result)
        return
    from compiled_engine.cli.bench_text import console, figure_row, figure_table, print_rates

    table: Table = figure_table(*headings, unit=unit, repeats=result["repeats"])
    for names, measured, bound in rows:
        table.add_row(*names, *figure_row(measured, bound, rate, digits, result["repeats"]))
    console().print(table)
    print_rates(result["rates"], console())
