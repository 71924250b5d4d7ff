"""Packed weights of checkpoints against codes written one by one, and tensors that contradict each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from packed_checkpoints import PACKINGS, Packing, Tensors, groups_of, pack_weight, round_weight, write_packed
from quantised_checkpoints import load_all
from safetensors.torch import save_file
from test_quantise_folder import load

from compiled_engine.models.checkpoint import packed_weights
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.packed_weights import read_packed
from compiled_engine.models.checkpoint.quantisation_config import read_quantisation
from compiled_engine.models.checkpoint.quantised_tensors import decode_scaled, encoded, find_stored
from compiled_engine.models.foreign.placement import whole
from compiled_engine.models.textbook.experts import Experts
from compiled_engine.quantisation import Quantisation

NAME = "model.layers.0.mlp.up_proj"
CPU = torch.device("cpu")


def rules_of(packing: Packing) -> Quantisation:
    found = read_quantisation(
        JsonFields("config.json", {"quantization_config": packing.config(["lm_head"])}), Path(".")
    )
    assert found is not None
    return found


def weight(num_rows: int, num_columns: int) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(num_rows))


def stored(packing: Packing, num_rows: int = 24, num_columns: int = 256) -> tuple[Tensors, torch.Tensor]:
    tensors, values_NK = pack_weight(weight(num_rows, num_columns), packing)
    return {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}, values_NK


def decoded(tensors: Tensors, rules: Quantisation, read: Callable[..., Any] = read_packed) -> torch.Tensor:
    """The weight as it is decoded while it is loaded."""
    found, packed = read(tensors, rules, Path("folder"))
    name = f"{NAME}.weight"
    by_name, problems = find_stored(found, rules)
    assert not any(problems.values()), problems
    placement = encoded(whole(name, name, found[name].shape), by_name)
    target = torch.full(found[name].shape, torch.nan)
    decode_scaled(placement, [packed[name].to(CPU), *(found[each] for each in placement.beside)], target)
    return target


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(24, 256), (8, 128), (40, 200)])
def test_codes_and_values_are_those_written(name: str, num_rows: int, num_columns: int) -> None:
    """Also where the last group is shorter, and where words do not end with the rows."""
    packing = PACKINGS[name]
    tensors, values_NK = stored(packing, num_rows, num_columns)
    assert torch.equal(decoded(tensors, rules_of(packing)), values_NK)
    found, packed = read_packed(tensors, rules_of(packing), Path("folder"))
    groups = groups_of(packing, num_columns)
    codes_NK, _, zeros_NG = round_weight(weight(num_rows, num_columns), packing, groups)
    in_order = sorted(range(num_columns), key=lambda column: groups[column])
    codes = packed[f"{NAME}.weight"].to(CPU)
    is_signed, per_byte = packing.bits == 8 and packing.is_symmetric, 8 // packing.bits
    assert codes.dtype == (torch.int8 if is_signed else torch.uint8)
    assert tuple(codes.shape) == (num_rows, num_columns // per_byte)
    for row in range(num_rows):
        for place, column in enumerate(in_order):
            byte = int(codes[row, place // per_byte]) + 128 * is_signed
            assert byte >> packing.bits * (place % per_byte) & 2 * packing.middle - 1 == codes_NK[row, column]
    zeros = [found[each] for each in found if each.endswith(("qzeros", "zero_point"))]
    assert all(torch.equal(each.long(), zeros_NG) for each in zeros)
    assert bool(zeros) != packing.is_symmetric


def test_rows_that_fill_no_word() -> None:
    """compressed-tensors fills words with zeros; the other formats have whole words."""
    packing = PACKINGS["compressed-tensors, zero points"]
    tensors, values_NK = stored(packing, 21, 134)
    assert tensors[f"{NAME}.weight_packed"].shape == (21, 17)
    assert tensors[f"{NAME}.weight_zero_point"].shape == (3, 2)
    assert torch.equal(decoded(tensors, rules_of(packing)), values_NK)


AWQ, GPTQ, REORDERED = PACKINGS["awq"], PACKINGS["gptq, zero points"], PACKINGS["gptq, reordered"]


def test_another_reading_is_another_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values that are compared depend on each part of the layout."""
    tensors, values_NK = stored(GPTQ)
    assert torch.equal(decoded(tensors, rules_of(GPTQ)), values_NK)
    assert not torch.equal(decoded(tensors, replace(rules_of(GPTQ), layout="gptq_v2")), values_NK)
    for change in (
        {"scales": tensors[f"{NAME}.scales"].roll(1, 0)},
        {"qzeros": tensors[f"{NAME}.qzeros"].roll(1, 1)},
        {"qweight": tensors[f"{NAME}.qweight"].roll(1, 0)},
    ):
        changed = tensors | {f"{NAME}.{name}": tensor for name, tensor in change.items()}
        assert not torch.equal(decoded(changed, rules_of(GPTQ)), values_NK)
    tensors, values_NK = stored(AWQ)
    assert torch.equal(decoded(tensors, rules_of(AWQ)), values_NK)
    monkeypatch.setattr(packed_weights, "AWQ_ORDER", tuple(range(8)))
    assert not torch.equal(decoded(tensors, rules_of(AWQ)), values_NK)


