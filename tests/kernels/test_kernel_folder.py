"""The folder of kernels: whose it must be, and what becomes of damaged files in it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.kernels.cache_folder import (
    VARIABLE,
    damaged_kernels,
    keep_kernels_of_this_thread,
    kernel_folder,
    kernels_in,
)
from compiled_engine.kernels.checked_files import CheckedFiles
from compiled_engine.kernels.cpp_library import load_library
from compiled_engine.process.child import environment_variables
from compiled_engine.resolve.compile import compiler_obstacle

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILED_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer_of(source: Path) -> int:
    """Load the library as a new process would, without this process's cache, and return its answer."""
    answer: int = load_library.__wrapped__(source).answer()
    return answer


def damage(path: Path) -> None:
    """Damage a file by replacing it, since this process may have mapped the present one."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


@pytest.mark.usefixtures("root")
def test_the_command_of_the_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return ANSWER; }\n')
    monkeypatch.setenv("CXX", "env g++ -DANSWER=7")
    assert answer_of(source) == 7
    monkeypatch.setenv("CXX", "env g++ -DANSWER=8")
    assert answer_of(source) == 8
    obstacle = compiler_obstacle(torch.device("cpu"))
    assert obstacle == "Inductor takes a C++ compiler without arguments, and CXX is 'env g++ -DANSWER=8'"


@pytest.mark.parametrize("part", [".so", ".sha256"])
def test_a_damaged_library_is_built_again(
    part: str, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    assert answer_of(source) == 42
    (library,) = (root / "kernels").glob("answer_*.so")
    built = library.stat().st_mtime_ns
    assert answer_of(source) == 42
    assert library.stat().st_mtime_ns == built
    (file,) = (root / "kernels").glob(f"answer_*{part}")
    damage(file)
    shown = CliRunner().invoke(app, ["cache", "verify", "--json"])
    assert (shown.exit_code, json.loads(shown.stdout)["damaged_kernels"]) == (1, [library.name])
    assert caplog.text == ""
    assert answer_of(source) == 42
    assert library.stat().st_mtime_ns > built
    assert "is damaged, or has no digest; it is built again" in caplog.text
    assert CliRunner().invoke(app, ["cache", "verify"]).exit_code == 0


def test_a_damaged_kernel_of_triton_is_not_there(root: Path) -> None:
    from triton.runtime.cache import get_cache_manager

    folder = kernel_folder(root)
    assert folder is not None
    with kernels_in(folder):
        manager = get_cache_manager("00" * 32)
        files = {name: manager.put(b"content", name) for name in ("k.cubin", "k.json", "k.ptx", "launcher.so")}
        manager.put_group("k.json", {name: path for name, path in files.items() if name != "launcher.so"})
        assert manager.get_group("k.json") == {name: files[name] for name in ("k.cubin", "k.json", "k.ptx")}
        assert Path(manager.get_file("launcher.so")) == Path(files["launcher.so"])
        for name in ("k.cubin", "k.json"):
            damage(Path(files[name]))
            assert manager.get_group("k.json") is None
            manager.put(b"content", name)
        assert manager.get_group("k.json") is not None
        damage(Path(files["launcher.so"]))
        assert manager.get_file("launcher.so") is None


def test_threads_that_build_one_file_at_the_same_time_do_not_damage_it(root: Path) -> None:
    from triton.runtime.cache import get_cache_manager

    folder = kernel_folder(root)
    with kernels_in(folder), ThreadPoolExecutor(8) as pool:
        contents = [f"content {number}".encode() for number in range(64)]
        list(pool.map(lambda content: get_cache_manager("00" * 32).put(content, "launcher.so"), contents))
        assert get_cache_manager("00" * 32).get_file("launcher.so") is not None
    assert damaged_kernels(root) == []


def test_a_library_that_is_there_is_not_replaced(root: Path) -> None:
    """Another process may be running it."""
    from triton.runtime.cache import get_cache_manager

    with kernels_in(kernel_folder(root)):
        first, second = (Path(get_cache_manager("00" * 32).put(content, "launcher.so")) for content in (b"a", b"b"))
    assert first == second
    assert first.read_bytes() == b"a"


def test_a_library_in_the_folder_of_a_piece_is_not_replaced(root: Path) -> None:
    """A folder without digests: processes that compile the same piece write the same libraries there."""
    from triton.runtime.cache import get_cache_manager

    with kernels_in(kernel_folder(root)), environment_variables({VARIABLE: str(root / "entry" / "triton")}):
        first = Path(get_cache_manager("00" * 32).put(b"a", "launcher.so"))
        inode = first.stat().st_ino
        assert Path(get_cache_manager("00" * 32).put(b"a", "launcher.so")) == first
    assert first.is_relative_to(root / "entry")
    assert (first.stat().st_ino, [path.name for path in first.parent.iterdir()]) == (inode, [first.name])


def test_kernels_of_a_thread_stay_apart_from_a_piece_that_another_loads(root: Path) -> None:
    from triton.runtime.cache import get_cache_manager

    def put() -> Path:
        return Path(get_cache_manager("00" * 32).put(b"a", "launcher.so"))

    folder = kernel_folder(root)
    with (
        kernels_in(folder),
        ThreadPoolExecutor(1, initializer=keep_kernels_of_this_thread, initargs=(folder,)) as thread,
        environment_variables({VARIABLE: str(root / "entry" / "triton")}),
    ):
        of_the_thread, of_the_piece = thread.submit(put).result(), put()
    assert folder is not None
    assert of_the_thread.is_relative_to(folder)
    assert of_the_piece.is_relative_to(root / "entry")
    assert damaged_kernels(root) == []


def test_no_process_sees_a_library_change_its_inode(root: Path) -> None:
    """Several processes build the same libraries at the same time, with different bytes."""
    from triton.runtime.cache import get_cache_manager

    def build(number: int) -> list[int]:
        inodes = []
        for name in range(200):
            path = get_cache_manager("00" * 32).put(f"{name} of {number}".encode(), f"{name}.so")
            inodes.append(Path(path).stat().st_ino)
        return inodes

    with kernels_in(kernel_folder(root)), ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(build, range(8)))
    assert all(inodes == seen[0] for inodes in seen)
    assert damaged_kernels(root) == []


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *module, PyObject *none) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, 0}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", 0, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


@pytest.mark.parametrize("kept", [True, False])
def test_threads_get_the_launchers_that_they_load(kept: bool, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds for launchers that have been loaded before, and without a folder of the engine's too."""
    from triton.runtime.build import compile_module_from_src

    def wrong(thread: int) -> list[int]:
        numbers = [(7 * i + thread) % 4 for i in range(200)]
        modules = (compile_module_from_src(LAUNCHER.replace("NUMBER", str(n)), "__triton_launcher") for n in numbers)
        return [n for n, module in zip(numbers, modules, strict=True) if module.launch() != n]

    monkeypatch.setenv(VARIABLE, str(root / "other"))
    before = sys.getswitchinterval()
    with kernels_in(kernel_folder(root) if kept else None), ThreadPoolExecutor(8) as pool:
        sys.setswitchinterval(1e-6)
        try:
            assert list(pool.map(wrong, range(8))) == [[]] * 8
        finally:
            sys.setswitchinterval(before)


