"""`compiled-engine demo`: the bundled model writes Python, with its draft head where that is faster."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.generate import print_stream, speeds, summary
from compiled_engine.models.bundled import BUNDLED_HEAD_PATH

NUM_DRAFTS = 3
PROMPTS = ("class Stack:\n", "def read_lines(path):\n", "import os\n")


@takes_engine_options
def demo(
    *,
    engine: dict[str, Any],
    max_tokens: Annotated[int, typer.Option(help="Most tokens for each prompt.")] = 96,
    head: Annotated[
        bool | None, typer.Option("--head/--no-head", help="Draft with the model's head; by default where it pays.")
    ] = None,
) -> None:
    """Let the bundled model complete a few lines of Python, and show how fast.

    All options of the engine may be given.

    Examples:

      compiled-engine demo

      compiled-engine demo --mode eager
    """
    with bad_input_is_reported():
        engine = {**engine, **head_options(engine, head, BUNDLED_HEAD_PATH)}
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
    said = f"{summary(measured)}; cache {counted['cache']}"
    if counted.get("drafted_requests"):
        length = 1 + counted["accepted_tokens"] / counted["drafted_requests"]
        said += f"; mean acceptance length {length:.2f} with {counted['draft_tokens']:,} drafts"
    typer.secho(said, err=True, dim=True)


def head_options(engine: Mapping[str, Any], head: bool | None, path: Path) -> dict[str, Any]:
    """Return the engine options with which the bundled model's head makes drafts; {} if it is not used.

    `engine` has the given options. `head` is the user's choice. With None, the head is used if the engine runs on a
    CPU, the head was measured to be no slower there, and neither `model` nor `speculative_config` is given. `path` is
    the head's folder. Raises ValueError if `head` is True and `model` or `speculative_config` is given, or the head is
    missing.
    """
    others = [name for name in ("model", "speculative_config") if engine.get(name) is not None]
    if head is False or (head is None and (others or not pays(engine, path))):
        return {}
    if others:
        raise ValueError(f"--head is given with {others[0]}; allowed: the bundled model, and no speculative_config")
    if not (path / "config.json").exists():
        raise ValueError(f"--head is given, but there is no head in {path}; allowed: --no-head")
    return {"speculative_config": {"method": "eagle3", "model": str(path), "num_speculative_tokens": NUM_DRAFTS}}


def pays(engine: Mapping[str, Any], path: Path) -> bool:
    """Return whether the engine runs on a CPU and the head was measured to be no slower there."""
    record = path / "training.json"
    if not record.exists():
        return False
    from compiled_engine.resolve.engine import resolve_device

    speed = json.loads(record.read_text(encoding="utf-8"))["cpu_tokens_per_second"]
    on_cpu = resolve_device(engine.get("device") or "auto", {}).type == "cpu"
    return on_cpu and bool(speed["with"] >= speed["without"])
