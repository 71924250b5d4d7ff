"""Factors of the machine and of the compilers: one by one, and what is left out because it shapes no code."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import triton

from compiled_engine.graphs.cache import environment
from compiled_engine.graphs.cache.environment import (
    compiler_settings,
    cpp_compiler,
    cpu_instructions,
    describe_device,
    digests_of,
    measured_gains,
    source_files,
    this_environment,
)
from compiled_engine.graphs.compiler.settings import INDUCTOR_OPTIONS, changed_settings
from compiled_engine.passes.framework.profile import DeviceProfile

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
HOPPER = {"name": "H100", "major": 9, "minor": 0, "multi_processor_count": 132}


def with_device(monkeypatch: pytest.MonkeyPatch, **properties: Any) -> None:
    found = SimpleNamespace(**HOPPER | properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


# Device


def test_a_gpu_is_described_by_what_code_is_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_device(monkeypatch)
    assert describe_device(CUDA) == {
        **{"type": "cuda", "index": 1, "name": "H100", "capability": [9, 0], "multiprocessors": 132},
    }
    for other in ({"name": "H200"}, {"major": 10}, {"minor": 1}, {"multi_processor_count": 114}):
        with_device(monkeypatch)
        base = describe_device(CUDA)
        with_device(monkeypatch, **other)
        assert describe_device(CUDA) != base
    assert describe_device(torch.device("cuda", 0)) != describe_device(CUDA)


def test_a_cpu_is_described_by_what_code_is_made_for() -> None:
    described = describe_device(CPU)
    assert described.keys() == {"type", "machine", "capability", "instructions"}
    assert (described["type"], described["machine"]) == ("cpu", platform.machine())
    assert described["capability"] == torch.backends.cpu.get_cpu_capability()
    assert described["instructions"] == cpu_instructions()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: sse avx2 fma\nbugs : none\nprocessor : 1\nflags : sse\n", ["avx2", "fma", "sse"]),
        ("processor : 0\nFeatures\t: fp asimd\n", ["asimd", "fp"]),
        ("processor : 0\n", []),
        (None, []),
    ],
)
def test_the_instructions_of_the_first_processor_count(
    text: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(environment, "Path", lambda path: file)
    assert cpu_instructions() == expected


# The C++ compiler


@pytest.fixture
def _compilers() -> Iterator[None]:
    cpp_compiler.cache_clear()
    yield
    cpp_compiler.cache_clear()


@pytest.mark.usefixtures("_compilers")
@pytest.mark.parametrize("way", ["by path", "by name", "by link", "with arguments"])
def test_the_compiler_is_that_of_the_caller(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "my_g++"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = -O1 ] && shift\n[ $1 = --version ] && echo 'my compiler 7' && echo 'no warranty'\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    link = tmp_path / "link"
    link.symlink_to(compiler)
    given = {"by path": str(compiler), "by name": "my_g++", "by link": str(link)}
    command = given.get(way, f"{compiler} -O1")
    monkeypatch.setenv("CXX", command)
    monkeypatch.setattr(environment, "settings_of", lambda compiler: None)
    assert cpp_compiler() == {
        "command": command,
        "path": str(compiler.resolve()),
        "version": "my compiler 7",
        "headers": [sysconfig.get_path("include"), str(Path(torch.__file__).parent / "include")],
    }


@pytest.mark.usefixtures("_compilers")
def test_without_a_choice_it_is_gcc_and_with_settings_the_one_that_inductor_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TORCH_INDUCTOR_INSTALL_GXX", raising=False)
    monkeypatch.setattr(environment, "settings_of", lambda compiler: None)
    assert cpp_compiler()["command"] == ("clang++" if sys.platform == "darwin" else "g++")
    builder = SimpleNamespace(get_cpp_compiler=lambda: "c++")
    monkeypatch.setattr(environment, "import_apart", {"torch._inductor.cpp_builder": builder}.__getitem__)
    monkeypatch.setenv("TORCH_INDUCTOR_INSTALL_GXX", "1")
    cpp_compiler.cache_clear()
    assert cpp_compiler()["command"] == "c++"
    monkeypatch.delenv("TORCH_INDUCTOR_INSTALL_GXX")
    monkeypatch.setattr(environment, "settings_of", lambda compiler: inductor_config)
    cpp_compiler.cache_clear()
    assert cpp_compiler()["command"] == "c++"


# Settings of the compilers


def callers_pass(graph: torch.fx.Graph) -> None:
    """Does nothing."""


class Named:
    """A pass that says which version it is."""

    def __init__(self, version: str) -> None:
        self._version = version

    def __call__(self, graph: torch.fx.Graph) -> None: ...

    def uuid(self) -> str:
        return self._version


HOOKS = [name for name in inductor_config._config if "custom" in name and name.endswith("pass")]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_pass_that_inductor_lets_a_caller_add_is_a_factor(hook: str) -> None:
    assert hook not in compiler_settings("cpu")["inductor"]
    with inductor_config.patch({hook: callers_pass}):
        assert compiler_settings("cpu")["inductor"][hook] == f"{__name__}.callers_pass"


def test_a_pass_of_another_version_is_another_factor() -> None:
    found = []
    for version in ("1", "2", "1"):
        with inductor_config.patch(post_grad_custom_pre_pass=Named(version)):
            found.append(compiler_settings("cpu")["inductor"]["post_grad_custom_pre_pass"])
    assert found == [f"{__name__}.Named {version}" for version in ("1", "2", "1")]


def test_a_setting_that_was_taken_away_is_a_factor() -> None:
    with inductor_config.patch(max_autotune_gemm_backends=None):
        assert compiler_settings("cpu")["inductor"]["max_autotune_gemm_backends"] is None


def test_our_options_are_factors_before_the_callers() -> None:
    assert compiler_settings("cpu")["inductor"].items() >= INDUCTOR_OPTIONS.items()
    with inductor_config.patch({"cpp.dynamic_threads": not INDUCTOR_OPTIONS["cpp.dynamic_threads"]}):
        assert compiler_settings("cpu")["inductor"].items() >= INDUCTOR_OPTIONS.items()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # some are about to go
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allow_unspec_int_on_nn_module", True),
        ("assume_static_by_default", False),
        ("automatic_dynamic_shapes", False),
        ("capture_scalar_outputs", True),
        ("dynamic_shapes", False),
        ("inline_inbuilt_nn_modules", False),
        ("install_free_tensors", True),
        ("specialize_float", True),
        ("specialize_int", True),
    ],
)
def test_settings_of_dynamo_that_shape_a_graph_are_factors(name: str, value: bool) -> None:
    with dynamo_config.patch({name: value}):
        assert compiler_settings("cpu")["dynamo"] == {name: value}


def test_settings_of_dynamo_that_say_when_it_gives_up_are_none() -> None:
    with dynamo_config.patch(recompile_limit=3, verbose=True):
        assert compiler_settings("cpu")["dynamo"] == {}


def test_settings_of_functorch_are_factors() -> None:
    assert compiler_settings("cpu")["functorch"] == {}
    with functorch_config.patch(functionalize_rng_ops=True):
        assert compiler_settings("cpu")["functorch"] == {"functionalize_rng_ops": True}


def test_a_compiler_that_is_not_imported_has_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    with functorch_config.patch(functionalize_rng_ops=True):
        monkeypatch.delitem(sys.modules, "torch._functorch.config")
        assert changed_settings("functorch") == {}
        assert compiler_settings("cpu")["functorch"] == {}


SHAPING = ("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_FREEZING", "TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS")
NOT_SHAPING = (
    *("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_WORKER_START", "TORCHINDUCTOR_COMPILE_THREADS"),
    *("MAST_HPC_JOB_NAME", "ROLE_RANK", "PT2_COMPILE_ID_PREFIX", "CXX", "HOME", "TORCHINDUCTOR_OF_NOBODY"),
)


@pytest.mark.parametrize("variable", [*SHAPING, *NOT_SHAPING])
def test_variables_that_torchs_settings_are_read_from_are_factors(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not folders, logs, workers and the names of jobs, nor what no setting is read from."""
    monkeypatch.delenv(variable, raising=False)
    before = compiler_settings("cpu")["environment"]
    monkeypatch.setenv(variable, "1")
    added = {variable: "1"} if variable in SHAPING else {}
    assert compiler_settings("cpu")["environment"] == before | added
    assert list(before) == sorted(before)


