"""`compiled-engine chat` and `compiled-engine complete`: a local model, or one behind a server, in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Annotated, Any

import typer

from compiled_engine.cli.arguments import take_model, takes_engine_options, takes_sampling_params
from compiled_engine.cli.errors import BadInputError
from compiled_engine.cli.terminal_model import LocalModel, RemoteModel

Named = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)]
Url = Annotated[
    str | None, typer.Option(help="Use this server instead of a local model, such as http://localhost:8000.")
]
ApiKey = Annotated[str | None, typer.Option(help="Key for the server.", envvar="OPENAI_API_KEY", show_default=False)]
Quick = Annotated[str | None, typer.Option("--quick", "-q", help="Answer this line and exit.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show neither progress nor speed.")]


@takes_engine_options
@takes_sampling_params
def chat(
    *,
    named: Named = None,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    url: Url = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="System prompt of the conversation.")] = None,
    quick: Quick = None,
    quiet: Quiet = False,
) -> None:
    """Chat with a model.

    A line is a message; /clear forgets the conversation; an empty line or the end of the input exits. Ctrl+C
    stops an answer.

    Examples:

      compiled-engine chat path/to/Qwen3-0.6B

      compiled-engine chat --url http://localhost:8000 --temperature 0 --system "Be brief." --quick "Who are you?"
    """
    begin = [] if system is None else [{"role": "system", "content": system}]
    messages = list(begin)
    with closing(_model(named, engine, sampling, url, api_key, quiet)) as model:
        for line in _lines("> ") if quick is None else [quick]:
            if line == "/clear":
                messages = list(begin)
                continue
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _show(model, model.answer(messages), quiet)})


@takes_engine_options
@takes_sampling_params
def complete(
    *,
    named: Named = None,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    url: Url = None,
    api_key: ApiKey = None,
    quick: Quick = None,
    quiet: Quiet = False,
) -> None:
    """Complete prompts line by line.

    Each line is a separate prompt; an empty line or the end of the input exits. Ctrl+C stops a completion.

    Examples:

      compiled-engine complete --quick "import os" --max-tokens 32

      echo "def fibonacci(n):" | compiled-engine complete --url http://localhost:8000 --temperature 0
    """
    with closing(_model(named, engine, sampling, url, api_key, quiet)) as model:
        for line in _lines("> ") if quick is None else [quick]:
            _show(model, model.complete(line), quiet)


def _model(
    named: str | None,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    url: str | None,
    api_key: str | None,
    quiet: bool,
) -> LocalModel | RemoteModel:
    take_model(named, engine)
    if sampling.get("n", 1) != 1:
        raise BadInputError(f"n is {sampling['n']}; allowed: 1")
    if url is None:
        return LocalModel(engine, sampling, quiet=quiet)
    others = sorted(engine.keys() - {"model"})
    if others:
        raise BadInputError(f"{others[0]} is an option of a local engine, which --url does not start")
    return RemoteModel(url, engine.get("model"), api_key, sampling)


def _lines(sign: str) -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            typer.secho(sign, nl=False, bold=True, err=True)
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return
        yield line


def _show(model: LocalModel | RemoteModel, texts: Iterable[str], quiet: bool) -> str:
    """Print an answer as it arrives, then its speed unless `quiet`, and return the answer. Ctrl-C stops the answer."""
    begin = time.perf_counter()
    first: float | None = None
    answer = ""
    try:
        for text in texts:
            if text:
                first = first or time.perf_counter()
                typer.echo(text, nl=False)
                sys.stdout.flush()
                answer += text
    except KeyboardInterrupt:
        typer.secho(" (stopped)", dim=True, err=True, nl=False)
    finally:
        if hasattr(texts, "close"):
            texts.close()
    typer.echo()
    if not quiet and first is not None:
        seconds = time.perf_counter() - begin
        tokens = model.num_tokens  # an interrupted server has not sent the count
        speed = "" if tokens is None else f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tok/s, "
        typer.secho(f"{speed}first after {1000 * (first - begin):.0f} ms", dim=True, err=True)
    return answer
