"""What an ablation's plots and page say of their subject: the model, the device, which variant is the whole engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# In the names of variants that leave out a pass.
WITHOUT = " without "


def measured(record: Mapping[str, Any]) -> bool:
    """Whether a variant's record has figures."""
    return "step_ms" in record


def whole_name(records: Sequence[Mapping[str, Any]]) -> str | None:
    """The variant with everything on: the last that leaves nothing out."""
    names = [record["name"] for record in records if WITHOUT not in record["name"]]
    return names[-1] if names else None


def subtitle_of(result: Mapping[str, Any]) -> str:
    model, machine, workload = result["model"], result["machine"], result["workload"]
    device = machine.get("gpu") or machine["processor"]
    return f"{model['name']}, {model['dtype']}, {device}; prompts of {workload['prompt_len']} tokens"
