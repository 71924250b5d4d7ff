"""Stamps of starts whose kernels are all compiled: empty files in the kernel folder, deleted with the kernels.

With other options (drafts, for example) or new tiles, a start may need further kernels of a model in the compile cache.
Only its warm-up shows which, one at a time. A start without a stamp therefore starts workers to compile them.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from compiled_engine.config import EngineConfig, flat_fields
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cuda_graphs.memory import OF_NO_EFFECT
from compiled_engine.passes.framework.profile import PROFILES

# Config fields, or prefixes of them, that select many kernels without being factors of the compiled model. Sizes of
# batches and contexts select few.
FIELDS = ("speculation.", "attention_backend", "cache.block_size", "cache.kv_dtype")


def stamp_of_start(kernels: Path, entry_key: str, config: EngineConfig, stage: int = 0) -> Path:
    """Return the file that exists if a start with these kernels has succeeded.

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
    """Record that the start has succeeded; if nothing can be written, the next start uses workers again."""
    with suppress(OSError):
        stamp.touch(mode=0o600)