@pytest.mark.parametrize("kept", [True, False])
def test_a_launcher_stays_what_it_is_when_another_is_loaded_again(
    kept: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single thread reproduces the fault every time."""
    from triton.runtime.build import compile_module_from_src

    monkeypatch.setenv(VARIABLE, str(root / "other"))
    with kernels_in(kernel_folder(root) if kept else None):
        numbers = [0, 1, 0, 1, 0]
        modules = [compile_module_from_src(LAUNCHER.replace("NUMBER", str(n)), "__triton_launcher") for n in numbers]
    assert [module.launch() for module in modules] == numbers


def test_kernels_of_tests_side_by_side_are_in_such_a_folder() -> None:
    """Holds for kernels that are launched without an engine too."""
    from triton.runtime.cache import get_cache_manager

    manager = get_cache_manager("00" * 32)
    assert isinstance(manager, CheckedFiles)
    assert Path(manager.cache_dir).parent == Path(os.environ["COMPILED_ENGINE_CACHE_DIR"]) / "kernels"


def _of_another(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, 12345)


def _linked(root: Path) -> None:
    (root / "kernels").rmdir()
    (root.parent / "elsewhere").mkdir(mode=0o700)
    (root / "kernels").symlink_to(root.parent / "elsewhere")


CHANGES: dict[str, Callable[[Path], None]] = {
    "the root is anybody's": lambda root: root.chmod(0o777),
    "the root is the group's": lambda root: root.chmod(0o770),
    "the folder is anybody's": lambda root: (root / "kernels").chmod(0o777),
    "the folder is the group's": lambda root: (root / "kernels").chmod(0o770),
    "the root is another user's": _of_another,
    "the root is a link": lambda root: root.symlink_to(root.rename(root.parent / "elsewhere")),
    "the folder is another user's": lambda root: _of_another(root / "kernels"),
    "the folder is a link": _linked,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_folder_that_others_can_change_is_not_used(
    change: Callable[[Path], None], root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert kernel_folder(root) == root / "kernels"
    change(root)
    assert kernel_folder(root) is None
    assert "kernels are not kept: " in caplog.text
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    assert answer_of(source) == 42
    assert not list((root / "kernels").glob("*.so"))
