"""Inductor's trials of a CPU's instruction sets: each process makes them once, and every compilation has their files.

For each set that the processor has, Inductor compiles a few lines, loads the result in another process, and remembers
the answer. It looks for the files in the folder of the compilation, so a start that loads an artifact from a folder
without them would need a C++ compiler.
"""

from __future__ import annotations

from pathlib import Path

from torch._inductor import cpu_vec_isa

from compiled_engine.kernels.cpp_library import compiler_command


class Trials:
    """The files of one process's trials, by their paths in Inductor's folder."""

    def __init__(self) -> None:
        self._compiler: list[str] = []
        self._files: dict[Path, bytes] = {}

    def forget_others(self) -> None:
        """Let Inductor try again, unless the files of its trials with the present C++ compiler are known."""
        if self._files and self._compiler == compiler_command():
            return
        self._files = {}
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        for isa in cpu_vec_isa.supported_vec_isa_list:
            for kind in type(isa).__mro__:
                for member in vars(kind).values():
                    if hasattr(member, "cache_clear"):
                        member.cache_clear()

    def keep_or_write(self, folder: Path) -> None:
        """Remember the files of trials in Inductor's folder, or write there those that are known."""
        if not self._files:
            self._compiler, self._files = compiler_command(), trial_files(folder)
        for path, content in self._files.items():
            if not (folder / path).exists():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)


def trial_files(folder: Path) -> dict[Path, bytes]:
    """Return the sources and libraries of trials in Inductor's folder, by their paths in it."""
    sources = {
        value.strip()
        for isa in cpu_vec_isa.supported_vec_isa_list
        for kind in type(isa).__mro__
        for name, value in vars(kind).items()
        if name.endswith("_code") and isinstance(value, str)
    }
    found: dict[Path, bytes] = {}
    for source in folder.rglob("*.cpp"):
        if source.read_text(encoding="utf-8").strip() in sources:
            found |= {path.relative_to(folder): path.read_bytes() for path in source.parent.glob(f"{source.stem}.*")}
    return found


trials = Trials()
