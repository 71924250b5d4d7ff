"""The example of docs/passes.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from compiled_engine.passes.registry import unregister_pass

DOCUMENT = Path(__file__).parent.parent / "docs" / "passes.md"


def test_the_worked_example() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    try:
        exec(compile(example, str(DOCUMENT), "exec"), namespace)
    finally:
        unregister_pass("spelled_out_silu")
    assert len(namespace["output"].outputs[0].token_ids) == 4
    assert namespace["matches"] == 6
