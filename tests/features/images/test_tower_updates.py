"""Weight updates of multimodal checkpoints: the vision tower's weights change with those of the text model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from image_engines import Oracle, Prompt, check, outputs_of, running
from safetensors.torch import load_file, save_file
from vision_models import small_vision_config

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.weight_updates.frontend import update_calls

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = (5, None, 11, 12, 13)


def update(core: EngineCore, weights: Any) -> None:
    calls = update_calls.update(weights, core.config.parallel, None, recompute=True, in_this_process=True)
    update_calls.served(calls, core.call)


def moved(oracle: Oracle, folder: Path, part: str = "") -> dict[str, torch.Tensor]:
    """Change the weights of the oracle that have `part` in their names; return all by the checkpoint's names."""
    with torch.no_grad():
        for name, parameter in oracle.model.named_parameters():
            if part in name:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    oracle.forget()
    oracle.model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Qwen3VLForConditionalGeneration", {"mode": "compiled", "compile_ranges": ()}),
        ("LlavaForConditionalGeneration", {"mode": "eager"}),
        ("Gemma3ForConditionalGeneration", {"mode": "eager"}),
    ],
)
def test_the_tower_is_updated_with_the_text_model(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    """An image of before the update has its embeddings computed again."""
    small = small_vision_config(architecture) if options["mode"] == "compiled" else None
    oracle = Oracle(tmp_path / "old", architecture, small)
    prompts = {"r": Prompt(PROMPT, (oracle.image(2, 3),))}
    with running(oracle, **options) as core:
        check(oracle, prompts, outputs_of(core, [oracle.request("r", prompts["r"])]))
        moved(oracle, tmp_path / "new")
        update(core, tmp_path / "new")
        check(oracle, prompts, outputs_of(core, [oracle.request("r", prompts["r"])]))


def test_an_update_may_have_no_tensor_of_the_tower(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "old", "Qwen3VLForConditionalGeneration")
    prompts = {"r": Prompt(PROMPT, (oracle.image(2, 3),))}
    with running(oracle, mode="eager") as core:
        tensors = moved(oracle, tmp_path / "new", "language_model")
        update(core, {name: tensor for name, tensor in tensors.items() if ".visual." not in name})
        check(oracle, prompts, outputs_of(core, [oracle.request("r", prompts["r"])]))


def test_an_update_with_a_part_of_the_tower_changes_nothing(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "old", "Qwen3VLForConditionalGeneration")
    prompts = {"r": Prompt(PROMPT, (oracle.image(2, 3),))}
    tensors = load_file(tmp_path / "old" / "model.safetensors")
    lacking = {name: tensor * 2 for name, tensor in tensors.items() if "visual.blocks.0" not in name}
    (tmp_path / "new").mkdir()
    save_file(lacking, tmp_path / "new" / "model.safetensors")
    with running(oracle, mode="eager") as core:
        with pytest.raises(ControlError, match=r"do not fit Qwen3VLForConditionalGeneration's tower: 12 missing"):
            update(core, tmp_path / "new")
        check(oracle, prompts, outputs_of(core, [oracle.request("r", prompts["r"])]))


def test_the_tower_sleeps_and_wakes_with_the_text_model(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path / "old", "Qwen3VLForConditionalGeneration")
    prompts = {"r": Prompt(PROMPT, (oracle.image(2, 3),))}
    tensors = load_file(tmp_path / "old" / "model.safetensors")
    with running(oracle, mode="eager", enable_sleep_mode=True) as core:

        def answers() -> None:
            check(oracle, prompts, outputs_of(core, [oracle.request("r", prompts["r"])]))

        answers()
        for level in (1, 2):
            core.call(ControlCall("sleep", {"level": level}))
            core.call(ControlCall("wake_up"))
            if level == 2:
                with pytest.raises(ControlError, match=r"do not fit Qwen3VL.*'s tower"):
                    update(core, {name: tensor for name, tensor in tensors.items() if ".visual." not in name})
                update(core, tmp_path / "old")
            answers()
