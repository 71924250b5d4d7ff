"""`compiled-engine transcribe`: the text of audio files."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.other_words import EngineCommand
from compiled_engine.other_engines.keywords import KEYWORDS, Rows
from compiled_engine.process.init_cuda import core_has_device, given_device, init_cuda


class TranscribeCommand(EngineCommand):
    """The command `transcribe`, which takes --task as its own option, not as vLLM's engine option of that name."""

    rows: ClassVar[Rows] = {name: row for name, row in KEYWORDS.items() if name != "task"}


@takes_engine_options
def transcribe(
    files: Annotated[list[Path], typer.Argument(help="Audio files: WAV, FLAC, Ogg or MP3.", show_default=False)],
    *,
    engine: dict[str, Any],
    language: Annotated[
        str | None, typer.Option(help="Code of the language, such as en; by default it is detected.")
    ] = None,
    task: Annotated[str, typer.Option(help="transcribe, or translate into English.")] = "transcribe",
    prompt: Annotated[
        str | None, typer.Option(help="A text before the audio's, whose style and names the result follows.")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, max=2, help="Repeat it for those of windows that failed. Default: 0 to 1 in steps of 0.2."),
    ] = None,
    output_format: Annotated[str, typer.Option("--format", help="text, json, verbose_json, srt or vtt.")] = "text",
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Print the text of audio files, with a speech model such as Whisper.

    Examples:

      compiled-engine transcribe --model openai/whisper-large-v3-turbo talk.flac

      compiled-engine transcribe --model path/to/whisper --language de --task translate --format srt rede.wav
    """
    init_cuda(given_device(engine), runs_here=core_has_device(engine))  # while torch is imported
    with bad_input_is_reported(), contextlib.redirect_stdout(sys.stderr):
        from compiled_engine.features.speech.frontend.decoding import Wanted
        from compiled_engine.features.speech.frontend.formats import FORMATS, TIMED
        from compiled_engine.llm import LLM
        from compiled_engine.other_engines.translate import make_options
        from compiled_engine.process.progress import RichProgress, SilentProgress
        from compiled_engine.resolve.engine import resolve
        from compiled_engine.speech import require_rules

        if output_format not in FORMATS:
            raise ValueError(f"--format is {output_format!r}; allowed: {', '.join(FORMATS)}")
        for file in files:
            if not file.is_file():
                raise ValueError(f"{str(file)!r} is no file")
        # Another model and wrong arguments are refused here, before weights are loaded.
        config = resolve(make_options(engine), SilentProgress() if quiet else RichProgress())
        rules, timestamps = require_rules(config.speech), output_format in TIMED
        context = (rules.start,) if prompt else ()  # its tokens are known once there is a tokenizer
        Wanted.checked(rules, config.model.vocab_size, language, task, context, temperature, timestamps)
    with bad_input_is_reported((ValueError, OSError, MemoryError)), contextlib.redirect_stdout(sys.stderr):
        llm = LLM(**engine, progress=not quiet)
    with llm:
        for file in files:
            with bad_input_is_reported((ValueError, OSError)), contextlib.redirect_stdout(sys.stderr):
                result = llm.transcribe(
                    file,
                    language=language,
                    task=task,
                    prompt=prompt,
                    temperature=temperature,
                    timestamps=timestamps,
                )
            typer.echo(FORMATS[output_format](result, task).rstrip("\n"))
