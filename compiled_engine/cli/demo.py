"""`compiled-engine demo`: the bundled model, compiled, writes some Python."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

import typer

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.generate import print_stream, speeds, summary

PROMPTS = ("class Stack:\n", "def read_lines(path):\n", "import os\n")


@takes_engine_options
def demo(
    *,
    engine: dict[str, Any],
    max_tokens: Annotated[int, typer.Option(help="Most tokens for each prompt.")] = 96,
) -> None:
    """Let the bundled model complete a few lines of Python, and show how fast.

    All options of the engine may be given.

    Examples:

      compiled-engine demo

      compiled-engine demo --mode eager
    """
    with bad_input_is_reported():
        from compiled_engine.llm import LLM
        from compiled_engine.process.memory import freeze_heap

        llm = LLM(**engine)
    freeze_heap()
    with llm:
        with bad_input_is_reported():
            params = replace(llm.get_default_sampling_params(), max_tokens=max_tokens)
        begin = time.perf_counter()
        outputs = []
        for prompt in PROMPTS:
            with bad_input_is_reported():
                stream = llm.stream(prompt, params)
            outputs.append(print_stream(prompt, stream))
            typer.echo()
        measured = speeds(outputs, time.perf_counter() - begin)
        counted = llm.metrics()
    typer.secho(f"{summary(measured)}; cache {counted['cache']}", err=True, dim=True)
