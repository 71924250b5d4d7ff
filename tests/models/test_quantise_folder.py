"""`compiled-engine quantise`: what it writes, by the description of the format, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from encoder_folders import make_encoder
from families import family, write_checkpoint
from mtp_layers import QWEN3, write_mtp_checkpoint
from pooling_folders import make_embedder
from quantised_checkpoints import LAYOUTS, load_all, write_quantised
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.config import ModelConfig
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize, parameters_of
from compiled_engine.models.checkpoint.quantise_folder import QuantisePlan, plan_folder, write_folder
from compiled_engine.models.checkpoint.safetensors_files import map_tensors
from compiled_engine.process.progress import Advance, SilentProgress

pytestmark = pytest.mark.usefixtures("one_thread")
ODD = {"hidden_size": 204, "intermediate_size": 336, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40}
# The same values as the command's, with scales in fp32.
SAME = {
    "fp8": "compressed-tensors, channel, weights alone",
    "fp8_block": "compressed-tensors, block",
}
ROUNDED = {"fp8": "compressed-tensors, channel and token", "fp8_block": "compressed-tensors, block"}
WEIGHTS = {
    "fp8": {"strategy": "channel", "block_structure": None, "dynamic": False},
    "fp8_block": {"strategy": "block", "block_structure": [128, 128], "dynamic": False},
}
INPUTS = {
    "fp8": {"strategy": "token", "group_size": None, "dynamic": True},
    "fp8_block": {"strategy": "group", "group_size": 128, "dynamic": True},
}


def quantise(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["quantise", *map(str, arguments)])


def read(folder: Path, quantization: str | None = None) -> ModelConfig:
    known: dict[str, Any] = {"dtype": "auto", "max_model_len": None, "load_format": "auto", "seed": 0}
    return read_model_config(folder, device_type="cpu", quantization=quantization, **known)[0]


def plan_of(folder: Path, scheme: str = "fp8") -> QuantisePlan:
    return plan_folder(read(folder, scheme), None)


def load(folder: Path) -> Any:
    """Load the model with dequantised weights; every tensor of the folder matches one of the model's."""
    config = read(folder)
    model = build_model(config)
    weights = materialize(model, parameters_of(model), torch.device("cpu"))
    load_weights(weights, model, config, SilentProgress())
    return model


@pytest.mark.parametrize("scheme", SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_and_config_are_as_the_format_describes(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "llama", **ODD, dtype=dtype, tie_word_embeddings=False)
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    (tmp_path / "plain" / "pytorch_model.bin").touch()
    kept = "model.layers.1.mlp.down_proj"
    done = quantise(tmp_path / "plain", tmp_path / "fp8", "--scheme", scheme, "--ignore", kept, "--ignore", "lm_head")
    assert done.exit_code == 0, done.output
    assert f"kept as it was: {kept} ({kept} is to be ignored)" in done.stdout
    write_quantised(tmp_path / "plain", tmp_path / "described", LAYOUTS[SAME[scheme]], ["lm_head", kept])

    found, expected = load_all(tmp_path / "fp8"), load_all(tmp_path / "described")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    section = config.pop("quantization_config")
    assert config == json.loads((tmp_path / "plain" / "config.json").read_text())
    (group,) = section["config_groups"].values()
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    assert (common | WEIGHTS[scheme]).items() <= group["weights"].items()
    assert (common | INPUTS[scheme]).items() <= group["input_activations"].items()
    assert (group["targets"], section["ignore"]) == (["Linear"], [kept, "lm_head"])
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "float-quantized")
    files = {path.name for path in (tmp_path / "fp8").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "fp8", "described"}


EVEN = ODD | {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 336, "head_dim": 64}


