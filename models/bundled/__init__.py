"""The model that ships with the package: five million parameters, trained on Python source, ready offline.

`compiled_engine.models.bundled_training.train` trains it; README.md next to this file describes training and quality.
"""

from __future__ import annotations

from pathlib import Path

BUNDLED_MODEL_PATH: Path = Path(__file__).resolve().parent
BUNDLED_HEAD_PATH: Path = BUNDLED_MODEL_PATH / "head"
"""The model's EAGLE-3 head; `compiled_engine.models.bundled_training.train_head` trains it."""
