"""The packages and the imports allowed between them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from folders import REPOSITORY

FOLDERS = {
    "compiled_engine": REPOSITORY / "compiled_engine",
    "compiled_engine.passes": REPOSITORY / "passes",
    "compiled_engine.graphs": REPOSITORY / "graphs",
    "compiled_engine.models": REPOSITORY / "models",
}
# From the lowest layer up. A package, or a module at the top or named here, may import what precedes it alone.
LAYERS = (
    "process",
    "quantisation_names",
    "quantisation",
    "kv_format",
    "pooling",
    "vision",
    "speech",
    "config",
    "schema",
    "kernels",
    "rows",
    "attention",
    "attention.backends",
    "recurrence",
    "models.bundled",
    "models.textbook",
    "parallel",
    "passes.framework",
    "passes.norm",
    "passes.linear",
    "passes.rope",
    "passes.experts",
    "passes.parallel",
    "passes.quantised",
    "passes.recurrence",
    "passes.invariance",
    "passes.layout",
    "passes.images",
    "passes.speech",
    "passes",
    "models.foreign",
    "models.vision",
    "models.checkpoint",
    "graphs.compiler",
    "graphs.cache",
    "graphs.cuda_graphs",
    "graphs",
    "graphs.cpu_graphs",
    "sampling",
    "options",
    "other_engines",
    "engine",
    "features.adapters",
    "features.angles",
    "features.pipeline",
    "features.pooling",
    "features.prompt_logprobs",
    "features.images",
    "features.kv_events",
    "features.kv_offload",
    "features.recurrence",
    "features.speculation",
    "features.speech",
    "features.structured.grammars",
    "features.structured",
    "features.weight_updates",
    "features.sleep",
    "features.rank_calls",
    "features",
    "graphs.inspection",
    "resolve",
    "processes",
    "frontend",
    "features.adapters.frontend",
    "features.images.frontend",
    "features.pooling.frontend",
    "features.speech.frontend",
    "features.structured.frontend",
    "features.weight_updates.frontend",
    "features.rank_calls.frontend",
    "features.request_registry",
    "frontend_parts",
    "llm_parts",
    "llm",
    "async_llm_parts",
    "async_llm",
    "server.parsers",
    "server",
    "bench",
    "bench.serving",
    "tune",
    "cli",
    "__main__",
)
# The modules of the engine that plan steps, and those that run them.
ON_PAPER = (
    "block_pool",
    "cache_resource",
    "control",
    "kv_cache",
    "messages",
    "plan_hooks",
    "request",
    "request_table",
    "steps",
    "scheduler",
)
ON_DEVICE = (
    "cache_memory",
    "forward",
    "input_batch",
    "load_model",
    "rank_memory",
    "request_states",
    "runner",
    "step_graphs",
    "step_hooks",
    "step_kernels",
    "step_sampling",
    "warm_up",
)
OF_DEVICE = ("graphs", "passes", "models", "attention", "kernels", *(f"engine.{name}" for name in ON_DEVICE))
# The same of features.
PLANNING = (
    "features.adapters.extras",
    "features.adapters.overtaking",
    "features.adapters.plan",
    "features.adapters.table",
    "features.angles.plan",
    "features.kv_events.events",
    "features.kv_events.plan",
    "features.kv_events.publisher",
    "features.kv_offload.block_files",
    "features.kv_offload.break_even",
    "features.kv_offload.extras",
    "features.kv_offload.file_index",
    "features.kv_offload.kept_files",
    "features.kv_offload.kept_rows",
    "features.kv_offload.plan",
    "features.kv_offload.slots",
    "features.pipeline.micro_batches",
    "features.pooling.extras",
    "features.pooling.plan",
    "features.prompt_logprobs.extras",
    "features.prompt_logprobs.plan",
    "features.rank_calls.plan",
    "features.recurrence.snapshots",
    "features.speculation.draft_length",
    "features.speculation.draft_plan",
    "features.speculation.draft_sharpness",
    "features.speculation.extras",
    "features.speech.extras",
    "features.speech.plan",
    "features.structured.constraints",
    "features.structured.extras",
    "features.structured.plan",
    "features.sleep.plan",
    "features.weight_updates.extras",
    "features.weight_updates.plan",
)
# Public types of features that results have.
PUBLIC = ("features.adapters.lora_request",)
# Packages, and modules, that may not import some others below them.
FORBIDDEN = {
    **{f"engine.{name}": OF_DEVICE for name in ON_PAPER},
    **dict.fromkeys(PLANNING, OF_DEVICE),
    "models.textbook": ("kernels", "process"),
    "sampling": ("graphs", "passes", "models", "attention"),
    "features.structured.grammars": ("graphs", "passes", "models", "attention", "kernels"),
    "graphs": ("sampling", "engine"),
    "frontend": (
        "graphs",
        "passes",
        "engine.core",
        "engine.executor",
        "engine.scheduler",
        *OF_DEVICE[-len(ON_DEVICE) :],
    ),
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its name below compiled_engine."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = [part for part in path.relative_to(folder).with_suffix("").parts if part != "__init__"]
            found[".".join([package, *parts]).partition(".")[2]] = path
    return found


def package_of(module: str) -> str:
    """Return the folder of a module; a module at the top, or with a layer of its own, is a package of its own."""
    if modules()[module].name == "__init__.py" or module in LAYERS:
        return module
    return module.rpartition(".")[0] or module


@cache
def imports_of(module: str) -> frozenset[str]:
    """The product's modules that a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name.partition(".")[2] in modules() else str(node.module) for name in whole}
    return frozenset(name.partition(".")[2] for name in names if name.startswith("compiled_engine."))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_every_module_has_a_layer() -> None:
    packages = {package_of(module) for module in modules()} - {"", "models"}
    assert packages == set(LAYERS)


def test_no_import_goes_upwards() -> None:
    for module in modules():
        layer = LAYERS.index(package_of(module)) if package_of(module) in LAYERS else len(LAYERS)
        above = [name for name in imports_of(module) if name and LAYERS.index(package_of(name)) > layer]
        assert not above, f"{module} may not import {above}"


def test_no_import_runs_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for name in imports_of(module):
                visit(name, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_a_package_does_not_import_some_others(package: str) -> None:
    for module in modules():
        if within(module, package):
            known = [name for name in imports_of(module) if any(within(name, other) for other in FORBIDDEN[package])]
            assert not known, f"{module} may not import {known}"


def test_the_frontend_knows_no_more_of_features_than_their_extras() -> None:
    for module in modules():
        if within(module, "frontend"):
            of_features = [name for name in imports_of(module) if within(name, "features")]
            known = [name for name in of_features if name.endswith(".extras") or name in PUBLIC]
            assert known == of_features, f"{module} may not import {of_features}"


def test_extras_are_data_of_messages_alone() -> None:
    """Whoever reads or writes a message may import them."""
    extras = {module for module in modules() if module.startswith("features.") and module.endswith(".extras")}
    for module in extras:
        assert imports_of(module) <= {"engine.messages", "sampling.sampled_tokens"} | extras, module


def test_tests_can_be_collected_from_any_folder() -> None:
    """They import one another as pytest finds them, beside each other: not as a package below the working directory."""
    for path in (REPOSITORY / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.name}: relative import"
                names = [str(node.module)]
            assert "tests" not in {name.partition(".")[0] for name in names}, path.name
