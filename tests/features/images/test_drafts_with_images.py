"""Drafts of models and heads beside positions in three dimensions: results stay, and drafts are as good as for text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import head_config, random_tensors, write_head
from image_engines import Oracle, Prompt, check, outputs_of, running
from safetensors.torch import load_file, save_file
from vision_models import vision_config

pytestmark = pytest.mark.usefixtures("one_thread")
QWEN, QWEN3_5 = "Qwen3VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp(QWEN), QWEN)


def save_text_model(oracle: Oracle, folder: Path) -> Path:
    """Save the oracle's text model as a checkpoint of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    text = json.loads(vision_config(QWEN))["text_config"]
    model = Qwen3ForCausalLM(Qwen3Config(**{name: text[name] for name in text if name != "rope_scaling"}))
    model.model.load_state_dict(oracle.model.model.language_model.state_dict())
    model.lm_head.load_state_dict(oracle.model.lm_head.state_dict())
    model.save_pretrained(folder)
    return folder


def save_head(oracle: Oracle, folder: Path) -> Path:
    text = json.loads(vision_config(QWEN))["text_config"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(text))
    config = head_config(folder)
    return write_head(folder, config, random_tensors(config))


def add_mtp_layer(folder: Path) -> None:
    """Write an MTP layer into a checkpoint: a copy of its layer 1, with projections of random weights."""
    stored, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    layer = "model.language_model.layers.1."
    added = {f"mtp.layers.0.{name.removeprefix(layer)}": stored[name] for name in stored if name.startswith(layer)}
    added |= {f"mtp.{name}.weight": torch.zeros(64) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    added["mtp.fc.weight"] = torch.randn(64, 128, generator=generator) * 0.1
    whole = stored | {name: tensor.clone() for name, tensor in added.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def prompts_of(oracle: Oracle) -> dict[str, Prompt]:
    images = [oracle.image(4, 5, seed=1), oracle.image(2, 3, seed=2)]
    return {
        "both": Prompt((3, None, 9, 9, 9, 9, None, 9, 9, 9), tuple(images)),
        "first": Prompt((None, 7), (images[0],)),
        "text": Prompt((5, 6, 5, 6, 5, 6, 5)),
    }


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafts_change_no_result(method: str, oracle: Oracle, tmp_path: Path) -> None:
    save = save_text_model if method == "draft_model" else save_head
    given = {"method": method, "num_speculative_tokens": 2, "model": str(save(oracle, tmp_path / "drafts"))}
    options: dict[str, Any] = {"mode": "eager", "speculative_config": given, "num_blocks": 24}
    with running(oracle, **options) as core:
        assert core.config.images is not None
        prompts = prompts_of(oracle)
        requests = [oracle.request(name, prompt, max_tokens=12) for name, prompt in prompts.items()]
        check(oracle, prompts, outputs_of(core, requests))
        assert core.metrics()["draft_tokens"] > 0
        if method == "draft_model":  # for text it is the model itself
            before = core.metrics()
            text = {"text": Prompt((8, 6, 5, 6, 5, 6, 5))}
            check(oracle, text, outputs_of(core, [oracle.request("text", text["text"], max_tokens=12)]))
            after = core.metrics()
            drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
            assert drafted > 0
            assert accepted >= drafted - 2  # the last drafts may exceed the request's length


def test_drafts_of_an_mtp_layer_change_no_result(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path, QWEN3_5)
    add_mtp_layer(tmp_path)
    with running(oracle, mode="eager", speculative_config={"method": "mtp", "num_speculative_tokens": 2}) as core:
        assert core.config.images is not None
        prompts = prompts_of(oracle)
        requests = [oracle.request(name, prompt, max_tokens=12) for name, prompt in prompts.items()]
        check(oracle, prompts, outputs_of(core, requests))
        assert core.metrics()["draft_tokens"] > 0
