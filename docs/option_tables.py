"""The tables of options in the documents, from what the code declares. Each function returns Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from compiled_engine.cli.arguments import Argument, arguments_of
from compiled_engine.options import EngineOptions
from compiled_engine.other_engines.bench_words import BENCH
from compiled_engine.other_engines.keywords import KEYWORDS, Honoured, Nested, Only, Row, Rows, WithoutEffect
from compiled_engine.other_engines.methods import MISSING
from compiled_engine.other_engines.serve_words import SERVER
from compiled_engine.sampling.other_params import OF_TRANSFORMERS, OTHER_PARAMS
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.schema import Declaration, declarations, described
from compiled_engine.server.options import Limits, ServerOptions


def engine_options() -> str:
    """Return a table of the keywords of `LLM`, with the command-line option where that has another name."""
    rows = (row(each, *written_otherwise(each)) for each in declarations(EngineOptions))
    return markdown("option", "default", "meaning", rows=rows)


def sampling_parameters() -> str:
    return markdown("field", "default", "meaning", rows=map(row, declarations(SamplingParams)))


def other_sampling_parameters() -> str:
    """Return a table of vLLM's sampling parameters that this engine lacks, grouped by how they are handled."""
    names = by_value((param.result, f"`{name}`{values(param.asks_nothing)}") for name, param in OTHER_PARAMS.items())
    return markdown(
        "parameters (values that do not ask for it)", "here", rows=[(each, text) for text, each in names.items()]
    )


def transformers_parameters() -> str:
    """Return a table of parameters of transformers' `generate`, with this engine's names for them."""
    names = by_value((instead, f"`{name}`") for name, instead in OF_TRANSFORMERS.items())
    return markdown("parameters", "instead", rows=[(each, instead) for instead, each in names.items()])


def server_options() -> str:
    """Return a table of the options of `serve` in addition to the engine's, as the command line writes them."""
    return written_options(ServerOptions)


def server_limits() -> str:
    return written_options(Limits)


def written_options(options: type[Any]) -> str:
    rows = []
    for argument in arguments_of(options):
        meaning = "do not " * argument.negates + described(argument.declaration)
        meaning += " (may be repeated)" * argument.declaration.several
        rows.append((f"`{argument.written}`", ", ".join(f"`{value}`" for value in argument.defaults), meaning))
    return markdown("option", "default", "meaning", rows=rows)


def row(declaration: Declaration, *notes: str) -> tuple[str, str, str]:
    meaning = described(declaration) + (f" ({', '.join(notes)})" if notes else "")
    return f"`{declaration.name}`", f"`{declaration.default!r}`", meaning


def written_otherwise(declaration: Declaration) -> Iterator[str]:
    """Yield notes on an option: its flag, if that is not its name with hyphens, and that it may be repeated."""
    argument: Any = Argument(declaration)
    if argument.written != f"--{declaration.name.replace('_', '-')}":
        yield f"`{argument.written}`"
    if declaration.several:
        yield "may be repeated"


def same_keywords() -> str:
    """Return a list of the keywords of other engines that are options of this engine, with the same name."""
    return ", ".join(name for name, means in honoured(KEYWORDS) if name == means) + "."


def honoured_keywords() -> str:
    """Return a table of the other engines' keywords that have a meaning but another name here, by meaning."""
    names = by_value((means, name) for name, means in honoured(KEYWORDS) if name != means)
    return markdown("keyword", "here", rows=[(each, means) for means, each in names.items()])


def keywords_not_supported() -> str:
    """Return a table of the other engines' keywords for unsupported features, by what to use instead."""
    only = {name: row for name, row in KEYWORDS.items() if isinstance(row, Only)}
    names = by_value((row.instead, f"`{name}`{values(row.values)}") for name, row in only.items())
    rows = [(each, instead) for instead, each in names.items()]
    return markdown("keywords (values that do not ask for it)", "instead", rows=rows)


def keywords_without_effect() -> str:
    """Return a table of the other engines' keywords that change nothing here, by the reason."""
    ignored = {name: row for name, row in KEYWORDS.items() if isinstance(row, WithoutEffect)}
    names = by_value((row.reason, f"`{name}`") for name, row in ignored.items())
    return markdown("why", "keywords", rows=names.items())


def words_of_servers() -> str:
    return words("option of `vllm serve`", SERVER)


def words_of_load_tests() -> str:
    return words("option of `vllm bench serve`", BENCH)


def words(heading: str, rows: Rows) -> str:
    """Return a table of the options of another engine's command, grouped by how they are handled here."""
    names = by_value((_here(row), f"`--{name.replace('_', '-')}`") for name, row in rows.items() if _here(row))
    return markdown(heading, "here", rows=[(each, here) for here, each in names.items()])


def _here(row: Row) -> str:
    """Return how an option of another engine's command is handled; "" if it is an option of this engine too."""
    if isinstance(row, Honoured):
        return "" if row.means == f"`{row.option}`" else row.means
    if isinstance(row, Only):
        return f"error: not supported; {row.instead}"
    return f"no effect: {row.reason}" if isinstance(row, WithoutEffect) else ""


def missing_methods() -> str:
    """Return a table of attributes of other engines' `LLM`, by what to use instead."""
    names = by_value((instead, f"`{name}`") for name, instead in MISSING.items())
    return markdown("attributes", "instead", rows=[(each, instead) for instead, each in names.items()])


def honoured(rows: Mapping[str, Row], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, row in rows.items():
        if isinstance(row, Nested):
            yield from honoured(row.rows, f"{name}: ")
        elif isinstance(row, Honoured):
            yield f"`{prefix}{name}`", row.means


def values(accepted: Sequence[Any]) -> str:
    given = [each for each in accepted if each is not None]
    return f" ({', '.join(map(repr, given))})" if given else ""


def by_value(pairs: Iterable[tuple[Any, str]]) -> dict[Any, str]:
    """Return the names of each value, joined by commas. pairs: (value, name)."""
    names = defaultdict(list)
    for value, name in pairs:
        names[value].append(name)
    return {value: ", ".join(each) for value, each in names.items()}


def markdown(*headings: str, rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
