"""Code whose time may not grow with the square of what it is given."""

from __future__ import annotations

import subprocess
import sys


def in_a_minute(code: str) -> None:
    """Run code that takes far less than a minute, unless it grows like that: then the test fails instead of hanging."""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
