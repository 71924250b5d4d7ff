"""Names of files and of attributes that docstrings, comments and pages give are names of what is there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

from folders import REPOSITORY
from test_import_directions import modules

# Files of other programs, and of no program yet.
OTHERS = {"bench.py", "shim.py", "their_script.py", "attention/backends/NAME_backend.py"}
FILE = re.compile(r"(?<![\w/.-])((?:[\w-]+/)*\w+\.py)\b")
ATTRIBUTE = re.compile(r"\b([A-Z][A-Za-z]+[a-z]\w*)\.(\w+)\b(?!\()")


@cache
def files() -> frozenset[str]:
    """The ends of the paths of all files: `sampler.py`, `sampling/sampler.py` and so on."""
    found: set[str] = set()
    for folder in ("compiled_engine", "graphs", "models", "passes", "tests", "docs"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).parts
            found |= {"/".join(parts[start:]) for start in range(len(parts))}
            found.add("/".join(("compiled_engine", *parts)))  # as it is imported
    return frozenset(found)


def prose(path: Path) -> str:
    """The comments and docstrings of a file."""
    source = path.read_text()
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return "\n".join([*comments, *docstrings])


@cache
def members() -> dict[str, frozenset[str]]:
    """By class of the product, all names that its body gives: methods, fields, and attributes of self."""
    found: dict[str, set[str]] = {}
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                for part in ast.walk(node):
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                        names.add(part.name)
                    elif isinstance(part, ast.Name):
                        names.add(part.id)
                    elif isinstance(part, ast.Attribute):
                        names.add(part.attr)
                for base in node.bases:
                    names.add(f"base {ast.unparse(base)}")
    return {name: frozenset(names) for name, names in found.items()}


def has(owner: str, name: str) -> bool:
    """Return whether a class, or one that it is derived from, has a name; true for classes of others."""
    known = members().get(owner)
    if known is None or name in known:
        return True
    bases = [each.removeprefix("base ").split("[")[0].split(".")[-1] for each in known if each.startswith("base ")]
    return any((base not in members() and base != "object") or has(base, name) for base in bases)


def wrong(text: str) -> list[str]:
    named = [name for name in FILE.findall(text) if name not in files() | OTHERS]
    attributes = [f"{owner}.{name}" for owner, name in ATTRIBUTE.findall(text) if not has(owner, name)]
    return named + attributes


def test_what_prose_of_the_product_names_is_there() -> None:
    # Prose is a part of the text, which is read far sooner.
    suspects = {name: path for name, path in modules().items() if wrong(path.read_text())}
    found = {name: faults for name, path in suspects.items() if (faults := wrong(prose(path)))}
    assert found == {}


def test_what_pages_name_is_there() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    found = {page.name: faults for page in pages if (faults := wrong(page.read_text()))}
    assert found == {}


def test_a_wrong_name_is_found() -> None:
    assert wrong("see no_such_file.py, and `Scheduler.no_such_method`") == [
        "no_such_file.py",
        "Scheduler.no_such_method",
    ]
    assert wrong("see engine/scheduler.py, and `Scheduler.schedule`") == []
