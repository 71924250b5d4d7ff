"""Adapters from PEFT's folders: what is read, what is merged, and what is refused in one line."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from adapter_folders import digest_of, make_adapter
from checkpoints import load_checkpoint, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compiled_engine import LLM, SamplingParams
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.models.checkpoint.adapter_files import stamp
from compiled_engine.models.checkpoint.adapter_folder import Adapter, LowRank, match_modules, read_adapter
from compiled_engine.models.checkpoint.merged_adapter import merge
from compiled_engine.models.checkpoint.safetensors_files import map_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
IDS = [3, 99, 5, 27, 64, 8, 120, 41]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("base")
    return path, make_checkpoint(path, "qwen3", num_hidden_layers=2)


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(load_checkpoint(base, torch.float32), adapter).eval()
    logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits.detach()


def merged_logits(base: Path, adapter: Path, tmp_path: Path) -> torch.Tensor:
    """Return the logits of transformers' model on a checkpoint with the tensors that `merge` returns."""
    folder = tmp_path / "merged"
    folder.mkdir()
    merged = merge(read_adapter(adapter), map_tensors(base), torch.float32)
    save_file({name: tensor.contiguous() for name, tensor in merged.items()}, folder / "model.safetensors")
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": "lm_head.weight" not in merged}
    (folder / "config.json").write_text(json.dumps(config))
    logits: torch.Tensor = load_checkpoint(folder, torch.float32)(torch.tensor([IDS])).logits[0]
    return logits.detach()


