"""`compiled-engine generate`: complete prompts, as text that streams or as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from compiled_engine.cli.arguments import takes_engine_options, takes_sampling_params
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.reports import completion_records, print_completions, print_stream, speeds, summary
from compiled_engine.process.begin_gpu import begin_gpu, core_has_device, given_device

if TYPE_CHECKING:
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

    A single prompt streams as it is completed; the speed follows on stderr. Log-probabilities are in the JSON alone.

    Examples:

      compiled-engine generate --prompt "def fibonacci(n):" --max-tokens 64

      compiled-engine generate --model path/to/Qwen3-0.6B --prompt "Once" --temperature 0 --stop "."

      compiled-engine generate --prompt "import" --prompt "class" --mode eager --json | jq .metrics
    """
    begin_gpu(given_device(engine), runs_here=core_has_device(engine))  # while torch is imported
    # Whatever else prints to stdout must not mix with the JSON.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        with bad_input_is_reported():
            from compiled_engine.llm import LLM
            from compiled_engine.other_engines.translate import make_options
            from compiled_engine.process.memory import freeze_heap
            from compiled_engine.process.progress import RichProgress, SilentProgress

            params = _checked(make_options(engine), sampling, prompt, SilentProgress() if quiet else RichProgress())
        # The options are right; what may still be wrong is the checkpoint, or the memory too small.
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
        # The engine counts from its construction; a user waits from the start of the process.
        metrics = {**counted, **measured, "start_s": ready_s, "engine_start_s": counted["start_s"]}
        typer.echo(json.dumps({"outputs": completion_records(outputs), "metrics": metrics}, indent=2))
        return
    if len(prompt) > 1 or params.n > 1:
        print_completions(outputs)
    typer.secho(summary(measured), err=True, dim=True)


def _checked(
    options: EngineOptions, sampling: dict[str, Any], prompts: list[str], progress: Progress
) -> SamplingParams:
    """What to sample with. Raises for all that the engine would refuse once it stands, but for what its KV cache cannot
    hold."""
    from compiled_engine.frontend.generation_config import read_default_sampling_params
    from compiled_engine.frontend.input_processor import InputProcessor
    from compiled_engine.frontend.prompts import parse_prompts
    from compiled_engine.frontend.tokenizer import find_tokenizer_folder, load_tokenizer
    from compiled_engine.messages import RequestLimits
    from compiled_engine.resolve.engine import resolve

    config = resolve(options, progress)
    model = config.model
    params = replace(read_default_sampling_params(model.path, options.generation_config), **sampling)
    limits = RequestLimits(model.vocab_size, model.max_model_len, num_slots=model.max_model_len)
    folder = find_tokenizer_folder(config.tokenizer, model.path)
    tokenizer = load_tokenizer(folder) if folder else None
    inputs = InputProcessor(tokenizer, limits, frozenset())
    inputs.process(parse_prompts(prompts if len(prompts) > 1 else prompts[0]), params)
    return params
