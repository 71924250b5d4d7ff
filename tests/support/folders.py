"""Folders that tests read."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
REPOSITORY = TESTS.parent
