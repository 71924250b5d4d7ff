"""Python imports this file when it starts, if its folder is in PYTHONPATH: processes that an engine starts are poisoned
like the one of the test."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
from poison import poison_as_asked

sys.path.pop()
poison_as_asked()
