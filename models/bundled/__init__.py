"""The model that ships with the package: five million parameters, trained on Python source code, usable offline.

README.md beside this file describes the model's training and quality. The training program is in
tests/support/bundled_training.
"""

from __future__ import annotations

from pathlib import Path

BUNDLED_MODEL_PATH: Path = Path(__file__).resolve().parent
BUNDLED_HEAD_PATH: Path = BUNDLED_MODEL_PATH / "head"
"""The model's EAGLE-3 head."""
