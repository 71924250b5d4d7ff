"""Multimodal checkpoints whose text model is quantised, with a tower in 16 or 32 bits or one that is quantised too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from image_engines import TOLERANCE, Oracle, Prompt, check, config_of, outputs_of, running
from packed_checkpoints import PACKINGS, pack_weight, write_section
from quantised_checkpoints import LAYOUTS, load_all
from safetensors.torch import save_file
from vision_models import small_vision_config

from compiled_engine.passes.framework.rounding import codes_of, decode, scales_of
from compiled_engine.quantisation import LinearScheme

pytestmark = pytest.mark.usefixtures("one_thread")
QWEN, GEMMA = "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"
LLAVA = "LlavaForConditionalGeneration"
Pack = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]


def fp8(weight_NK: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight with a scale for each row."""
    scales_N1 = weight_NK.abs().amax(1, keepdim=True) / 448
    codes = (weight_NK / scales_N1).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales_N1}, codes.float() * scales_N1


def packed(name: str) -> Pack:
    return lambda weight_NK: pack_weight(weight_NK, PACKINGS[name])


def section(name: str, ignored: list[str]) -> dict[str, Any]:
    return (PACKINGS[name] if name in PACKINGS else LAYOUTS[name]).config(ignored)


def quantise(oracle: Oracle, pack: Pack, section: dict[str, Any], parts: tuple[str, ...] = ("language_model",)) -> None:
    """Quantise the linears of these parts in the oracle's folder, and give the oracle the values of the codes."""
    tensors = load_all(oracle.folder)
    for path, module in oracle.model.named_modules():
        name = f"{path}.weight"
        if isinstance(module, torch.nn.Linear) and name in tensors and any(part in path for part in parts):
            given, values_NK = pack(tensors.pop(name).float())
            tensors |= {f"{path}.{kind}": tensor.contiguous() for kind, tensor in given.items()}
            module.weight.copy_(values_NK)
    save_file(tensors, oracle.folder / "model.safetensors")
    write_section(oracle.folder, section)


FP8 = "compressed-tensors, channel, weights alone"
FORMS = {
    "fp8": (QWEN, FP8, fp8, ["lm_head", "re:.*visual.*"]),
    "names": (GEMMA, FP8, fp8, ["lm_head", "model.multi_modal_projector", r"re:model\.vision_tower.*"]),
    "packed": (QWEN, "compressed-tensors, groups", packed("compressed-tensors, groups"), ["lm_head", "re:.*visual.*"]),
    "gptq": (QWEN, "gptq, zero points", packed("gptq, zero points"), ["lm_head"]),
    "awq": (QWEN, "awq, small groups", packed("awq, small groups"), ["visual"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_text_model_sees(form: str, tmp_path: Path) -> None:
    architecture, name, pack, ignored = FORMS[form]
    oracle = Oracle(tmp_path, architecture)
    quantise(oracle, pack, section(name, ignored))
    prompts = {"one": Prompt((5, None, 11, 12, 13), (oracle.image(2, 3),)), "text": Prompt((5, 9, 11, 40))}
    with running(oracle, mode="eager") as core:
        assert core.config.model.quantisation is not None
        check(oracle, prompts, outputs_of(core, [oracle.request(each, prompts[each]) for each in prompts]))


@pytest.mark.shown_by(
    "features/images/test_quantised_text_models.py::test_a_quantised_text_model_sees",
    "bench/test_held_out_loss.py::test_rows_are_compared_with_float32",
)
@pytest.mark.parametrize(("preset", "tolerance"), [("int4", TOLERANCE), ("fp8", 0.15)])
def test_a_text_model_that_is_quantised_while_it_is_loaded_sees(preset: str, tolerance: float, tmp_path: Path) -> None:
    """With "fp8" the inputs of linears are rounded too, and the oracle's are not."""
    oracle = Oracle(tmp_path, LLAVA, small_vision_config(LLAVA))
    prompt = Prompt((5, None, 11, 12, 13), (oracle.image(2, 3),))
    with running(oracle, mode="compiled", quantization=preset, compile_ranges=()) as core:
        (found,) = outputs_of(core, [oracle.request("r", prompt, max_tokens=1)]).values()
        assert core.config.model.quantisation is not None
        (rule,) = core.config.model.quantisation.rules
    rounding = LinearScheme.parse(rule.scheme).weight
    for path, module in oracle.model.named_modules():
        if isinstance(module, torch.nn.Linear) and "language_model" in path:
            scales_RC = scales_of(module.weight, rounding)
            module.weight.copy_(decode(codes_of(module.weight, scales_RC, rounding), scales_RC, rounding))
    (token,), (logprob,) = oracle.greedy(prompt, 1)
    assert found == ([token], [pytest.approx(logprob, abs=tolerance)])


@pytest.mark.parametrize("form", ["fp8", "packed"])
def test_a_quantised_tower_is_not_read(form: str, tmp_path: Path) -> None:
    """The text model runs alone."""
    architecture, name, pack, _ = FORMS[form]
    oracle = Oracle(tmp_path, architecture)
    quantise(oracle, pack, section(name, ["lm_head"]), ("language_model", "visual"))
    config = config_of(oracle, mode="eager")
    assert config.images is None
    assert config.reasons["image_input"] == "its vision tower is quantised: model.visual.blocks.0.attn.proj"
    with running(oracle, mode="eager") as core:
        check(oracle, {"t": Prompt((5, 9))}, outputs_of(core, [oracle.request("t", Prompt((5, 9)))]))
