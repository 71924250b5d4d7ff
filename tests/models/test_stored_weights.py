"""How checkpoints of transformers' models store parameters that they name otherwise, for the rules of quantisation."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family, write_checkpoint
from nvfp4_checkpoints import COMPRESSED, MODELOPT, write_nvfp4
from packed_checkpoints import PACKINGS, write_packed
from quantised_checkpoints import LAYOUTS, load_all, write_quantised
from safetensors.torch import save_file

from compiled_engine.models.checkpoint.stored_weights import find_stored_weights
from compiled_engine.options import EngineOptions
from compiled_engine.quantisation import LinearScheme, Quantisation
from compiled_engine.resolve.engine import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

SPARSE = "block_sparse_moe"
ROUTERS = r"re:.*\.gate$"
MATRICES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def rules_of(folder: Path, **options: Any) -> Quantisation:
    given = EngineOptions(model=str(folder), device="cpu", skip_tokenizer_init=True, **options)
    found = resolve(given).model.quantisation
    assert found is not None
    return found


def scheme_in(rules: Quantisation, name: str) -> str:
    return str(rules.of_parameter(name, (name.removesuffix(".weight"),)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of two layers by their families, one of them with a dense layer before."""
    found = {}
    for name in ("mixtral", "minimax_m2", "lfm2_moe"):
        case, found[name] = family(name), tmp_path_factory.mktemp(name)
        if name != "lfm2_moe":
            case = replace(case, changes={**case.changes, "num_hidden_layers": 2})
        write_checkpoint(found[name], case)
    return found


def named(layer: int, within: str) -> list[str]:
    parts = [f"{expert}.{part}" for expert in range(8) for part in ("w1", "w2", "w3")]
    return [f"model.layers.{layer}.{within}.experts.{part}" for part in parts]


@pytest.mark.parametrize(
    ("name", "form", "ignored"),
    [
        ("mixtral", COMPRESSED, named(1, SPARSE)),
        ("mixtral", MODELOPT, [f"model.layers.1.{SPARSE}.experts.*"]),
        ("minimax_m2", COMPRESSED, [rf"re:.*\.1\.{SPARSE}\.experts\."]),
        ("minimax_m2", "compressed-tensors, groups", [rf"re:.*\.1\.{SPARSE}\.experts\.3\.w1"]),
        ("lfm2_moe", COMPRESSED, named(1, "feed_forward")),
        ("lfm2_moe", "gptq", ["model.layers.1.feed_forward.experts.4.w3"]),
    ],
)
def test_rules_name_experts_as_the_checkpoint_does(
    name: str, form: str, ignored: list[str], plain: dict[str, Path], tmp_path: Path
) -> None:
    """Of a layer that is left out, or of a single matrix of it: then the others are decoded."""
    routers = "*.gate" if form == MODELOPT else ROUTERS
    write = partial(write_nvfp4, form=form) if form in (COMPRESSED, MODELOPT) else None
    written = ["lm_head", *ignored] if form == "gptq" else ["lm_head", routers, *ignored]
    if write is not None:
        write(plain[name], tmp_path, ignore=written)
    else:
        write_packed(plain[name], tmp_path, PACKINGS[form], written)
    rules, within = rules_of(tmp_path), "feed_forward" if name == "lfm2_moe" else "mlp"
    gate_up, down = (f"{within}.experts.{part}" for part in ("gate_up_proj", "down_proj"))
    (scheme,) = {scheme_in(rules, f"model.layers.{2 if name == 'lfm2_moe' else 0}.{part}") for part in (gate_up, down)}
    assert LinearScheme.parse(scheme).weight.format.bits == 4
    reason = scheme_in(rules, f"model.layers.1.{gate_up}")
    assert reason.startswith(f"the checkpoint holds model.layers.1.{SPARSE if within == 'mlp' else within}.experts.")
    assert reason.endswith("in float32")
    whole_layer = len(ignored) > 1 or ignored[0].endswith(("experts.*", r"experts\."))
    assert (scheme_in(rules, f"model.layers.1.{down}") == scheme) == (not whole_layer)


def test_dtypes_tell_what_rules_do_not_list(plain: dict[str, Path], tmp_path: Path) -> None:
    """Rules of FP8 may list nothing: then matrices without scales stay in 16 bits."""
    tensors = load_all(plain["mixtral"])
    for name in [name for name in tensors if ".experts." in name and ".0." in name.partition(".experts")[0]]:
        module = name.removesuffix(".weight")
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{module}.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((plain["mixtral"] / "config.json").read_text())
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    given = EngineOptions(model=str(tmp_path), device="cpu", skip_tokenizer_init=True)
    model = resolve(given).model
    rules = model.quantisation
    assert rules is not None
    described = {name: tensor.to("meta") for name, tensor in tensors.items()}  # as the hub describes them
    assert find_stored_weights(model, rules, described, None) == rules.stored
    for part in MATRICES:
        assert scheme_in(rules, f"model.layers.0.{part}") == "e4m3 128x128, inputs e4m3 1x128"
        assert scheme_in(rules, f"model.layers.1.{part}").startswith("the checkpoint holds model.layers.1.block_sparse")


@pytest.mark.parametrize("listed", [f"{SPARSE}.gate", "mlp.gate", "nothing"])
def test_renamed_linears_are_quantised_if_the_checkpoint_has_codes_of_them(
    listed: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    """Whether rules list a router by its name in the checkpoint, in the model, or not at all."""
    routers = [f"model.layers.{layer}.{SPARSE}.gate" for layer in range(2)]
    write_quantised(plain["mixtral"], tmp_path, LAYOUTS["fp8, block"], ["lm_head", *routers])
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace(f"{SPARSE}.gate", listed))
    rules = rules_of(tmp_path)
    reason = f"the checkpoint holds model.layers.1.{SPARSE}.gate.weight in float32"
    assert scheme_in(rules, "model.layers.1.mlp.gate.weight") == reason
    assert scheme_in(rules, "model.layers.1.self_attn.q_proj.weight") == "e4m3 128x128, inputs e4m3 1x128"
    assert [each.name for each in rules.stored if "self_attn" in each.name] == []


def test_without_a_checkpoint_rules_have_the_names_of_the_model(plain: dict[str, Path], tmp_path: Path) -> None:
    write_packed(plain["mixtral"], tmp_path, PACKINGS["awq"], ["lm_head"])
    (tmp_path / "model.safetensors").unlink()
    assert rules_of(tmp_path, load_format="dummy").stored == ()
