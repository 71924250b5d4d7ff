"""Prompts with images on a GPU: tokens and log-probabilities are those of transformers' whole model, and a start
compiles and captures all that steps need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from image_engines import Oracle, Outputs, Prompt, check, outputs_of, running
from image_folders import PLACEHOLDERS, picture, write_processor
from vision_models import small_vision_config, vision_config, vision_model

from compiled_engine import LLM, SamplingParams
from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.images.frontend.worker import load_processor

pytestmark = pytest.mark.gpu

# Sections of positions in three dimensions, interleaved or not; states; both ways within an image; none of these.
ARCHITECTURES = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
)
COMPILED = {"compile_workers": 0}
# Differences of log-probabilities in bfloat16, in those of transformers' own; and one that is always allowed.
MOST_TIMES, ALWAYS = 2.0, 0.02


def prompts_of(oracle: Oracle) -> dict[str, Prompt]:
    small, large = oracle.image(2, 3, seed=1), oracle.image(4, 5, seed=2)
    return {
        "text": Prompt((5, 9, 11, 40, 41, 42, 7)),
        "one": Prompt((5, None, 11, 12, 13), (small,)),
        "two": Prompt((None, 20, 21, None, 22), (small, large)),
    }


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        *((architecture, "graphed") for architecture in ARCHITECTURES),
        # Eager models merge images in hooks, whatever the model; their kernels are those of the graphed ones.
        (ARCHITECTURES[0], "eager"),
        *(
            pytest.param(architecture, "eager", marks=pytest.mark.product(one_in=1000))
            for architecture in ARCHITECTURES[1:]
        ),
    ],
)
def test_tokens_are_those_of_the_whole_model(architecture: str, mode: str, tmp_path: Path) -> None:
    """With long prompts cut into chunks within an image."""
    oracle = Oracle(tmp_path, architecture)
    prompts = prompts_of(oracle)
    with running(oracle, mode=mode, device="cuda", **({} if mode == "eager" else COMPILED)) as core:
        before = core.metrics()
        found = outputs_of(core, [oracle.request(name, each) for name, each in prompts.items()])
        check(oracle, prompts, found)
        again = outputs_of(core, [oracle.request(name, each) for name, each in prompts.items()])
        assert {name: each[0] for name, each in again.items()} == {name: each[0] for name, each in found.items()}
        after = core.metrics()
        assert after["image_cache_hits"] > before["image_cache_hits"]
        for name in ("compiles", "captures", "tower_compiles"):
            assert after[name] == before[name], name
        assert mode != "eager" or after["tower_replays"] == 0


@pytest.mark.usefixtures("exact_float32")
def test_steps_replay_the_tower(tmp_path: Path) -> None:
    """Eight images in one step, then small and large ones, also after the memory of the weights was given back."""
    architecture = "Qwen3VLForConditionalGeneration"
    values = json.loads(small_vision_config(architecture))
    values["vision_config"] |= {"hidden_size": 144, "num_heads": 2}
    oracle = Oracle(tmp_path, architecture, json.dumps(values))
    # With it, whole steps are captured.
    triton = {"attention_backend": "triton", "block_size": 16}
    options = {"mode": "graphed", "compile_ranges": (), "max_num_batched_tokens": 128, "enable_sleep_mode": True}

    def prompts(seed: int) -> dict[str, Prompt]:
        eight = tuple(oracle.image(2, 3, seed=seed + number) for number in range(8))
        return {
            "eight": Prompt((5, *(id_ for text in range(20, 28) for id_ in (None, text))), eight),
            "small": Prompt((5, None, 11), (oracle.image(3, 4, seed=seed + 8),)),
            "large": Prompt((7, None, 3, 9), (oracle.image(9, 12, seed=seed + 9),)),
        }

    with running(oracle, device="cuda", **options, **triton, **COMPILED) as core:
        before = core.metrics()
        names = before["graph_bytes_by_key"]
        assert {"tower 16", "tower 64", "full 64 images 1", "full 128 images 1"} <= names.keys()
        assert before["graph_bytes_used"] <= 1.5 * before["graph_bytes_predicted"] + (32 << 20)
        for number in range(2):
            asked = prompts(20 * number)
            found: Outputs = {}
            for name, prompt in asked.items():
                found |= outputs_of(core, [oracle.request(name, prompt)])
            check(oracle, asked, found)
            if not number:
                core.call(ControlCall("sleep", {"level": 1}))
                core.call(ControlCall("wake_up"))
        after = core.metrics()
    assert after["tower_runs"] - before["tower_runs"] == after["tower_replays"] == 6
    replays = {name: count for name, count in after["graph_replays_by_key"].items() if not name.startswith("decode")}
    assert {name: count for name, count in replays.items() if "tower" in name} == {
        **{"tower 64": 2, "tower 16": 2, "tower 128": 2}
    }
    assert {name: count for name, count in replays.items() if "images" in name} == {
        **{"full 64 images 1": 4, "full 128 images 1": 2}
    }
    for name in ("compiles", "captures", "tower_compiles"):
        assert after[name] == before[name], name


@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_bfloat16_is_as_near_as_transformers(architecture: str, tmp_path: Path) -> None:
    """With heads of 128 elements, which Hopper's kernels of attention read."""
    text = json.loads(vision_config(architecture))["text_config"] | {"head_dim": 128}
    if "rope_scaling" in text:
        text["rope_scaling"] = text["rope_scaling"] | {"mrope_section": [24, 20, 20]}
    config_json = vision_config(architecture, text_config=text)
    oracle = Oracle(tmp_path, architecture, config_json)
    rounded = vision_model(config_json).bfloat16()
    prompts = prompts_of(oracle)
    with running(oracle, mode="graphed", device="cuda", dtype="bfloat16", **COMPILED) as core:
        found = outputs_of(core, [oracle.request(name, each) for name, each in prompts.items()])
    for name, prompt in prompts.items():
        tokens, logprobs = found[name]
        ids = [*prompt.expanded(oracle.vision), *tokens]
        exact = oracle.logprobs(ids, prompt.images)
        at, chosen = torch.arange(len(ids) - len(tokens) - 1, len(ids) - 1), torch.tensor(tokens)
        oracle.model, whole = rounded, oracle.model
        images = [
            {key: value.bfloat16() if value.is_floating_point() else value for key, value in image.items()}
            for image in prompt.images
        ]
        theirs = oracle.logprobs(ids, images).float()
        oracle.model = whole
        ours = (torch.tensor(logprobs) - exact[at, chosen]).abs().max()
        assert ours <= MOST_TIMES * (theirs - exact)[at, chosen].abs().max() + ALWAYS, name


@pytest.mark.usefixtures("exact_float32")
def test_pictures_go_through_the_checkpoints_processor(tmp_path: Path) -> None:
    """In processes of their own, which use no GPU."""
    architecture = ARCHITECTURES[1]
    oracle = Oracle(tmp_path, architecture)
    write_processor(tmp_path, architecture)
    image, text = picture(40, 60, 1), f"a {PLACEHOLDERS[architecture]} and so on"
    inputs = load_processor(tmp_path, tmp_path)(text=[text], images=[image], return_tensors="pt")
    ids = inputs.pop("input_ids")[0].tolist()
    pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    with LLM(tmp_path, mode="eager", device="cuda", max_model_len=256, num_blocks=64, image_workers=1) as llm:
        prompt = {"prompt": text, "multi_modal_data": {"image": image}}
        found = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0]
    assert list(found.prompt_token_ids) == ids
    for token in found.outputs[0].token_ids:
        assert token == int(oracle.logprobs(ids, [pixels])[-1].argmax())
        ids.append(token)
