"""A field is declared once: checks, the command line, the environment, YAML files, requests and documents follow."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from compiled_engine.attention.backend import BACKENDS
from compiled_engine.cli.arguments import arguments_of, as_written, read_config_file, takes_options
from compiled_engine.config import GraphMode
from compiled_engine.models.checkpoint.config_reader import DTYPES
from compiled_engine.options import EngineOptions
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.schema import (
    SWITCH,
    TEXTS,
    check_all,
    declarations,
    declare,
    described,
    documented,
    integer,
    one_of,
    sizes,
)
from compiled_engine.server.options import Limits, ServerOptions
from compiled_engine.server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from compiled_engine.server.sampling_fields import request_type


@dataclass(frozen=True)
class Options:
    """Options of a test."""

    rows: int | None = declare(None, integer(1, 9), "rows of [the page](page.md)", "no `more`", default_is="all")
    colour: str = declare("red", one_of("red", "blue"), "`red` or `blue`")
    shadow: bool = declare(True, SWITCH, "draw a shadow")
    grid: bool = declare(False, SWITCH, "draw a grid")
    names: tuple[str, ...] = declare((), TEXTS, "write these names", flag="--name")
    widths: tuple[int, ...] | None = declare(None, sizes(), "use these widths", flag="--width")
    hidden: int = declare(0, integer(0), "of Python alone", flag=None)

    def __post_init__(self) -> None:
        check_all(self)


ARGUMENTS = arguments_of(Options)
CALLS: list[dict[str, Any]] = []
APP = typer.Typer()


def draw(
    *, options: dict[str, Any], config: Annotated[Path | None, typer.Option(callback=read_config_file)] = None
) -> None:
    CALLS.append(options)


APP.command()(takes_options(draw, "options", "Options", ARGUMENTS, from_environment=True))


def drawn(*words: str, **variables: str) -> dict[str, Any]:
    result = CliRunner().invoke(APP, words, env=variables)
    assert result.exit_code == 0, result.output
    return CALLS.pop()


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], {}),
        (["--rows", "3", "--colour", "blue"], {"rows": 3, "colour": "blue"}),
        (["--no-shadow", "--grid"], {"shadow": False, "grid": True}),
        (["--name", "a", "--name", "b", "--width", "2"], {"names": ("a", "b"), "widths": (2,)}),
        (["--width", "0"], {"widths": ()}),
    ],
)
def test_the_command_line_the_environment_and_a_file_give_options(
    words: list[str], values: dict[str, Any], tmp_path: Path
) -> None:
    assert drawn(*words) == values
    assert Options(**values) is not None
    assert as_written(ARGUMENTS, values) == words
    written = {argument.name: argument for argument in ARGUMENTS}
    variables = {written[name].variable: _in_a_variable(written[name], value) for name, value in values.items()}
    assert drawn(**variables) == values
    file = tmp_path / "options.yaml"
    lines = (f"{written[name].written[2:]}: {_in_yaml(written[name], value)}" for name, value in values.items())
    file.write_text("\n".join(lines) or "{}")
    assert drawn("--config", str(file)) == values


def _in_a_variable(argument: Any, value: Any) -> str:
    if argument.type is bool:
        return "1"
    return " ".join(map(str, value or (0,))) if isinstance(value, tuple) else str(value)


def _in_yaml(argument: Any, value: Any) -> str:
    if argument.type is bool:
        return "true"
    return str(list(value or (0,))) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({"rows": 10}, ValueError, "rows is 10; allowed: an integer from 1 to 9"),
        ({"rows": "a"}, TypeError, "rows is 'a'; allowed: an integer from 1 to 9"),
        ({"colour": None}, ValueError, "colour is None; allowed: red, blue"),
        ({"grid": 1}, TypeError, "grid is 1; allowed: True or False"),
        ({"names": "a"}, TypeError, "names is 'a'; allowed: a list"),
        ({"widths": (1, 0)}, ValueError, "widths has 0; allowed: integers of at least 1"),
        ({"hidden": -1}, ValueError, "hidden is -1; allowed: an integer of at least 0"),
    ],
)
def test_a_wrong_value_is_an_error_that_says_what_is_allowed(
    values: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{message}$"):
        Options(**values)


def test_help_and_documents_have_the_meaning() -> None:
    assert {argument.written: argument.help + argument.default for argument in ARGUMENTS} == {
        "--rows": "Rows of the page. Default: all.",
        "--colour": "red or blue. Default: red.",
        "--no-shadow": "Do not draw a shadow.",
        "--grid": "Draw a grid.",
        "--name": "Write these names; may be repeated.",
        "--width": "Use these widths; may be repeated; 0 for none.",
    }
    assert described(declarations(Options)[0]) == "rows of [the page](page.md); None: all; 1 to 9; no `more`"
    assert "    grid: draw a grid.\n" in documented(Options)


ALL = [each for options in (EngineOptions, SamplingParams, ServerOptions, Limits) for each in declarations(options)]


def test_a_declaration_is_well_formed() -> None:
    for declaration in ALL:
        text = declaration.text
        assert text[0].islower() or text[0] in "`[" or text.startswith(("Jinja", "FX")), declaration.name
        assert not described(declaration).endswith("."), declaration.name
        names = declaration.kind.schema.get("enum", ())
        assert [name for name in names if name not in ("auto", *re.findall(r"[\w-]+", text))] == [], declaration.name
        if declaration.default is not None:
            declaration.kind.check(declaration.name, declaration.default)


def test_names_that_may_be_chosen_are_those_that_there_are() -> None:
    names = {
        each.name: each.kind.schema.get("enum")
        for options in (EngineOptions, ServerOptions)
        for each in declarations(options)
    }
    assert names["attention_backend"] == ("auto", *BACKENDS)
    assert names["dtype"] == ("auto", *DTYPES)
    assert names["graph_mode"] == ("auto", *(mode.value for mode in GraphMode))
    assert names["tool_call_parser"] == ("auto", "none", *TOOL_FORMATS)
    assert names["reasoning_parser"] == ("auto", "none", *REASONING_FORMATS)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 9}, [0, 10], [-1, "a"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0, 1.5]),
        ({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}, [["a"]], [[], [""], "a"]),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, ["a", [1]], [1, ["a"]]),
        ({"type": "object"}, [{"a": 1}], [[]]),
        ({"enum": ("a", "b")}, ["a", "b"], ["c", 1]),
    ],
)
def test_a_field_of_requests_takes_what_is_declared(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    kind = request_type(schema)
    assert [msgspec.convert(value, kind) for value in right] == right
    for value in wrong:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(value, kind)
