"""`compiled-engine inspect`: everything that the compiler did, as a page, text files or JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.errors import BadInputError, bad_input_is_reported
from compiled_engine.cli.output import make_folder, written_to

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig
    from compiled_engine.graphs.inspection.report import Report
    from compiled_engine.process.progress import Progress

PAGE = "report.html"
TEXT = "text"


@takes_engine_options
def inspect(
    *,
    engine: dict[str, Any],
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="The page, or a folder for the page and the text files.")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="Folder of text files, for comparing.")] = None,
    depyf: Annotated[
        Path | None, typer.Option("--depyf", help="Folder for depyf's files; compiles the model again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Also start the engine, to measure start-up and memory.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Show everything that the compiler did to a model.

    The report is read from the compile cache; a model that is not there yet is compiled. No weights are read without
    --run.

    Examples:

      compiled-engine inspect -o report.html

      compiled-engine inspect --model path/to/Qwen3-0.6B --run -o reports/qwen3/

      compiled-engine inspect --json | jq '.passes[] | {name, range, matches, contract}'
    """
    if not (output or text or depyf or as_json):
        raise BadInputError("nothing to write: give --output, --text, --depyf or --json")
    # Other output to stdout must not mix with the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        with bad_input_is_reported():
            from compiled_engine.other_engines.translate import make_options
            from compiled_engine.process.progress import RichProgress, SilentProgress
            from compiled_engine.resolve.engine import resolve

            progress = SilentProgress() if quiet else RichProgress()
            config = resolve(make_options(engine), progress)
            page, text = _places(output, text)
        if depyf is not None:
            _write_depyf(config, depyf, progress)
        if page or text or as_json:
            report = _report_of_run(engine, quiet) if run else _report_of_entry(config, progress)
            with bad_input_is_reported((OSError,)):
                _write(report, page, text)
    if as_json:
        typer.echo(json.dumps(report.data, indent=1))


def _places(output: str | None, text: Path | None) -> tuple[Path | None, Path | None]:
    """Return the paths of the page and of the folder of text files, each None if it is not wanted. Makes the folders.

    `output` is the path of the page. If it ends with a slash or is a folder, the page goes there, and so do the text
    files unless `text` is given.
    """
    if text is not None:
        make_folder("text", text)
    if output is None:
        return None, text
    place = Path(output)
    if output.endswith("/") or place.is_dir():
        make_folder("output", place)
        return place / PAGE, text or place / TEXT
    make_folder("output", place.parent)
    return place, text


def _report_of_entry(config: EngineConfig, progress: Progress) -> Report:
    """Return a report on the cache entry of a configuration, which is built if missing. Eager mode has no entry."""
    from compiled_engine.config import json_value
    from compiled_engine.graphs.compiled_model import compile_model
    from compiled_engine.graphs.inspection.report import CompiledEntry, make_report
    from compiled_engine.models.checkpoint.build_model import build_model
    from compiled_engine.process.timeline import Timeline

    timeline = Timeline()
    timeline.add("before the look-up", 0.0, timeline.now())
    if not config.compile.enabled:
        return make_report(json_value(config), None, timeline.as_records())
    found = compile_model(config, build_model, progress, timeline)
    entry = CompiledEntry.of(config, found.lookup.folder, found.lookup.status)
    return make_report(json_value(config), entry, timeline.as_records())


def _report_of_run(engine: dict[str, Any], quiet: bool) -> Report:
    """Start an engine, generate some tokens, and return a report with start-up times and metrics."""
    from compiled_engine.config import json_value
    from compiled_engine.graphs.inspection.kernels import kernels_per_decode_step
    from compiled_engine.graphs.inspection.report import CompiledEntry, make_report
    from compiled_engine.llm import LLM
    from compiled_engine.process.timeline import Span, Timeline
    from compiled_engine.sampling.params import SamplingParams

    # The options are valid. The checkpoint may still be invalid, or memory insufficient.
    with bad_input_is_reported((ValueError, OSError, MemoryError)):
        llm = LLM(**engine, progress=not quiet)

    def generate(num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        llm.generate({"prompt_token_ids": [0]}, params, use_tqdm=False)

    with llm:
        clock = Timeline()
        ready_s = clock.now()
        generate(1)
        first_token = Span("first token", ready_s, clock.now() - ready_s)
        metrics = llm.metrics() | {"kernels_per_decode_step": kernels_per_decode_step(generate, llm.config.device)}
        start_up = [*metrics["start_up"], asdict(first_token)]
        folder = metrics["cache_entry"]
        entry = None if folder is None else CompiledEntry.of(llm.config, Path(folder), metrics["cache"])
        return make_report(json_value(llm.config), entry, start_up, metrics)


def _write(report: Report, page: Path | None, text: Path | None) -> None:
    from compiled_engine.graphs.inspection.html import render_html
    from compiled_engine.graphs.inspection.text_folder import write_text_folder

    if page is not None:
        with written_to(page):
            page.write_text(render_html(report), encoding="utf-8")
        typer.echo(f"wrote {page}", err=True)
    if text is not None:
        with written_to(text):
            write_text_folder(report, text)
        typer.echo(f"wrote {text}", err=True)


def _write_depyf(config: EngineConfig, folder: Path, progress: Progress) -> None:
    with bad_input_is_reported():
        if not config.compile.enabled:
            raise ValueError("mode is 'eager': nothing is compiled that depyf could show; allowed: compiled, graphed")
        make_folder("depyf", folder)
    from compiled_engine.graphs.inspection.text_folder import write_depyf_folder
    from compiled_engine.models.checkpoint.build_model import build_model

    write_depyf_folder(config, build_model, folder, progress)
    typer.echo(f"wrote {folder}", err=True)