def test_variables_of_triton_are_factors_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    assert "TRITON_DISABLE_LINE_INFO" in compiler_settings("cuda")["triton"]
    assert compiler_settings("cpu")["triton"] == {}


# All together


def test_versions_are_those_of_what_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    found = this_environment(CPU)
    assert found.versions == {
        "python": sys.implementation.cache_tag,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    monkeypatch.setattr(torch.version, "cuda", "13.9")
    assert this_environment(CPU).versions["cuda"] == "13.9"


def test_each_device_has_its_own_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has no C++ compiler, and the profile is that of the device."""
    gains = {"cpu": 1.0, "cuda": 9.0}
    profiles = {name: DeviceProfile(name, {"silu_mul": {8: gain}}, 2.0, {}) for name, gain in gains.items()}
    monkeypatch.setattr(environment, "profile_of", lambda device: profiles[device.type])
    with_device(monkeypatch)
    for device in (CPU, CUDA):
        found = this_environment(device)
        assert (found.compiler == {}) is (device is CUDA)
        assert found.device == describe_device(device)
        assert found.settings == compiler_settings(device.type)
        assert found.profile == measured_gains(profiles[device.type])
        assert found.as_factors().keys() == {"versions", "device", "compiler", "settings", "profile", "source"}


def test_measured_gains_are_plain_values_by_pass_and_size() -> None:
    profile = DeviceProfile("a device", {"silu_mul": {8: 1.5, 64: -3.0}}, 2.0, {})
    assert measured_gains(profile) == {"noise_us": 2.0, "gains_us": {"silu_mul": {"8": 1.5, "64": -3.0}}}


def test_sources_are_files_directly_in_a_package_or_a_module_and_their_digests_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = source_files(("kv_format", "passes.norm"))
    assert list(files) == sorted(files)
    assert files["kv_format.py"].name == "kv_format.py"
    assert {name for name in files if name != "kv_format.py"} == {
        f"passes/norm/{path.name}" for path in files["passes/norm/__init__.py"].parent.glob("*.py")
    }
    one, other = tmp_path / "a.py", tmp_path / "b.py"
    monkeypatch.setattr(environment, "source_files", lambda packages: {"a.py": one, "b.py": other})
    one.write_text("x = 1")
    other.write_text("x = 1")
    same = digests_of(())
    assert same["a.py"] == same["b.py"]
    other.write_text("x = 2")
    changed = digests_of(())
    assert (changed["a.py"] == same["a.py"], changed["b.py"] == same["b.py"]) == (True, False)
