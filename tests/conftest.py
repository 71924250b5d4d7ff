"""What all tests share: the bundled model, one compile cache, what becomes of tests that need a GPU or a browser."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import ssl
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Processes of gpu_tests.py that run side by side have a GPU each, or a few, in turn. Nothing has asked CUDA for its
# devices yet.
if (_worker := os.environ.get("PYTEST_XDIST_WORKER")) and int(os.environ.get("GPU_TESTS_COUNT", "0")) > 1:
    _visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    _devices = _visible.split(",") if _visible else [str(i) for i in range(int(os.environ["GPU_TESTS_COUNT"]))]
    _share = int(os.environ.get("GPU_TESTS_SHARE", "1"))
    _first = int(_worker.removeprefix("gw")) % max(1, len(_devices) // _share) * _share
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_devices[_first : _first + _share])

import poison
import pytest
import quick_compiler
import torch
import typer
from hypothesis import HealthCheck, settings
from left_over import nothing_left
from tiny_tokenizers import KINDS

from compiled_engine.frontend.tokenizer import Tokenizer, load_tokenizer
from compiled_engine.kernels.cache_folder import VARIABLE, kernel_folder, kernel_variables
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH

__all__ = ["nothing_left"]  # a fixture

if TYPE_CHECKING:
    from running_server import RunningServer, ScriptedEngine

CACHE_VARIABLE = "COMPILED_ENGINE_CACHE_DIR"
# Marker -> why its tests are skipped here; None where they run.
SKIPPED = {
    "gpu": None if torch.cuda.is_available() else "no CUDA device",
    "browser": None if shutil.which("chromium") else "no chromium command",
}

# Packages of quick tests. Their files come last, so that processes side by side end at about the same time.
QUICK = ("frontend", "grammars", "kernels", "other_engines", "process", "resolve", "rows")

# For a listener of this logger torch.compile writes out every graph; pytest would be one if it did not propagate.
_traces = logging.getLogger("torch.__trace")
_traces.propagate = True
_traces.handlers.clear()

# Traces allocate so much that with Python's own thresholds everything is looked through again and again. Each file of
# tests begins with such a collection, see kept_out_of_collections.
THRESHOLDS = 20_000, 20, 100

# How fast a machine is may not decide whether a test passes.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.register_profile("every case", settings.get_profile("any machine"), max_examples=100)
settings.load_profile("any machine")

own_cache_dir = pytest.StashKey[str]()
own_kernels = pytest.StashKey[dict[str, str]]()
own_compiler = pytest.StashKey[Path]()
own_poison = pytest.StashKey[ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    """Compiled artifacts go to one folder for the whole run (workers inherit it), never to the user's.

    So do kernels that tests launch without an engine. In Triton's own folder, processes that compile a kernel at the
    same time replace each other's libraries, see CheckedFiles.put.
    """
    if config.getoption("--all"):
        settings.load_profile("every case")
    if not config.getoption("--unpoisoned"):
        config.stash[own_poison] = stack = ExitStack()
        stack.enter_context(poison.poisoned())
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(poison.VARIABLE, "1")
    if not torch.cuda.is_available():  # garbage may hold a GPU's memory
        gc.set_threshold(*THRESHOLDS)
    if CACHE_VARIABLE not in os.environ:
        os.environ[CACHE_VARIABLE] = config.stash[own_cache_dir] = tempfile.mkdtemp(prefix="compiled-engine-tests-")
    if VARIABLE not in os.environ:
        config.stash[own_kernels] = kernel_variables(kernel_folder(Path(os.environ[CACHE_VARIABLE])))
        os.environ.update(config.stash[own_kernels])
    if "CXX" not in os.environ:
        config.stash[own_compiler] = folder = Path(tempfile.mkdtemp(prefix="compiled-engine-tests-"))
        os.environ["CXX"] = str(quick_compiler.install(folder) or "g++")


def pytest_unconfigure(config: pytest.Config) -> None:
    if own_poison in config.stash:
        config.stash[own_poison].close()
    for name in config.stash.get(own_kernels, {}):
        os.environ.pop(name, None)
    gc.unfreeze()  # else libraries report what is garbage by now as leaked
    if own_cache_dir in config.stash:
        shutil.rmtree(config.stash[own_cache_dir], ignore_errors=True)
        del os.environ[CACHE_VARIABLE]
    if own_compiler in config.stash:
        shutil.rmtree(config.stash[own_compiler], ignore_errors=True)
        del os.environ["CXX"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case (markers: product, shown_by)")
    parser.addoption("--seed", default="0", help="chooses the cases of products that run without --all")
    parser.addoption("--unpoisoned", action="store_true", help="memory that nobody has written is not filled with NaN")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        left_out = cases_left_out(items, config.getoption("--seed"))
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    items.sort(key=lambda item: item.path.parent.name in QUICK)
    for item in items:
        for marker, reason in SKIPPED.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests that count what allocations cost run as users do, their fixtures too."""
    if item.get_closest_marker("unpoisoned") is None:
        return (yield)
    with poison.poisoned(on=False):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Files that are skipped as a whole have reports of another kind.
    reports = [each for each in terminalreporter.stats.get("skipped", []) if isinstance(each, pytest.TestReport)]
    for marker, reason in SKIPPED.items():
        skipped = [report for report in reports if marker in report.keywords]
        if reason and skipped:
            terminalreporter.write_line(f"{len(skipped)} {marker} tests skipped: {reason}", yellow=True)


