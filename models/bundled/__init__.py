"""The model that ships with the package: five million parameters, trained on Python source, ready offline.

README.md beside this file describes its training and quality; the program is in tests/support/bundled_training.
"""

from __future__ import annotations

from pathlib import Path

BUNDLED_MODEL_PATH: Path = Path(__file__).resolve().parent
BUNDLED_HEAD_PATH: Path = BUNDLED_MODEL_PATH / "head"
"""The model's EAGLE-3 head."""