def test_four_bits_are_as_the_format_describes(tmp_path: Path) -> None:
    """Code by code: no group is farther from its weights than with the scale of its largest value."""
    make_checkpoint(tmp_path / "plain", "llama", **EVEN, dtype=torch.bfloat16, tie_word_embeddings=False)
    done = quantise(tmp_path / "plain", tmp_path / "int4", "--scheme", "int4")
    assert done.exit_code == 0, done.output
    assert "layers.2.mlp.down_proj (its 336 columns are no multiple of 128)" in done.stdout
    plain, found = load_all(tmp_path / "plain"), load_all(tmp_path / "int4")
    linears = {name.removesuffix("_packed") for name in found if name.endswith("_packed")}
    assert linears == {name for name in plain if "_proj" in name and "down_proj" not in name}
    decoded = load(tmp_path / "int4")
    for name in linears:
        weight, words, scales = plain[name].float(), found[f"{name}_packed"], found[f"{name}_scale"]
        assert (words.dtype, scales.dtype) == (torch.int32, torch.bfloat16)
        assert found[f"{name}_shape"].tolist() == list(weight.shape)
        assert found[f"{name}_shape"].dtype == torch.int64
        codes = torch.stack([words >> 4 * place & 15 for place in range(8)], -1).flatten(1) - 8
        groups, scales = weight.unflatten(1, (-1, 128)), scales.float().unsqueeze(-1)
        values = codes.unflatten(1, (-1, 128)) * scales
        largest = (groups.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
        simple = (groups / largest).round().clamp(-8, 7) * largest
        errors, simple_errors = ((each - groups).square().sum(-1) for each in (values, simple))
        assert (errors <= simple_errors * (1 + 1e-5)).all()
        assert float(errors.sum()) < 0.97 * float(simple_errors.sum())
        assert torch.equal(decoded.get_parameter(name).float(), values.flatten(1))
    section = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    (group,) = section["config_groups"].values()
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    assert (weights | {"dynamic": False, "actorder": None}).items() <= group["weights"].items()
    assert (section["format"], group["format"], group["input_activations"]) == (*["pack-quantized"] * 2, None)
    assert {"re:.*lm_head$", "model.layers.0.mlp.down_proj"} <= set(section["ignore"])


def test_transformers_loads_and_computes_four_bits(bundled_model_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
    assert quantise(bundled_model_path, tmp_path / "int4", "--scheme", "int4").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "int4", dtype=torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(bundled_model_path, dtype=torch.float32)
    for name, parameter in load(tmp_path / "int4").named_parameters():
        oracle.get_parameter(name).data.copy_(parameter)
    ids = torch.arange(5, 4000, 41)[None]
    found, expected = (each(ids).logits[0].log_softmax(-1) for each in (model, oracle))
    assert float((expected.exp() * (expected - found)).sum(-1).mean()) < 1e-6


def test_shards_keep_their_names_and_have_an_index(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3", max_shard_size="60KB", tie_word_embeddings=True)
    write_folder(plan_of(tmp_path / "plain"), tmp_path / "fp8", SilentProgress())
    names = {path.name for path in (tmp_path / "plain").glob("*.safetensors")}
    assert len(names) > 2
    assert {path.name for path in (tmp_path / "fp8").glob("*.safetensors")} == names
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    tensors = map_tensors(tmp_path / "fp8")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert all(name in load_file(tmp_path / "fp8" / file) for name, file in index["weight_map"].items())


@pytest.mark.parametrize("scheme", SAME)
def test_transformers_loads_and_computes_it(scheme: str, bundled_model_path: Path, tmp_path: Path) -> None:
    """Its logits match the dequantised weights, with inputs rounded as the folder's config tells."""
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
    assert quantise(bundled_model_path, tmp_path / "fp8", "--scheme", scheme).exit_code == 0
    layout = LAYOUTS[ROUNDED[scheme]]
    if scheme == "fp8":
        layout = replace(layout, scale=lambda scales: scales[:, :1])  # in fp32
    oracle = write_quantised(bundled_model_path, tmp_path / "described", layout, ["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float32)
    ids = torch.arange(5, 4000, 41)[None]
    found, expected = (each(ids).logits[0].log_softmax(-1) for each in (model, oracle))
    assert float((expected.exp() * (expected - found)).sum(-1).mean()) < 1e-4
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95


class Watching:
    """Progress that records the private memory after each tensor, and may fail after one."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.fail_at, self.error = fail_at, error
        self.memory: list[int] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None, *, in_bytes: bool = False) -> Iterator[Advance]:
        def advance(count: int) -> None:
            self.memory.append(private_bytes())
            if len(self.memory) == self.fail_at:
                raise self.error

        yield advance


def private_bytes() -> int:
    """Return this process's memory without mapped files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def test_memory_is_that_of_some_tensors(tmp_path: Path) -> None:
    """Memory does not grow with the checkpoint, which is a single file; the allocator may keep a few freed tensors."""
    make_checkpoint(tmp_path / "plain", "llama", hidden_size=770, intermediate_size=3072, num_hidden_layers=8)
    plan, watching, before = plan_of(tmp_path / "plain"), Watching(), private_bytes()
    write_folder(plan, tmp_path / "fp8", watching)
    assert plan.bytes_before > 20 * 3072 * 770 * 4
    assert max(watching.memory) - before < 7 * 3072 * 770 * 4


@pytest.mark.parametrize("prefix", [None, "model.language_model."], ids=["transformers 4", "transformers 5"])
def test_of_a_multimodal_checkpoint_the_text_model_is_quantised(prefix: str | None, tmp_path: Path) -> None:
    """Linears of other parts stay, and the folder lists their names, so that they are not taken for quantised ones."""
    write_checkpoint(tmp_path / "plain", family("gemma3"))
    if prefix is not None:
        tensors = load_file(tmp_path / "plain" / "model.safetensors")
        renamed = {name.replace("language_model.model.", prefix): tensor for name, tensor in tensors.items()}
        save_file(renamed, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    write_folder(plan_of(tmp_path / "plain"), tmp_path / "fp8", SilentProgress())
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    codes = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert codes == {name for name in stored if "language_model" in name and name.endswith("_proj.weight")}
    section = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    of_vision = {
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if "vision_tower" in name and tensor.dim() == 2 and name.endswith(".weight")
    }
    assert of_vision <= set(section["ignore"])
    load(tmp_path / "fp8")


def test_an_mtp_layer_stays_as_it_is(tmp_path: Path) -> None:
    """It is written unchanged, and the folder lists its linears, so that they are not taken for quantised ones."""
    plain = write_mtp_checkpoint(tmp_path / "plain", QWEN3).folder
    write_folder(plan_of(plain), tmp_path / "fp8", SilentProgress())
    stored, before = load_file(tmp_path / "fp8" / "model.safetensors"), load_file(plain / "model.safetensors")
    of_layer = {name for name in before if name.startswith("mtp.")}
    assert of_layer
    assert all(torch.equal(stored[name], before[name]) for name in of_layer)
    section = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    linears = {name.removesuffix(".weight") for name in of_layer if before[name].dim() == 2}
    assert linears <= set(section["ignore"])
    load(tmp_path / "fp8")


def test_of_an_embedder_the_decoder_is_quantised(tmp_path: Path) -> None:
    make_embedder(tmp_path / "plain", alone=True, dense=[(56, 24, True, "Tanh")])
    write_folder(plan_of(tmp_path / "plain"), tmp_path / "fp8", SilentProgress())
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    assert stored["layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert (tmp_path / "fp8" / "2_Dense" / "model.safetensors").is_file()
    decoder = load(tmp_path / "fp8").get_parameter("model.layers.0.mlp.up_proj.weight")
    plain = load_file(tmp_path / "plain" / "model.safetensors")["layers.0.mlp.up_proj.weight"]
    assert 0 < float((decoder - plain).abs().max()) < float(plain.abs().max()) / 16


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_unfinished_folder_is_not_left(error: type[BaseException], tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "llama")
    with pytest.raises(error):
        write_folder(plan_of(tmp_path / "plain"), tmp_path / "fp8", Watching(9, error))
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def drop_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def make_infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plain", "plain", "--scheme", "fp8"], "plain', which exists; allowed: a path that does not exist"),
        (["plain", "plain/config.json/out", "--scheme", "fp8"], "config.json', a file; allowed: a folder"),
        (["plain", "out", "--scheme", "int3"], "scheme is 'int3'; allowed: fp8, fp8_block, int4"),
        (["plain", "out", "--scheme", "int4"], "(its 56 columns are no multiple of 128)"),
        (["plain", "out"], "Missing option '--scheme'."),
        (["nowhere", "out", "--scheme", "fp8"], "nowhere/config.json is missing"),
        (["fp8", "out", "--scheme", "fp8"], "fp8', which is quantised already, with compressed-tensors; allowed: a "),
        (["plain", "out", "--scheme", "fp8", "--ignore", "lm_hed"], "no linear of the model; did you mean 'lm_head'?"),
        (["plain", "out", "--scheme", "fp8", "--ignore", "re:.*"], "there is no linear to quantise"),
        (["plain", "out", "--scheme", "fp8", "--ignore", "re:("], "has 're:(': missing )"),
        (["plain", "out", "--scheme", "fp8", "--text", "plain/config.jsn"], "config.jsn', which cannot be read: "),
        (["plain", "out", "--scheme", "fp8", "--text", "empty"], "empty', which is empty; allowed: a file with text"),
        (["plain", "out", "--scheme", "fp8", "--text", "binary"], "binary', which is not UTF-8"),
        (["plain", "out", "--scheme", "fp8", "--revision", "main"], "revision is 'main', but model is "),
        (["lacking", "out", "--scheme", "fp8"], "1 missing: model.norm.weight"),
        (["infinite", "out", "--scheme", "fp8"], "layers.0.mlp.up_proj.weight has values that are not finite"),
        (
            ["encoder", "out", "--scheme", "fp8"],
            "no linear to quantise: model.encoder.layer.0.attention.self.query (the checkpoint has it under another "
            "name, encoder.layer.0.attention.self.query.weight), ",
        ),
    ],
    ids=lambda value: " ".join(value[3:] or value[:2]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_nothing_is_written(
    arguments: list[str], message: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders)
    before = sorted(folders.rglob("*"))
    done = quantise(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    line = [line for line in done.stderr.splitlines() if not line.startswith("quantise ")]
    assert len(line) == 1
    assert message in line[0]
    assert sorted(folders.rglob("*")) == before


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    make_checkpoint(folder / "plain", "llama", tie_word_embeddings=False)
    write_folder(plan_of(folder / "plain"), folder / "fp8", SilentProgress())
    for name, edit in {"lacking": drop_norm, "infinite": make_infinite}.items():
        make_checkpoint(folder / name, "llama", tie_word_embeddings=False)
        tensors = load_file(folder / name / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / name / "model.safetensors")
    make_encoder(folder / "encoder")
    (folder / "empty").write_text(" \n")
    (folder / "binary").write_bytes(b"\xff\xfe\xfd")
    return folder
