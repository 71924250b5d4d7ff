"""Who may import whom: nothing below the engine knows the scheduler, the runner, the API or the CLI."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
FOLDERS = {
    "compiled_engine": REPOSITORY / "compiled_engine",
    "compiled_engine.passes": REPOSITORY / "passes",
    "compiled_engine.graphs": REPOSITORY / "graphs",
    "compiled_engine.models": REPOSITORY / "models",
}
# The attention op's declaration, the config dataclasses and what they are made of.
DECLARATIONS = {
    "compiled_engine.attention.inputs",
    "compiled_engine.attention.op",
    "compiled_engine.config",
    "compiled_engine.near_names",
    "compiled_engine.parameter_layout",
    "compiled_engine.progress",
    "compiled_engine.step_clock",
    "compiled_engine.timeline",
}
ALLOWED = {
    "compiled_engine.models": ("compiled_engine.models",),
    "compiled_engine.passes": ("compiled_engine.passes",),
    "compiled_engine.graphs": (
        "compiled_engine.graphs",
        "compiled_engine.passes",
        "compiled_engine.models.layer_stack",
    ),
    "compiled_engine.attention": ("compiled_engine.attention",),
    "compiled_engine.other_engines": ("compiled_engine.other_engines", "compiled_engine.options"),
    "compiled_engine.scheduling": (
        "compiled_engine.scheduling",
        "compiled_engine.sampling.params",
        "compiled_engine.sampling.token_mask",
        "compiled_engine.engine_io",
    ),
    "compiled_engine.sampling": ("compiled_engine.sampling", "compiled_engine.scheduling.step"),
    "compiled_engine.runner": (
        "compiled_engine.runner",
        "compiled_engine.graphs",
        "compiled_engine.passes.dependent_launch",
        "compiled_engine.passes.silu_mul",
        "compiled_engine.passes.small_batch_linear_launch",
        "compiled_engine.models",
        "compiled_engine.sampling",
        "compiled_engine.scheduling.step",
    ),
}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *[part for part in parts if part != "__init__"]])] = path
    return found


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "compiled_engine"}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_stands_below_it(package: str) -> None:
    allowed = (*ALLOWED[package], *DECLARATIONS)
    checked = 0
    for module, path in modules().items():
        if within(module, package):
            checked += 1
            wrong = [name for name in imports_of(path) if not any(within(name, other) for other in allowed)]
            assert not wrong, f"{module} may not import {wrong}"
    assert checked > 0


def test_the_engine_core_knows_no_api_object() -> None:
    for module in ("compiled_engine.engine_core", "compiled_engine.executor", "compiled_engine.engine_io"):
        for name in imports_of(modules()[module]):
            assert not any(
                within(name, api)
                for api in (
                    "compiled_engine.llm",
                    "compiled_engine.outputs",
                    "compiled_engine.frontend",
                    "compiled_engine.cli",
                )
            ), f"{module} imports {name}"
