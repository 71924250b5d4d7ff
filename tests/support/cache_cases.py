"""Entries of the compile cache that need no compiler: a build that writes three small files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.folder import CacheFolder, open_cache
from compiled_engine.graphs.cache.lookup import find_or_build

# A user who owns nothing here.
NOBODY = 65534

FACTORS: dict[str, Any] = {
    "config": {
        "model.architecture": "Qwen3ForCausalLM",
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "model.dtype": "torch.float32",
        "scheduler.max_num_batched_tokens": 2048,
        "compile.passes": ["merge_linears", "silu_mul"],
    },
    "device": {"type": "cpu"},
    "passes": {"merge_linears": "11aa", "silu_mul": "22bb"},
    "settings": {"inductor": {}},
    "source": {"passes/linear/silu_mul.py": "aaaa"},
    "versions": {"torch": "2.13.0"},
}


class Builder:
    """A build function that writes a small entry and counts its calls."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, folder: Path) -> None:
        self.builds += 1
        (folder / "pieces").mkdir()
        (folder / "pieces" / "a.bin").write_bytes(b"artifact")
        (folder / "1-2048").mkdir()
        (folder / "1-2048" / "plan.json").write_text("{}")
        (folder / "1-2048" / "passes.json").write_text(
            '[{"name": "merge_linears", "enabled": true}, {"name": "silu_mul", "enabled": false},'
            ' {"name": "sequence_parallel", "enabled": false}]'
        )


def load(folder: Path) -> tuple[bytes, str]:
    return (folder / "pieces" / "a.bin").read_bytes(), (folder / "1-2048" / "plan.json").read_text()


LOADED = (b"artifact", "{}")


def changed(section: str, **values: Any) -> dict[str, Any]:
    """Return FACTORS with other values in one section; `__` in a name stands for a dot."""
    return FACTORS | {section: FACTORS[section] | {name.replace("__", "."): value for name, value in values.items()}}


def build_once(root: Path, factors: dict[str, Any] = FACTORS) -> Path:
    """Build an entry for these factors and return its folder."""
    return find_or_build(root, factors, Builder(), load).folder


def truncate(entry: Path) -> None:
    (entry / "pieces" / "a.bin").write_bytes(b"art")


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "compiled").iterdir() if path.name.startswith(("work_", "damaged_")))


# Three entries for tests of the folder: their factors, their keys, and the time that it is.
VARIANTS = [changed("config", model__num_layers=number) for number in (2, 8, 9)]
KEYS = [factors_key(factors) for factors in VARIANTS]
NOW = 1_000_000.0


def use_was(root: Path, key: str, seconds_ago: float) -> None:
    os.utime(root / "compiled" / f"{key}.lock", (NOW - seconds_ago, NOW - seconds_ago))


def three_entries(root: Path) -> CacheFolder:
    """Return a cache with three entries, used 30, 20 and 10 seconds ago."""
    for number, factors in enumerate(VARIANTS):
        build_once(root, factors)
        use_was(root, KEYS[number], 30 - 10 * number)
    return open_cache(root)