def edit(kind: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        old = tensors.pop(f"{NAME}.{kind}")
        if change is not None:
            tensors[f"{NAME}.{kind}"] = change(old)

    return apply


def put(kind: str, tensor: torch.Tensor, module: str = NAME) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{module}.{kind}": tensor})


def first_is(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


PACKED, SYMMETRIC = PACKINGS["compressed-tensors, zero points"], PACKINGS["compressed-tensors, groups"]


@pytest.mark.parametrize(
    ("packing", "change", "expected"),
    [
        (PACKED, edit("weight_shape", None), "weight_shape is missing"),
        (PACKED, edit("weight_zero_point", None), "weight_zero_point is missing"),
        (PACKED, edit("weight_scale", lambda t: t[:, :1]), "weight_scale must be [24, 2], got [24, 1]"),
        (PACKED, edit("weight_shape", lambda t: t + 16), "weight_packed must be [40, 34], got [24, 32]"),
        (PACKED, edit("weight_shape", lambda t: t - torch.tensor([0, 1])), "even number of columns, got 255"),
        (PACKED, edit("weight_packed", lambda t: t.long()), "weight_packed must be torch.int32, got torch.int64"),
        (SYMMETRIC, put("weight_zero_point", torch.zeros(3, 8)), "zero_point must not exist, as symmetric is true"),
        (GPTQ, edit("qzeros", lambda t: t[:1]), "qzeros must be [8, 3], got [1, 3]"),
        (GPTQ, edit("qzeros", first_is(-1)), "qzeros must hold zero points less one, from 0 to 14, got 15"),
        (GPTQ, edit("scales", lambda t: t.t().contiguous()), "scales must be [8, 24], got [24, 8]"),
        (GPTQ, edit("g_idx", first_is(3)), "g_idx must hold neighbouring groups of 32, as config.json says"),
        (REORDERED, edit("g_idx", None), "g_idx is missing"),
        (REORDERED, edit("g_idx", lambda t: t * 0), "g_idx must hold each group 64 times"),
        (PACKINGS["gptq"], edit("qzeros", first_is(0x77777776)), "the zero point 8 alone, as sym is true, got 7"),
        (
            PACKINGS["gptq, 8 bits, zero points"],
            edit("qzeros", first_is(-1)),
            "qzeros must hold zero points less one, from 0 to 254, got 255",
        ),
        (PACKINGS["gptq, 8 bits"], edit("qzeros", first_is(0x7F7F7F80)), "the zero point 128 alone, as sym is true"),
        (REORDERED, edit("g_idx", lambda t: t.float()), "g_idx must be torch.int32 or torch.int64, got torch.float32"),
        (SYMMETRIC, edit("weight_shape", lambda t: t.float()), "weight_shape must be torch.int32 or torch.int64, got"),
        (SYMMETRIC, edit("weight_shape", lambda t: -t), "weight_shape must hold numbers above 0, got [-24, -256]"),
        (AWQ, edit("qweight", lambda t: t[0]), "qweight must have two dimensions, got [3]"),
        (AWQ, put("weight", torch.zeros(24, 256)), "qweight is a second copy of"),
        (AWQ, put("qweight", torch.zeros(8, 1), "lm_head"), "lm_head.qweight is packed, but re:.*lm_head$ is to be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_contradicts_itself_is_one_line(
    packing: Packing, change: Callable[[Tensors], None], expected: str
) -> None:
    tensors, _ = stored(packing)
    change(tensors)
    assert expected in refusal(tensors, rules_of(packing))


def refusal(tensors: Tensors, rules: Quantisation, read: Callable[..., Any] = read_packed) -> str:
    """The one line with which the tensors are refused."""
    with pytest.raises(ValueError, match="the tensors in folder do not fit quantization_config: ") as caught:
        read(tensors, rules, Path("folder"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_of_other_modules_stay() -> None:
    tensors, _ = stored(GPTQ)
    others = {"model.norm.scales": torch.ones(3), "model.norm.weight": torch.ones(3)}
    found, packed = read_packed(tensors | others, rules_of(GPTQ), Path("folder"))
    assert others.items() <= found.items()
    assert packed.keys() == {f"{NAME}.weight"}
    assert read_packed(others, None, Path("folder")) == (others, {})


def test_codes_that_are_stored_as_the_engine_keeps_them_are_not_copied() -> None:
    """They take the path of the other weights to the device."""
    signed = PACKINGS["compressed-tensors, 8 bits"]
    reordered = PACKINGS["compressed-tensors, reordered"]
    for packing, is_stored in ((SYMMETRIC, True), (reordered, False), (GPTQ, False), (signed, False)):
        _, packed = read_packed(stored(packing)[0], rules_of(packing), Path("folder"))
        found = packed[f"{NAME}.weight"]
        assert (found.stored is not None) == is_stored
        if found.stored is not None:
            assert torch.equal(found.stored, found.to(CPU))
            assert found.stored.data_ptr() == found.words.data_ptr()


@pytest.mark.parametrize("name", ["compressed-tensors, zero points", "gptq, reordered", "awq", "gptq, 8 bits"])
def test_experts_are_decoded(name: str, tmp_path: Path) -> None:
    """Each matrix of each expert, in its place among the textbook's stacked ones."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 40, "num_attention_heads": 4, "num_experts": 3}
    make_checkpoint(tmp_path, "qwen3_moe", **sizes, num_experts_per_tok=2, tie_word_embeddings=False)
    tensors, values = load_all(tmp_path), {}
    for path in [name for name in tensors if name.endswith("_proj.weight")]:
        packed, values[path] = pack_weight(tensors.pop(path), PACKINGS[name])
        tensors |= {f"{path.removesuffix('.weight')}.{kind}": tensor for kind, tensor in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section_of(PACKINGS[name])}))
    model, checked = load(tmp_path), 0
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            for stored_name, parameter, placed in module.checkpoint_tensors():
                part = module.get_parameter(parameter)
                for dim, (start, end) in enumerate(placed):
                    part = part.narrow(dim, start, end - start)
                assert torch.equal(part.squeeze(0), values[f"{path}.{stored_name}"])
                checked += 1
    assert checked == 3 * 3 * 3


def section_of(packing: Packing) -> dict[str, object]:
    """The section of config.json; routers stay in fp32."""
    ignored = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(3))]
    return packing.config(ignored)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_that_the_model_lacks_must_be_zero(value: float, tmp_path: Path) -> None:
    """Some writers of GPTQ gave each linear a bias."""
    make_checkpoint(tmp_path / "plain", "llama", hidden_size=64, num_attention_heads=4, tie_word_embeddings=False)
    write_packed(tmp_path / "plain", tmp_path / "gptq", GPTQ, ["lm_head"])
    tensors = load_all(tmp_path / "gptq")
    tensors[f"{NAME}.bias"] = torch.full((tensors[f"{NAME}.scales"].shape[1],), value)
    save_file(tensors, tmp_path / "gptq" / "model.safetensors")
    if value:
        with pytest.raises(ValueError, match=f"1 unexpected: {NAME}.bias"):
            load(tmp_path / "gptq")
    else:
        load(tmp_path / "gptq")
