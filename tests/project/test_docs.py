"""The documentation tells the truth: its examples and commands run and print what it says, its options and links exist.

A block of Python or shell that no test can run says so in a comment before it: <!-- fragment: why -->.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from folders import REPOSITORY
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.options import EngineOptions
from compiled_engine.passes.registry import registered_passes
from compiled_engine.sampling.params import SamplingParams

GETTING_STARTED = REPOSITORY / "docs" / "getting_started.md"
PASSES = REPOSITORY / "docs" / "passes.md"
WITH_EXAMPLES = (REPOSITORY / "README.md", GETTING_STARTED)
DOCUMENTS = (*WITH_EXAMPLES, *(path for path in sorted((REPOSITORY / "docs").glob("*.md")) if path != GETTING_STARTED))

FENCE = re.compile(r"(?:^<!-- (fragment: .*?) -->\n)?^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "sh", "console", "text", "mermaid", ""}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, its name in test ids, and whether it says that it cannot be run."""

    language: str
    text: str
    name: str
    is_fragment: bool


def blocks(document: Path) -> list[Block]:
    source = document.read_text()
    return [
        Block(match[2], match[3], f"{document.name}:{source.count(chr(10), 0, match.start()) + 1}", bool(match[1]))
        for match in FENCE.finditer(source)
    ]


def examples() -> Iterator[Any]:
    """Python blocks, each with the text block that follows it at once: what it prints."""
    for document in DOCUMENTS:
        found: list[Any] = blocks(document)
        for block, following in pairwise([*found, None]):
            # The example of passes.md changes the list of passes and has a test of its own.
            if block.language == "python" and not block.is_fragment and document != PASSES:
                printed = following.text if following and following.language == "text" else ""
                yield pytest.param(block.text, printed, id=block.name)


def lines_of(block: Block) -> Iterator[str]:
    """The commands of a shell block; in a console block these begin with $, and the rest is output."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language != "console" or line.startswith("$ "):
            yield line.removeprefix("$ ").partition("  # ")[0]


COMMAND = typer.main.get_command(app)
# A model that is compiled for one command alone.
COMPILED_ALONE = pytest.mark.shown_by(
    "project/test_docs.py::test_a_command_line_is_valid",
    "passes/test_run_passes.py::test_a_pass_that_does_not_run_changes_and_counts_nothing",
)


def commands(*, with_fragments: bool) -> Iterator[Any]:
    for document in DOCUMENTS:
        for block in blocks(document):
            if block.language in ("sh", "console") and (with_fragments or not block.is_fragment):
                for line in lines_of(block):
                    if with_fragments and not line.startswith("compiled-engine "):
                        continue
                    is_alone = re.search("(generate|inspect) .*--(disable|verify)-pass", line) and not with_fragments
                    marks = COMPILED_ALONE if is_alone else ()
                    yield pytest.param(line, id=f"{block.name} {line}", marks=marks)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("code", "printed"), list(examples()))
def test_an_example_prints_what_the_text_says(
    code: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exec(compile(code, "<example>", "exec"), {"__name__": "example"})
    assert without_trailing_space(capsys.readouterr().out) == without_trailing_space(printed)


def without_trailing_space(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.mark.parametrize("line", list(commands(with_fragments=True)))
def test_a_command_line_is_valid(line: str) -> None:
    command: Any = COMMAND
    words = shlex.split(line.partition(" | ")[0])[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("line", list(commands(with_fragments=False)))
def test_a_command_runs(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    command, _, rest = line.partition(" | ")
    name, *arguments = shlex.split(command)
    assert name == "compiled-engine"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    if rest and shutil.which(shlex.split(rest)[0]):
        piped = subprocess.run(["bash", "-c", rest], input=result.stdout, capture_output=True, text=True, check=False)
        assert piped.returncode == 0, piped.stderr


def test_every_block_says_what_it_is() -> None:
    found = [block for document in DOCUMENTS for block in blocks(document)]
    assert [block.name for block in found if block.language not in LANGUAGES] == []
    unnamed = [block.name for block in found if not block.language and "$ " in block.text]
    assert unnamed == []


def first_cells(heading: str) -> dict[str, str]:
    """The first two columns of the table below a heading, without their backticks."""
    section = GETTING_STARTED.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section, re.MULTILINE))


def test_the_table_of_options_is_complete() -> None:
    defaults = {field.name: repr(field.default) for field in fields(EngineOptions)}
    assert first_cells("Options of LLM") == defaults


def test_the_table_of_sampling_parameters_is_complete() -> None:
    defaults = {field.name: repr(field.default) for field in fields(SamplingParams) if field.default is not MISSING}
    assert first_cells("Sampling parameters") == defaults


@pytest.mark.parametrize("document", [WITH_EXAMPLES[0], PASSES], ids=lambda path: path.name)
def test_every_pass_is_named(document: Path) -> None:
    text = document.read_text()
    assert [name for name in (p.name for p in registered_passes()) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_resolve(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", FENCE.sub("", document.read_text()))
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_options_of_vllm_are_named_as_they_are() -> None:
    """Options with vLLM's name, and what replaces another, are options of `serve`; what they replace is not."""
    command: Any = typer.main.get_command(app)
    options = {name for each in command.commands["serve"].params for name in (*each.opts, *each.secondary_opts)}
    section = (REPOSITORY / "docs" / "switching.md").read_text().split("\n## Commands\n")[1].split("\n## ")[0]
    section = section.split("`compiled-engine bench serve` replaces")[0]
    same = section.split("Many options have")[1].split("Words of its server")[0]
    option = re.compile(r"`(--?[a-z-]+)")
    assert {*option.findall(same)} <= options
    of_servers = section.split("<!-- table: words_of_servers -->")[1].split("<!-- /table -->")[0]
    replaced = re.findall(r"^\| (`-.*?) \| .*? \|$", of_servers, re.MULTILINE)
    assert len(replaced) > 10
    assert options.isdisjoint(option.findall(" ".join(replaced)))
