"""Checkpoints of transformers' models: where each tensor goes, and names or shapes that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family, load_oracle, write_checkpoint
from family_comparison import difference_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.mxfp4 import decode_mxfp4, place_mxfp4
from compiled_engine.models.foreign import compat
from compiled_engine.models.foreign.conversion import plan_weights
from compiled_engine.models.foreign.placement import Placement, WeightPlan
from compiled_engine.parallel.shards import Place
from compiled_engine.passes.framework.parameter import CODES, SCALES, Parameter
from compiled_engine.passes.framework.rounding import in_halves
from compiled_engine.passes.linear.experts_codes import experts_weight
from compiled_engine.quantisation_names import MXFP4
from compiled_engine.sampling.params import SamplingParams

TINY_MIXTRAL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 12,
}


def test_experts_of_a_checkpoint_are_written_into_their_places(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mixtral", **TINY_MIXTRAL)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    plan = plan_weights(loaded, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert not plan.unexpected
    assert WeightPlan.from_json(plan.to_json()) == plan
    expected = loaded.state_dict()
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    read = 0
    for placement in plan.placements:
        source, target = placement.view(tensors[placement.source]), placement.place_in(found[placement.target])
        target.copy_(source.reshape(target.shape))
        read += source.numel()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert read == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("transposed", [True, False])
def test_what_has_its_shape_already_is_not_transposed(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some converters check the shape, since checkpoints exist in either layout."""

    class Model(torch.nn.Module):
        base_model_prefix = ""
        _keys_to_ignore_on_load_unexpected = None

        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Parameter(torch.zeros(2, 3, 5))

    converter = WeightConverter("experts", "experts", operations=[Transpose(1, 2, check_dims=True)])
    monkeypatch.setattr(compat, "get_model_conversion_mapping", lambda model: [converter])
    read = torch.arange(30.0).view((2, 5, 3) if transposed else (2, 3, 5))
    plan = plan_weights(Model(), {"experts": tuple(read.shape)})
    found = {"experts": torch.full((2, 3, 5), torch.nan)}
    for placement in plan.placements:
        placement.place_in(found[placement.target]).copy_(placement.view(read))
    assert torch.equal(found["experts"], read.transpose(1, 2) if transposed else read)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("olmo2")
    write_checkpoint(folder, family("olmo2"))
    return folder


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), ("1 missing: model.norm.weight",)),
        (lambda tensors: tensors.update(surplus=torch.zeros(3)), ("1 unexpected: surplus",)),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}),
            ("1 of another shape: model.norm.weight ([65] instead of [64])",),
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            ("1 of a dtype that is not supported: model.norm.weight",),
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(edit: Any, parts: tuple[str, ...], checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ValueError, match="do not fit Olmo2ForCausalLM") as error:
        LLM(tmp_path, mode="eager", device="cpu", max_model_len=32, progress=False)
    for part in parts:
        assert part in str(error.value)


def changed(name: str, folder: Path, new: dict[str, torch.Tensor], **config: Any) -> Path:
    """Write a tiny checkpoint with additional tensors and changed fields."""
    write_checkpoint(folder, family(name))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | new, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def greedy(folder: Path) -> list[int]:
    with LLM(folder, mode="eager", device="cpu", max_model_len=32, progress=False, model_impl="transformers") as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        return list(output.outputs[0].token_ids)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "tensor", "dtype"),
    [
        ("gpt2", "h.0.attn.bias", torch.float32),
        ("gpt_neox", "gpt_neox.layers.0.attention.bias", torch.bool),
        ("glm4_moe", "model.layers.46.eh_proj.weight", torch.bfloat16),
        ("olmo2", "model.layers.0.self_attn.rotary_emb.inv_freq", torch.float32),
    ],
)
def test_what_published_checkpoints_hold_besides_is_ignored(
    name: str, tensor: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Masks, frequencies and multi-token heads are ignored, as in transformers."""
    plain = changed(name, tmp_path / "plain", {})
    besides = changed(name, tmp_path / "besides", {tensor: torch.ones(3, dtype=dtype)})
    assert greedy(besides) == greedy(plain)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    folder = changed("olmo2", tmp_path, {}, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true, but .*weight and .*weight differ"):
        greedy(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert len(greedy(folder)) == 5


def packed_experts(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales of weights [E, R, C]."""
    generator = torch.Generator().manual_seed(0)
    experts, rows, columns = shape
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(118, 124, blocks.shape[:3], generator=generator, dtype=torch.uint8)


@pytest.mark.usefixtures("one_thread")
def test_mxfp4_is_decoded_as_transformers_decodes_it(tmp_path: Path) -> None:
    whole, packed = tmp_path / "whole", tmp_path / "packed"
    write_checkpoint(whole, family("gpt_oss"))
    tensors, values = load_file(whole / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors[name].shape
        blocks, scales = packed_experts((experts, rows, columns))
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert values[name].shape == tensors.pop(name).shape
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    packed.mkdir()
    config = json.loads((whole / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (packed / "config.json").write_text(json.dumps(config))
    save_file(tensors, packed / "model.safetensors")
    oracle = load_oracle(whole, torch.float32)
    oracle.load_state_dict(oracle.state_dict() | values)
    assert difference_of(packed, oracle, {"mode": "eager", "device": "cpu"}).is_right(torch.float32)

    tensors["model.layers.1.mlp.experts.down_proj_scales"] = torch.zeros(6, 64, 1, dtype=torch.uint8)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj_scales must be \[6, 64, 3\], got \[6, 64, 1\]"):
        LLM(packed, mode="eager", device="cpu", max_model_len=32, progress=False)


def test_a_part_of_experts_in_mxfp4_is_decoded() -> None:
    """Parts of rows and of columns, which end inside groups. The model has the transpose."""
    blocks, scales = packed_experts((2, 6, 96))
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    spans = ((0, 2), (0, 6), (0, 96)), ((0, 2), (0, 96), (0, 6))
    weight = Placement("w_blocks", spans[0], "w", spans[1], transposed=True, decode=MXFP4, beside=("w_scales",))
    for dim, start, length in ((1, 0, 24), (1, 24, 48), (1, 32, 32), (1, 72, 24), (2, 0, 3), (2, 3, 3)):
        (part,) = weight.cut(dim, [Place(start, length, 0)])
        expected = values.narrow(dim, start, length)
        target = torch.full(expected.shape, torch.nan)
        decode_mxfp4(part, (blocks, scales), part.place_in(target))
        assert torch.equal(target, expected)


def test_a_part_of_a_group_of_mxfp4_keeps_its_scale() -> None:
    """The 96 columns of two ranks are divided after a group and a half."""
    blocks, scales = packed_experts((2, 5, 96))
    tensors = {"w_blocks": blocks, "w_scales": scales}
    weight = Placement("w_blocks", (), "w", (), transposed=True, decode=MXFP4, beside=("w_scales",))
    codes, of_tiles = (
        place_mxfp4(Parameter(f"w.{role}", (), "uint8", role, scheme="mxfp4 1x16"), weight, tensors)
        for role in (CODES, SCALES)
    )
    assert tensors["w_scales"].shape == (2, 5, 6)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT
    for rank in range(2):
        parts = [
            each.cut(2, [Place(rank * size, size, 0)])[0].view(tensors[each.source])
            for each, size in ((codes, 24), (of_tiles, 3))
        ]
        found = experts_weight(in_halves(parts[0], 16), parts[1], None, "mxfp4 1x16", "float32")
        assert torch.equal(found, values[:, :, 48 * rank : 48 * (rank + 1)])
