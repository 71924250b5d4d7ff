"""`compiled-engine serve`: an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compiled_engine.cli.arguments import (
    ENGINE_ARGUMENTS,
    Command,
    arguments_of,
    read_config_file,
    take_model,
    takes_options,
)
from compiled_engine.cli.errors import BadInputError, bad_input_is_reported
from compiled_engine.cli.other_words import EngineCommand
from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.keywords import KEYWORDS
from compiled_engine.other_engines.serve_words import SERVER, read_environment
from compiled_engine.server.options import Limits, ServerOptions

if TYPE_CHECKING:
    from compiled_engine.async_llm import AsyncLLM
    from compiled_engine.server.api_servers import ApiServers

SERVER_ARGUMENTS = arguments_of(ServerOptions)
SERVER_NAMES = {argument.name for argument in SERVER_ARGUMENTS}
NEEDED = ("starlette", "uvicorn", "httptools", "prometheus_client", "yaml")


class ServeCommand(EngineCommand):
    """The command `serve`, which also accepts options of other engines' servers."""

    # Server options replace keyword rows of the same name, which describe keywords without effect in Python.
    rows = {name: row for name, row in KEYWORDS.items() if name not in SERVER_NAMES} | SERVER


def _takes_server_options(command: Command) -> Command:
    for keyword, panel, arguments in (
        ("engine", "Engine", ENGINE_ARGUMENTS),
        ("limits", "Limits", arguments_of(Limits)),
        ("server", "Server", SERVER_ARGUMENTS),
    ):
        command = takes_options(command, keyword, panel, arguments, from_environment=True)
    return command


@_takes_server_options
def serve(
    *,
    named: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    ] = None,
    server: dict[str, Any],
    limits: dict[str, Any],
    engine: dict[str, Any],
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with options; the command line and COMPILED_ENGINE_<OPTION> come before it.",
            callback=read_config_file,
            is_eager=True,
            envvar="COMPILED_ENGINE_CONFIG",
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Serve a model to OpenAI's clients.

    Every option but --quiet may come from the environment instead: COMPILED_ENGINE_MAX_MODEL_LEN for --max-model-len.
    SIGTERM lets running requests finish; a second one ends them.

    Examples:

      compiled-engine serve

      compiled-engine serve path/to/Qwen3-0.6B --port 8000 --max-model-len 8192

      COMPILED_ENGINE_API_KEY=secret compiled-engine serve org/name --host 0.0.0.0 --config server.yaml
    """
    take_model(named, engine)
    _require_packages()
    with bad_input_is_reported():
        options = checked_options(server, limits, engine)

        from compiled_engine.server.api_servers import ApiServers
        from compiled_engine.server.run import bind, first_signal_interrupts  # imports torch

        bound = bind(options)
    others = ApiServers(options, bound)
    try:
        with first_signal_interrupts():
            started = _start(engine, quiet)
        reason = asyncio.run(_serve(started, options, bound, model_name(engine.get("model"), started), others))
    finally:
        others.kill()
    if reason is not None:
        raise typer.Exit(1)


def checked_options(server: dict[str, Any], limits: dict[str, Any], engine: dict[str, Any]) -> ServerOptions:
    """Return the server's options after all checks that need no started process. Raises TypeError or ValueError."""
    from compiled_engine.server.lora_modules import check_adapter_folders, check_adapter_options

    options = ServerOptions(**server, limits=Limits(**limits))
    EngineOptions(**engine)  # checks them
    if ignored := read_environment(os.environ, may_load=bool(options.allowed_lora_folder)):
        typer.echo(f"compiled-engine: environment variables without effect: {', '.join(ignored)}", err=True)
    check_adapter_options(options, bool(engine.get("enable_lora")))
    check_adapter_folders(options, engine.get("max_lora_rank", EngineOptions.max_lora_rank))
    return options


def _start(engine: dict[str, Any], quiet: bool) -> AsyncLLM:
    """Start the engine. The process of the engine core runs its imports in parallel with this process."""
    from compiled_engine.process.init_cuda import given_device, init_cuda
    from compiled_engine.processes.core_child import CoreChild

    core = CoreChild.of(engine)
    try:
        with bad_input_is_reported():
            init_cuda(given_device(engine), runs_here=False)  # while torch is imported
            from compiled_engine.async_llm import AsyncLLM

            return AsyncLLM(**engine, progress=not quiet, core=core)
    except BaseException:
        core.close(0)
        raise


async def _serve(engine: AsyncLLM, options: ServerOptions, bound: Any, name: str, others: ApiServers) -> str | None:
    from compiled_engine.process.memory import freeze_heap
    from compiled_engine.server.api_servers import Order
    from compiled_engine.server.app import build_app
    from compiled_engine.server.connections import allow_many_files
    from compiled_engine.server.run import Server, address, serve

    try:
        with bad_input_is_reported((ValueError, OSError)):
            app = build_app(engine, options, name, others.figures)
            await app.serving.adapters.load_given(engine)  # an invalid one stops the server
            others.give(Order(engine.address or "", options, name))
        with bad_input_is_reported((RuntimeError,)):
            await others.wait_ready()
    except BadInputError:
        await engine.shutdown()
        raise
    allow_many_files()
    freeze_heap()

    def announce() -> None:
        names = ", ".join(options.served_model_name or (name,))
        with contextlib.suppress(OSError):  # a full disk
            typer.secho(f"{names} is served at {address(options, bound)}/v1", err=True)

    place = others.place if options.api_server_count > 1 else None
    return await serve(engine, Server(app, options, place, others, announce), bound)


def model_name(given: str | None, engine: AsyncLLM) -> str:
    """Return the model's default name: "bundled" if no model is given, else its name on the hub or its folder's."""
    model = engine.config.model
    return "bundled" if given is None else model.hub_name or model.path.name


def _require_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise BadInputError(
            f"serving needs packages that are not installed ({', '.join(missing)}): "
            "python -m pip install 'compiled-engine[serve]'"
        )
