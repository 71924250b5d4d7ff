"""The program that trains the bundled model's head: its steps are those of drafting, and it learns and goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bundled_training import train_head
from bundled_training.train_head import (
    LAYERS,
    STATE,
    HeadRecipe,
    TrainingPasses,
    head_shape,
    losses,
    main,
    new_head,
)
from eagle_heads import Reference
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compiled_engine.models.bundled import BUNDLED_MODEL_PATH

pytestmark = pytest.mark.usefixtures("one_thread")
RECIPE = HeadRecipe(steps=3, batch_tokens=64, window=32, test_steps=3, draft_vocab=60, intermediate_size=32)


@torch.no_grad()
def test_the_steps_of_training_are_those_of_drafting() -> None:
    target = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL_PATH, dtype=torch.float32)
    known, shape = torch.arange(0, 120, 2), head_shape(RECIPE)
    head = new_head(shape, target, known, 1)
    for parameter in head.parameters():
        if parameter.ndim > 1 and parameter.requires_grad:
            parameter.mul_(4.0)
    config = {
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
    }
    reference = Reference(BUNDLED_MODEL_PATH, config, dict(head.named_parameters()))
    ids = torch.randint(4096, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    features = reference.features(ids[:-1])
    passes = TrainingPasses(head, torch.tensor([ids[1:]]), features[None])
    for number in range(4):
        logits = passes.step()[0]
        for position in (number, 7, 10):
            begin = position - number
            chain, hidden = features[: begin + 1], reference.layer(ids[1 : begin + 2], features[: begin + 1])
            for end in range(begin + 1, position + 1):
                chain = torch.cat((chain, hidden[-1:]))
                hidden = reference.layer(ids[1 : end + 2], chain)
            torch.testing.assert_close(logits[position], reference.logits(hidden[-1]), rtol=1e-4, atol=1e-4)


def test_agreement_counts_steps_whose_earlier_steps_agree() -> None:
    target = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL_PATH, dtype=torch.float32)
    known = torch.arange(4096)
    head = new_head(head_shape(replace(RECIPE, draft_vocab=len(known))), target, known, 0)
    ids = torch.randint(4096, (2, 33), generator=torch.Generator().manual_seed(0))
    found, agreed = losses(head, target, ids, known, 3)
    assert [loss.isfinite().item() for loss in found] == [True] * 3
    assert agreed[0] >= agreed[1] >= agreed[2]


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run ends with the head of an uninterrupted one."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(60):
        text = f"def f_{number}(x):\n    return [x, {number}]\n\n\n"
        (corpus / f"part_{number}.py").write_text(text * (8 + number))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(RECIPE).items()]
    options += ["--device=cpu", f"--corpus={corpus}"]
    monkeypatch.setattr(train_head, "HELD_OUT_PROMPTS", 2)
    monkeypatch.setattr(train_head, "GENERATED", 8)
    monkeypatch.setattr(train_head, "SPEED_MODE", "eager")
    main([*options, f"--out={tmp_path / 'whole'}"])
    monkeypatch.setattr(train_head, "SAVE_SECONDS", 0.0)
    save, saved = torch.save, []

    def interrupted(state: dict[str, object], path: Path) -> None:
        save(state, path)
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([*options, f"--out={tmp_path / 'parts'}"])
    main([*options, f"--out={tmp_path / 'parts'}"])
    assert not (tmp_path / "parts" / STATE).exists()
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    record = json.loads((tmp_path / "parts" / "training.json").read_text())
    assert record["acceptance"]["0.8"]["length"] >= 1
    assert record["acceptance"]["0.8"]["sharpness"] in ("1", "1.5", "3", "greedy")
    assert record["cpu_tokens_per_second"].keys() == {"without", "with"}
    assert len(record["validation_agreement"]) == RECIPE.test_steps
