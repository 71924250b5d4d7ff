"""`compiled-engine generate`: complete prompts as streamed text or JSON, with the speed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from compiled_engine.cli.arguments import takes_engine_options, takes_sampling_params
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import print_json
from compiled_engine.process.init_cuda import core_has_device, given_device, init_cuda

if TYPE_CHECKING:
    from compiled_engine.frontend.outputs import RequestOutput
    from compiled_engine.options import EngineOptions
    from compiled_engine.process.progress import Progress
    from compiled_engine.sampling.params import SamplingParams


@takes_engine_options
@takes_sampling_params
def generate(
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    prompt: Annotated[list[str], typer.Option(help="Text to complete; may be repeated.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print outputs and metrics as JSON, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Complete prompts.

    A single prompt streams as it is completed; the speed follows on stderr. Only the JSON has log-probabilities.

    Examples:

      compiled-engine generate --prompt "def fibonacci(n):" --max-tokens 64

      compiled-engine generate --model path/to/Qwen3-0.6B --prompt "Once" --temperature 0 --stop "."

      compiled-engine generate --prompt "import" --prompt "class" --mode eager --json | jq .metrics
    """
    init_cuda(given_device(engine), runs_here=core_has_device(engine))  # while torch is imported
    # Other output to stdout must not mix with the JSON.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        with bad_input_is_reported():
            from compiled_engine.llm import LLM
            from compiled_engine.other_engines.translate import make_options
            from compiled_engine.process.memory import freeze_heap
            from compiled_engine.process.progress import RichProgress, SilentProgress

            params = _checked(make_options(engine), sampling, prompt, SilentProgress() if quiet else RichProgress())
        # The options are valid. The checkpoint may still be invalid, or memory insufficient.
        with bad_input_is_reported((ValueError, OSError, MemoryError)):
            llm = LLM(**engine, progress=not quiet)
        freeze_heap()
        ready_s = time.time() - psutil.Process().create_time()
        with llm:
            begin = time.perf_counter()
            if not as_json and len(prompt) == params.n == 1:
                with bad_input_is_reported():
                    stream = llm.stream(prompt[0], params)
                outputs = [print_stream(prompt[0], stream)]
            else:
                with bad_input_is_reported():
                    outputs = llm.generate(prompt, params)
            measured = speeds(outputs, time.perf_counter() - begin)
            counted = llm.metrics()
    if as_json:
        # The engine's own figure begins with its construction; users wait from the start of the process.
        metrics = {**counted, **measured, "start_s": ready_s, "engine_start_s": counted["start_s"]}
        print_json({"outputs": completion_records(outputs), "metrics": metrics})
        return
    if len(prompt) > 1 or params.n > 1:
        print_completions(outputs)
    typer.secho(summary(measured), err=True, dim=True)


def _checked(
    options: EngineOptions, sampling: dict[str, Any], prompts: list[str], progress: Progress
) -> SamplingParams:
    """Return the sampling parameters, checked for all that a started engine would refuse, except KV cache capacity."""
    from compiled_engine.engine.messages import RequestLimits
    from compiled_engine.features.request_registry import request_features
    from compiled_engine.frontend.generation_config import read_default_sampling_params
    from compiled_engine.frontend.input_processor import InputProcessor
    from compiled_engine.frontend.prompts import parse_prompts
    from compiled_engine.frontend.tokenizer import find_tokenizer_folder, load_tokenizer
    from compiled_engine.resolve.engine import resolve

    config = resolve(options, progress)
    model = config.model
    params = replace(read_default_sampling_params(model.path, options.generation_config), **sampling)
    limits = RequestLimits(model.vocab_size, model.max_model_len, num_slots=model.max_model_len)
    folder = find_tokenizer_folder(config.tokenizer, model.path)
    tokenizer = load_tokenizer(folder) if folder else None
    inputs = InputProcessor(tokenizer, limits, frozenset(), features=request_features(config, tokenizer, frozenset()))
    inputs.process(parse_prompts(prompts if len(prompts) > 1 else prompts[0]), params)
    return params


def completion_records(outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    """Return a JSON object for each completion, in the order of the prompts."""
    return [
        {
            "prompt": output.prompt,
            "prompt_token_ids": output.prompt_token_ids,
            "num_cached_tokens": output.num_cached_tokens,
            **asdict(replace(completion, logprobs=completion.logprobs and list(completion.logprobs))),
        }
        for output in outputs
        for completion in output.outputs
    ]


def speeds(outputs: Sequence[RequestOutput], seconds: float) -> dict[str, float | int | None]:
    """Return the seconds of generation, output tokens in total and per second, and mean TTFT and TPOT in seconds."""
    timings = [output.metrics for output in outputs if output.metrics is not None]
    ttfts = [timing.ttft_s for timing in timings if timing.ttft_s is not None]
    tpots = [timing.tpot_s for timing in timings if timing.tpot_s is not None]
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "generate_s": seconds,
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / seconds,
        "ttft_s": fmean(ttfts) if ttfts else None,
        "tpot_s": fmean(tpots) if tpots else None,
    }


def summary(measured: dict[str, float | int | None]) -> str:
    """Return the result of `speeds` as one line of text."""
    line = (
        f"{measured['num_output_tokens']} tokens in {measured['generate_s']:.2f} s:"
        f" {measured['output_tokens_per_s']:.1f} tok/s"
    )
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        value = measured[key]
        if value is not None:
            line += f", {name} {value * 1000:.1f} ms"
    return line


def print_stream(prompt: str, stream: Iterable[RequestOutput]) -> RequestOutput:
    """Print a streamed completion after its prompt, which is bold. Return the last output."""
    typer.secho(prompt, bold=True, nl=False)
    shown = 0
    try:
        for output in stream:
            text = output.outputs[0].text
            typer.echo(text[shown:], nl=False)
            shown = len(text)
    finally:
        typer.echo()
    return output


def print_completions(outputs: Sequence[RequestOutput]) -> None:
    """Print finished completions, each after its prompt, separated by blank lines."""
    for index, (output, completion) in enumerate((o, c) for o in outputs for c in o.outputs):
        if index:
            typer.echo()
        typer.secho(output.prompt, bold=True, nl=False)
        typer.echo(completion.text)