def cases_left_out(items: list[pytest.Item], seed: str) -> set[pytest.Item]:
    """All but a few cases of each test that is a product: one in so many as its marker says, and at least one.

    If some need a GPU and others do not, at least one of each. `each` of a marker names parameters: every combination
    of their values keeps a case. Cases that others show are left out; on a GPU none is.
    """
    left_out: set[pytest.Item] = set()
    products: dict[tuple[Any, ...], list[tuple[int, pytest.Item]]] = {}
    for item in items:
        needs_gpu = item.get_closest_marker("gpu") is not None
        if item.get_closest_marker("shown_by") is not None and not needs_gpu:
            left_out.add(item)
        elif (marker := item.get_closest_marker("product")) is not None:
            drawn = zlib.crc32(f"{seed} {item.nodeid.rpartition('/')[2]}".encode())
            values = [repr(item.callspec.params[name]) for name in marker.kwargs.get("each", ())]  # type: ignore[attr-defined]
            products.setdefault((item.nodeid.partition("[")[0], needs_gpu, *values), []).append((drawn, item))
            if drawn % marker.kwargs["one_in"]:
                left_out.add(item)
    for cases in products.values():
        left_out.discard(min(cases, key=lambda case: case[0])[1])
    return left_out


@pytest.fixture(autouse=True, scope="module")
def kept_out_of_collections() -> None:
    """What stands before a file's tests stays: collections of garbage need not look through it, which takes seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def made_once() -> Iterator[None]:
    """Let libraries make once what takes longer than most tests, and what no test changes."""
    with pytest.MonkeyPatch.context() as patch:
        # Each client would read the certificates of all authorities anew, each call of a command make all commands.
        for module, name in ((ssl, "create_default_context"), (typer.main, "get_command")):
            patch.setattr(module, name, cache(getattr(module, name)))
        yield


@pytest.fixture(scope="session")
def bundled_model_path() -> Path:
    """The folder of the bundled model: config, weights and tokenizer."""
    return BUNDLED_MODEL_PATH


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread: faster for small models where tests share the processor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundled_tokenizer(bundled_model_path: Path) -> Tokenizer:
    return load_tokenizer(bundled_model_path)


@pytest.fixture(scope="session", params=[*KINDS, "bundled"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One of every kind."""
    if request.param == "bundled":
        return request.getfixturevalue("bundled_tokenizer")
    return KINDS[request.param]()


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """On a GPU float32 products are float32, not TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Triton compiles for a Hopper that is not there; returns where it keeps the binaries."""
    driver = pytest.importorskip("triton").runtime.driver
    from hopper import Hopper

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Hopper())
    return tmp_path


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """A server with the bundled model."""
    from running_server import ENGINE, running

    from compiled_engine.async_llm import AsyncLLM

    with running(AsyncLLM(**ENGINE)) as server:
        yield server


@pytest.fixture(scope="module")
def scripted(server: RunningServer) -> ScriptedEngine:
    from running_server import ScriptedEngine

    return ScriptedEngine(server.engine, ["a", "b"])


@pytest.fixture(scope="module")
def narrow(scripted: ScriptedEngine) -> Iterator[RunningServer]:
    """A server with tight limits, which asks for a key."""
    from running_server import KEY, NARROW, running

    with running(scripted, api_key=("another", KEY), limits=NARROW, strict=True) as server:
        yield server
