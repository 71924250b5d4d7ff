"""What a run came to: its completions on a terminal or as records, and its speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from compiled_engine.frontend.outputs import RequestOutput


def completion_records(outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    """One JSON object for each completion, in the order of the prompts."""
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
    """Output tokens of all together, and a second; means over the prompts of TTFT and TPOT, in seconds."""
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
    """The speed in one line."""
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
    """Print a stream of one completion after its prompt, which is bold; give the last output."""
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
    """Print finished outputs, each completion after its prompt, with a blank line between two."""
    for index, (output, completion) in enumerate((o, c) for o in outputs for c in o.outputs):
        if index:
            typer.echo()
        typer.secho(output.prompt, bold=True, nl=False)
        typer.echo(completion.text)
