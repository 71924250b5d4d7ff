"""`bench step` shows by which times and shares the number of drafts is chosen, and `config` says that it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("as_json", [True, False])
def test_the_choice_of_the_number_of_drafts(as_json: bool, bundled_model_path: Path) -> None:
    drafts = {"method": "draft_model", "model": str(bundled_model_path), "num_speculative_tokens": 2}
    drafts["enable_adaptive_verification"] = True
    arguments = ["bench", "step", "--device=cpu", "--mode=eager", "--batch=2", "--steps=12", "--repeats=1"]
    arguments += ["--speculative-config", json.dumps(drafts), *(["--json"] if as_json else [])]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    if as_json:
        choice = json.loads(run.stdout)["drafts"]
        assert choice["draft_step_ms"]["2"].keys() == {"0", "1", "2"}
        assert choice["draft_length_chosen"]["2"] in (0, 1, 2)
        assert len(choice["draft_shares"]) == 2
    else:
        assert "up to 2" in run.output
        assert "share of right drafts by position" in run.output


def test_the_configuration_says_between_which_numbers() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "enable_adaptive_verification": True}
    reasons = resolve(EngineOptions(device="cpu", speculative_config=drafts)).reasons
    assert reasons["speculation.adapts"].startswith("a step has 0, 1 or 3 drafts, by measured times and acceptance")
