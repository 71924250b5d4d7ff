"""The documentation tells the truth: its examples run and print what it says, its options and links exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from compiled_engine.cli.app import app
from compiled_engine.options import EngineOptions
from compiled_engine.passes.registry import registered_passes
from compiled_engine.sampling.params import SamplingParams

REPOSITORY = Path(__file__).parent.parent
GETTING_STARTED = REPOSITORY / "docs" / "getting_started.md"
LOGITS_PROCESSORS = REPOSITORY / "docs" / "logits_processors.md"
WITH_EXAMPLES = (REPOSITORY / "README.md", GETTING_STARTED)
DOCUMENTS = (*WITH_EXAMPLES, *(path for path in sorted((REPOSITORY / "docs").glob("*.md")) if path != GETTING_STARTED))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and its name in test ids."""

    language: str
    text: str
    name: str


def blocks(document: Path) -> list[Block]:
    source = document.read_text()
    return [
        Block(match[1], match[2], f"{document.name}:{source.count(chr(10), 0, match.start()) + 1}")
        for match in FENCE.finditer(source)
    ]


def examples() -> Iterator[Any]:
    """Python blocks, each with the text block that follows it at once: what it prints."""
    for document in (*WITH_EXAMPLES, LOGITS_PROCESSORS):
        found = blocks(document)
        for block, following in zip(found, [*found[1:], None], strict=True):
            if block.language == "python":
                printed = following.text if following and following.language == "text" else ""
                yield pytest.param(block.text, printed, id=block.name)


def commands() -> Iterator[Any]:
    for document in DOCUMENTS:
        for block in blocks(document):
            for line in block.text.replace("\\\n", " ").splitlines():
                command = line.removeprefix("$ ")
                if command.startswith("compiled-engine "):
                    yield pytest.param(command, id=f"{block.name} {command}")


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


@pytest.mark.parametrize("line", list(commands()))
def test_a_command_line_is_valid(line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line.partition(" | ")[0])[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


def first_cells(heading: str) -> dict[str, str]:
    """The first two columns of the table below a heading, without their backticks."""
    section = GETTING_STARTED.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section, re.MULTILINE))


def test_the_table_of_options_is_complete() -> None:
    defaults = {field.name: repr(field.default) for field in fields(EngineOptions)}
    assert first_cells("Options of LLM") == defaults


def test_the_table_of_sampling_parameters_is_complete() -> None:
    defaults = {field.name: repr(field.default) for field in fields(SamplingParams) if field.default is not MISSING}
    del defaults["bad_words_token_ids"]
    assert first_cells("Sampling parameters") == defaults


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=lambda path: path.name)
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
