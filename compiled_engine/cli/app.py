"""The commands of `compiled-engine`. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from compiled_engine.cli.bench_ablation import ablation
from compiled_engine.cli.bench_embed import embed
from compiled_engine.cli.bench_http import http
from compiled_engine.cli.bench_load import load
from compiled_engine.cli.bench_loss import loss
from compiled_engine.cli.bench_plot import plot
from compiled_engine.cli.bench_prefix import prefix
from compiled_engine.cli.bench_serve import serve as bench_serve
from compiled_engine.cli.bench_startup import startup
from compiled_engine.cli.bench_step import step
from compiled_engine.cli.bench_table import compare, table
from compiled_engine.cli.bench_transformers import transformers
from compiled_engine.cli.cache import cache
from compiled_engine.cli.chat import chat, complete
from compiled_engine.cli.config import config
from compiled_engine.cli.demo import demo
from compiled_engine.cli.errors import OneLineErrors
from compiled_engine.cli.generate import generate
from compiled_engine.cli.inspect import inspect
from compiled_engine.cli.other_words import BenchServeCommand, EngineCommand
from compiled_engine.cli.quantise import quantise
from compiled_engine.cli.serve import ServeCommand, serve
from compiled_engine.cli.transcribe import TranscribeCommand, transcribe
from compiled_engine.cli.tune import tune
from compiled_engine.process.bytecode import keep_bytecode

bench = typer.Typer(
    help="Measure speed on this machine. Each figure is a median of interleaved repeats after a warm-up.",
    rich_markup_mode="rich",
    no_args_is_help=True,
)
BENCH_KINDS: dict[Any, type[TyperCommand]] = {
    **dict.fromkeys((table, ablation, startup, step, http, embed, prefix), EngineCommand),
    bench_serve: BenchServeCommand,
}
BENCH_COMMANDS = (
    *(table, compare, ablation, plot, startup, step, bench_serve, http, transformers, load, embed, loss, prefix),
)
for command in BENCH_COMMANDS:
    bench.command(cls=BENCH_KINDS.get(command))(command)

app = typer.Typer(
    cls=OneLineErrors,
    help="LLM inference built around the compiler.",
    epilog="Each command has --help with examples.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
KINDS: dict[Any, type[TyperCommand]] = {
    **dict.fromkeys((generate, chat, complete, config, inspect, demo), EngineCommand),
    serve: ServeCommand,
    transcribe: TranscribeCommand,
}
for command in (generate, chat, complete, serve, transcribe, config, inspect, tune, quantise, demo):
    app.command(cls=KINDS.get(command))(command)
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")


def show_version(wanted: bool) -> None:
    if wanted:
        from compiled_engine import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the `compiled-engine` script."""
    keep_bytecode()
    app()
