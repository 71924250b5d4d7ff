"""Two checkpoints of one shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of the old weights and the new ones."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    make_checkpoint(old, "llama", seed=0)
    make_checkpoint(new, "llama", seed=1)
    return old, new
