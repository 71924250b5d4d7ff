"""Stamps of starts whose kernels are all compiled: empty files in the folder of kernels, so that they go with these.

A start with other options may need further kernels of a compiled model that is in the cache: with drafts, for one, or
with new tiles. Which they are only its warm-up shows, one at a time, so a start without a stamp starts workers to
compile them.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from compiled_engine.config import EngineConfig, flat_fields
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cuda_graphs.memory import OF_NO_EFFECT
from compiled_engine.passes.framework.profile import PROFILES

# Fields that choose many kernels and are no factors of the compiled model, or beginnings of them. Sizes of batches and
# contexts choose few.
FIELDS = ("speculation.", "attention_backend", "cache.block_size", "cache.kv_dtype")


def stamp_of_start(kernels: Path, entry_key: str, config: EngineConfig, stage: int = 0) -> Path:
    """Return the file that exists if a start with such kernels has ended well.

    entry_key: of the compiled model. stage: of a pipeline.
    """
    fields = {
        name: value
        for name, value in flat_fields(config).items()
        if name.startswith(FIELDS) and name not in OF_NO_EFFECT
    }
    profiles = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(PROFILES.glob("*.json"))}
    factors = {"entry": entry_key, "stage": stage, "config": fields, "profiles": profiles}
    return kernels / f"start_{factors_key(factors)}"


def write_stamp(stamp: Path) -> None:
    """Note that the start has ended well; where nothing can be written, the next one starts workers again."""
    with suppress(OSError):
        stamp.touch(mode=0o600)