WAYS: dict[str, dict[str, Any]] = {
    "rank 1": {"rank": 1},
    "rank 16": {"rank": 16, "lora_alpha": 32},
    "rslora": {"rank": 16, "use_rslora": True},
    "q and v": {"rank": 4, "targets": ("q_proj", "v_proj")},
    "patterns": {"rank": 4, "ranks": {"q_proj": 8}, "alpha_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 1}},
    "lm_head": {"rank": 4, "targets": ("down_proj", "lm_head")},
    "dora": {"rank": 4, "use_dora": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_merged_is_what_peft_computes(way: str, base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path, model = base
    adapter = make_adapter(tmp_path / "adapter", model, **WAYS[way])
    found, unadapted = merged_logits(path, adapter, tmp_path), model(torch.tensor([IDS])).logits[0]
    assert (found - unadapted).abs().max() > 0.1
    torch.testing.assert_close(found, peft_logits(path, adapter), atol=3e-4, rtol=1e-4)


def test_alpha_is_8_where_the_config_has_none(base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    """8 is the default of PEFT's LoraConfig."""
    adapter = make_adapter(tmp_path / "adapter", base[1], rank=4)
    fields = json.loads((adapter / CONFIG).read_text())
    del fields["lora_alpha"]
    (adapter / CONFIG).write_text(json.dumps(fields))
    assert {each.scale for each in read_adapter(adapter).linears.values()} == {2.0}


def test_a_pattern_names_the_end_of_a_module(base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    """A pattern matches no inner part of a name: `self_attn` is no linear."""
    patterns = {"self_attn": 2, "self_attn.q_proj": 16}
    adapter = make_adapter(tmp_path / "adapter", base[1], rank=4, lora_alpha=8)
    fields = json.loads((adapter / CONFIG).read_text()) | {"alpha_pattern": patterns}
    (adapter / CONFIG).write_text(json.dumps(fields))
    scales = {name: each.scale for name, each in read_adapter(adapter).linears.items()}
    assert {scale for name, scale in scales.items() if "q_proj" in name} == {4.0}
    assert {scale for name, scale in scales.items() if "q_proj" not in name} == {2.0}


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("q_proj", {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        ("q_proj|up_proj", {f"{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")}),
        ("up_proj|layers.0.self_attn.q_proj", {"0.mlp.up_proj", "1.mlp.up_proj", "0.self_attn.q_proj"}),
        (r"layers\.[1-9]\..*_proj", {"1.self_attn.q_proj", "1.mlp.up_proj"}),
        ("^model.layers.0.mlp.up_proj", {"0.mlp.up_proj"}),
        ("proj", set()),
        ("q_pro", set()),
        ("[qu]p?_proj|", {f"{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")}),
    ],
)
def test_a_pattern_is_a_regular_expression_for_the_end_of_a_module(
    pattern: str, named: set[str], base: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", base[1], rank=4, lora_alpha=8, targets=("q_proj", "up_proj"))
    fields = json.loads((adapter / CONFIG).read_text()) | {"alpha_pattern": {pattern: 16}}
    (adapter / CONFIG).write_text(json.dumps(fields))
    scales = {name.removeprefix("model.layers."): each.scale for name, each in read_adapter(adapter).linears.items()}
    assert len(scales) == 4
    assert {name for name, scale in scales.items() if scale == 4.0} == named


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied")
    make_checkpoint(path, "qwen3", num_hidden_layers=2, tie_word_embeddings=True)
    return path


def saved_by_peft(base: Path, folder: Path, seed: int = 0, **config: Any) -> torch.Tensor:
    """Write an adapter with random values; return its logits, computed by PEFT."""
    peft = pytest.importorskip("peft")
    config = {"r": 4, "target_modules": ["q_proj"]} | config
    adapted = peft.get_peft_model(load_checkpoint(base, torch.float32), peft.LoraConfig(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(0, 0.3, generator=generator)
    adapted.save_pretrained(folder)
    logits: torch.Tensor = adapted(torch.tensor([IDS])).logits[0]
    return logits.detach()


OUTPUT_AND_EMBEDDING: dict[str, dict[str, Any]] = {
    "matrices of the output projection": {"target_modules": ["q_proj", "lm_head"]},
    "matrices of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "a whole output projection": {"modules_to_save": ["lm_head"]},
    "a whole embedding": {"modules_to_save": ["embed_tokens"]},
    "an embedding and a whole output projection": {
        "target_modules": ["q_proj", "embed_tokens"],
        "modules_to_save": ["lm_head"],
    },
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("what", OUTPUT_AND_EMBEDDING)
def test_output_projection_and_embedding_are_merged_each_for_itself(
    what: str, is_tied: bool, base: tuple[Path, torch.nn.Module], tied: Path, tmp_path: Path
) -> None:
    """Even if the base model ties them: PEFT's matrices and tensors belong to one of the two."""
    path = tied if is_tied else base[0]
    expected = saved_by_peft(path, tmp_path / "adapter", **OUTPUT_AND_EMBEDDING[what])
    assert ("lm_head.weight" in map_tensors(path)) != is_tied
    assert (load_checkpoint(path, torch.float32)(torch.tensor([IDS])).logits[0] - expected).abs().max() > 0.1
    found = merged_logits(path, tmp_path / "adapter", tmp_path)
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)


def test_engine_unties_what_a_merged_adapter_parts(tied: Path, tmp_path: Path) -> None:
    logits = saved_by_peft(tied, tmp_path / "adapter", modules_to_save=["embed_tokens", "lm_head"])
    options: dict[str, Any] = {"device": "cpu", "progress": False, "max_model_len": 64}
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(tied, merge_adapter=tmp_path / "adapter", mode="eager", **options) as llm:
        (output,) = llm.generate({"prompt_token_ids": IDS}, params)
    assert_prompt_has(output, logits.log_softmax(-1))
    with pytest.raises(ValueError, match=r"are tied, in a model of transformers; allowed: enable_lora, or model_impl"):
        LLM(tied, merge_adapter=tmp_path / "adapter", model_impl="transformers", **options)


def test_engine_merges_while_it_loads(base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path, model = base
    adapter = make_adapter(tmp_path / "adapter", model, 8, use_dora=True)
    expected = merged_logits(path, adapter, tmp_path).log_softmax(-1)
    options: dict[str, Any] = {"mode": "eager", "device": "cpu", "progress": False, "max_model_len": 64}
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(path, merge_adapter=adapter, **options) as llm:
        (output,) = llm.generate({"prompt_token_ids": IDS}, params)
    assert_prompt_has(output, expected)


def assert_prompt_has(output: RequestOutput, expected_TV: torch.Tensor) -> None:
    """Compare the log-probabilities of the prompt."""
    assert output.prompt_logprobs is not None
    for position, token_id in enumerate(IDS[1:], 1):
        found = output.prompt_logprobs[position]
        assert found is not None
        assert abs(found[token_id].logprob - float(expected_TV[position - 1, token_id])) < 3e-4


def _without_b(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[next(name for name in tensors if "lora_B" in name)]
    save_file(tensors, folder / WEIGHTS)


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def _base_of(module: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        base = {f"base_model.model.{module}.base_layer.weight": torch.ones(4, 4)}
        save_file(load_file(folder / WEIGHTS) | base, folder / WEIGHTS)

    return change


def _set(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | fields))

    return change


def _wider(folder: Path) -> None:
    save_file({name: tensor.repeat(1, 2) for name, tensor in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)


def _with_magnitude(module: str, size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        magnitude = {f"base_model.model.{module}.lora_magnitude_vector": torch.ones(size)}
        save_file(load_file(folder / WEIGHTS) | magnitude, folder / WEIGHTS)

    return change


def _with_value(value: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors[f"base_model.model.{Q}.lora_B.weight"][5, 1] = value
        save_file(tensors, folder / WEIGHTS)

    return change


def _with_norm(folder: Path) -> None:
    save_file(load_file(folder / WEIGHTS) | {"base_model.model.model.norm.weight": torch.ones(56)}, folder / WEIGHTS)


def _cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 4)


def _in_doubles(folder: Path) -> None:
    save_file({name: tensor.double() for name, tensor in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)


Q = "model.layers.0.self_attn.q_proj"
OF_OTHER_KINDS = ("layer_replication", "alora_invocation_tokens", "trainable_token_indices", "megatron_config")
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "half": (_without_b, r"has no lora_B; allowed: both matrices"),
    "pickle": (_pickled, r"adapter_model.bin is a pickle file, which can run code"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), r"adapter_config.json is missing"),
    "damaged": (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 40) and None, r"is damaged"),
    "shape": (_wider, r"allowed: \[r, K\] and \[N, r\]"),
    "bias": (_set(bias="all"), r"bias must be none, got 'all'"),
    "pissa": (_set(init_lora_weights="pissa_niter_4"), r"init_lora_weights must be one that keeps the base weights"),
    "another base": (_base_of(Q), r"q_proj was trained on a weight \[4, 4\], but its matrices are of \[112, 56\]"),
    "a base alone": (_base_of("model.norm"), r"model.norm has a base layer, but no lora_A and lora_B"),
    "another method": (_set(peft_type="IA3"), r"peft_type must be LORA, .*got 'IA3'"),
    "alpha": (_set(lora_alpha=-1), r"lora_alpha must be a number above 0"),
    "pattern": (_set(alpha_pattern={"(": 2}), r"alpha_pattern must have regular expressions as its names, got '\('"),
    "magnitude alone": (_with_magnitude("lm_head", 4), r"lm_head has a magnitude, but no lora_A and lora_B"),
    "short magnitude": (_with_magnitude(Q, 3), r"q_proj has a magnitude \[3\]; allowed: \[\d+\]"),
    "NaN": (_with_value(float("nan")), rf"{Q}.lora_B.weight has values that are not finite; allowed: finite ones"),
    "infinity": (
        _with_value(-float("inf")),
        rf"{Q}.lora_B.weight has values that are not finite; allowed: finite ones",
    ),
    "cut": (_cut, r"adapter_model.safetensors is damaged"),
    "doubles": (_in_doubles, r"has the dtype 'F64'; allowed: F32, BF16, F16"),
    "another rank": (_set(r=5), r"down_proj has rank 4, but adapter_config.json says 5; allowed: the same"),
    "another rank by pattern": (_set(rank_pattern={"up_proj": 8}), r"up_proj has rank 4, but .* says 8"),
    "DoRA without magnitudes": (_set(use_dora=True), r"down_proj has no magnitude, but use_dora is true"),
    "magnitudes without DoRA": (_with_magnitude(Q, 112), r"q_proj has a magnitude, but use_dora is false"),
    "whole tensors of nothing": (
        _set(modules_to_save=["norm"]),
        r"modules_to_save must be .*, and norm is not",
    ),
    "whole tensors of no name": (
        _with_norm,
        r"modules_to_save must be .*, such as model.norm.weight, got None",
    ),
    "lora_bias": (_set(lora_bias=True), r"lora_bias must be false"),
    **{name: (_set(**{name: [1]}), rf"{name} must be null, got \[1\]") for name in OF_OTHER_KINDS},
}


@pytest.mark.parametrize("way", BROKEN)
def test_broken_folder_is_one_line(way: str, base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base[1])
    breaks, message = BROKEN[way]
    breaks(folder)
    with pytest.raises(ValueError, match=message) as error:
        read_adapter(folder)
    assert "\n" not in str(error.value)


def test_whole_tensors_that_are_named_are_read(base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base[1], modules_to_save=["norm"])
    _with_norm(folder)
    assert list(read_adapter(folder).whole) == ["model.norm.weight"]


def test_what_overflows_when_it_is_merged_is_refused(base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path, model = base
    adapter = read_adapter(make_adapter(tmp_path / "adapter", model, size=1e6))
    merge(adapter, map_tensors(path), torch.float32)
    with pytest.raises(ValueError, match=r"down_proj.weight would have values that are not finite in torch.float16"):
        merge(adapter, map_tensors(path), torch.float16)


def test_tensors_stay_as_they_were_read_when_their_file_is_written_anew(
    base: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    """A trainer may save into the same file again."""
    folder = make_adapter(tmp_path / "adapter", base[1])
    expected = {name: each.b_NR.clone() for name, each in read_adapter(folder).linears.items()}
    adapter = read_adapter(folder)
    with (folder / WEIGHTS).open("r+b") as file:
        file.write(bytes((folder / WEIGHTS).stat().st_size))
    assert all(torch.equal(each.b_NR, expected[name]) for name, each in adapter.linears.items())


def test_shapes_alone_are_read_without_the_values(tmp_path: Path) -> None:
    """Memory stays small whatever the size of the file."""
    linear = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(200_000, 8, bias=False)}).requires_grad_(False)
    folder = make_adapter(tmp_path / "adapter", linear, 16)
    assert (folder / WEIGHTS).stat().st_size > 12_000_000
    whole = read_adapter(folder)
    tracemalloc.start()
    try:
        outline = read_adapter(folder, values=False)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
    assert (outline.digest, outline.rank) == (whole.digest, whole.rank)
    assert {each.a_RK.shape for each in outline.linears.values()} == {torch.Size((16, 200_000))}


def test_a_header_of_many_names_is_refused_before_it_is_read(tmp_path: Path) -> None:
    entries = b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(700_000))
    (tmp_path / WEIGHTS).write_bytes(len(entries).to_bytes(8, "little") + entries)
    (tmp_path / CONFIG).write_text("{}")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="must have a header of at most"):
            read_adapter(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


def test_tensors_are_counted_before_their_header_is_parsed(tmp_path: Path) -> None:
    """Parsed, each would take half a kilobyte."""
    entries = b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(150_000))
    header = b"{" + entries + b"}"
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / CONFIG).write_text("{}")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="must have at most 65,536 tensors"):
            read_adapter(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(header)
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200), st.sampled_from([None, 2, 1 << 20, 1 << 60]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_for_weights_are_read_or_refused_in_a_line(content: bytes, length: int | None) -> None:
    header = (len(content) if length is None else length).to_bytes(8, "little")
    with TemporaryDirectory() as folder:
        (Path(folder) / WEIGHTS).write_bytes(header + content)
        (Path(folder) / CONFIG).write_text("{}")
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors") as error:
            read_adapter(Path(folder))
    assert "\n" not in str(error.value)


def test_adapter_of_another_model_is_refused(base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path, _ = base
    other = make_checkpoint(tmp_path / "other", "qwen3", num_hidden_layers=3, hidden_size=64)
    adapter = read_adapter(make_adapter(tmp_path / "adapter", other))
    with pytest.raises(ValueError, match=r"the base model has no linear model\.layers\.2"):
        merge(adapter, map_tensors(path), torch.float32)
    narrower = make_checkpoint(tmp_path / "narrower", "qwen3", num_hidden_layers=2, hidden_size=64)
    adapter = read_adapter(make_adapter(tmp_path / "misfit", narrower))
    with pytest.raises(ValueError, match=r"would be \[64, 80\], but the base model's is \[56, 80\]"):
        merge(adapter, map_tensors(path), torch.float32)


def test_a_linear_with_two_names_is_refused(base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    """One of them would be lost."""
    path, model = base
    folder = make_adapter(tmp_path / "adapter", model, targets=("q_proj",))
    tensors = load_file(folder / WEIGHTS)
    tensors |= {name.replace("model.model.", "model."): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"its names of model\.layers\.0\.self_attn\.q_proj are several; allowed: one"):
        merge(read_adapter(folder), map_tensors(path), torch.float32)


def test_an_embedding_with_two_names_is_refused(tmp_path: Path) -> None:
    matrices = LowRank(torch.zeros(2, 8), torch.zeros(4, 2), 1.0)
    adapter = Adapter(tmp_path, "", {}, dict.fromkeys(("model.embed_tokens", "embed_tokens"), matrices))
    with pytest.raises(ValueError, match=r"its names of model\.embed_tokens are several; allowed: one"):
        match_modules(adapter, ["model.embed_tokens"])


def test_metadata_may_have_any_names(base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base[1], targets=("q_proj",))
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, {"shape": "[2]", "data_offsets": "none"})
    assert read_adapter(folder).rank


def test_replaced_files_have_another_digest(base: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", base[1])
    digest, before = digest_of(folder), stamp(folder)
    assert read_adapter(folder).digest == digest
    assert (digest_of(folder), stamp(folder)) == (digest, before)
    make_adapter(folder, base[1], seed=1)
    assert digest_of(folder) != digest
    assert stamp(folder) != before
    replaced, config = digest_of(folder), folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha"', '"lora_alpha" '))
    assert digest_of(folder) not in (replaced, digest)


def _later(path: Path) -> None:
    """Overwrite with the same number of other bytes, in the same file."""
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def _longer(path: Path) -> None:
    status = path.stat()
    path.write_bytes(bytes(status.st_size + 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _moved_there(path: Path) -> None:
    """Replace by a copy that keeps the original's modification time."""
    status, new = path.stat(), path.with_suffix(".new")
    new.write_bytes(bytes(status.st_size))
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(path)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("change", [_later, _longer, _moved_there])
def test_any_way_of_replacing_a_file_shows(change: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    for each in (CONFIG, WEIGHTS):
        (tmp_path / each).write_bytes(b"before")
    before = stamp(tmp_path)
    assert stamp(tmp_path) == before
    change(tmp_path / name)
    assert stamp(tmp_path) != before
