"""The linears that are tuned are those that the model's graph calls, whatever its code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import family
from tuned_linears import PLAIN, head, layer

from compiled_engine.bench.shapes import write_shape
from compiled_engine.config import EngineConfig
from compiled_engine.options import EngineOptions
from compiled_engine.passes.linear.small_batch_linear_op import TOKEN_BUCKETS, reference
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve
from compiled_engine.tune import device_tuning
from compiled_engine.tune.graph_linears import linears_of
from compiled_engine.tune.linears import Chain, LinearCase, at_each

LFM2 = [
    layer(6144, 2048, norm=True),  # of a convolution: what goes in and two gates
    layer(2048, 2048, residual=True),
    layer(16384, 2048, norm=True, silu_mul=True),
    layer(2048, 8192, residual=True),
    layer(3072, 2048, norm=True),
    head(65536, 2048, norm=True),
]


def config_of(folder: Path, **options: Any) -> EngineConfig:
    """Return a strict configuration: every matrix multiplication must be a small-batch linear."""
    given: dict[str, Any] = {"load_format": "dummy", "mode": "compiled", "device": "cpu", "dtype": "bfloat16"}
    return resolve(EngineOptions(model=folder, **given | {"strict_passes": True} | options))


def few_layers(folder: Path, shape: str) -> Path:
    """Write a shape's config.json with its first layers only; the others call the same linears."""
    path = write_shape(folder, shape) / "config.json"
    values = json.loads(path.read_text()) | {"num_hidden_layers": 4}
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][:4]
    path.write_text(json.dumps(values))
    return folder


# One rank is that of a device with other attention.
ONE_RANK = pytest.mark.shown_by(
    "tune/test_graph_linears.py::test_the_cases_are_the_same_on_a_device_with_other_attention"
)


@pytest.mark.product(one_in=1000, each=("num_ranks",))
@pytest.mark.parametrize(
    ("shape", "num_ranks"),
    [pytest.param(*each, marks=ONE_RANK) if each[1] == 1 else each for each in PLAIN],
)
def test_a_plain_decoder_has_five(shape: str, num_ranks: int, tmp_path: Path) -> None:
    assert linears_of(config_of(few_layers(tmp_path, shape)), num_ranks) == PLAIN[shape, num_ranks]


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_the_cases_are_the_same_on_a_device_with_other_attention(backend: str, tmp_path: Path) -> None:
    config = replace(config_of(few_layers(tmp_path, "qwen3-0.6b")), attention_backend=backend)
    assert linears_of(config) == PLAIN["qwen3-0.6b", 1]


# All families have hidden states of 64, 4 heads and 2 KV heads of 32, a vocabulary of 131.
QKV, O = layer(256, 64, norm=True), layer(64, 128, residual=True)  # noqa: E741
HEAD = head(131, 64, norm=True)
# In experts' place: the shared expert's, whose sum with the others is no residual, then router and gate in one.
SHARED = [layer(96, 64, norm=True, silu_mul=True), layer(64, 48), layer(7, 64, norm=True)]
# A gated delta net's q and k of 2 x 16, v and z of 4 x 24, two numbers for each of 4 heads; attention with a gate.
DELTA_NET = [layer(264, 64, norm=True), layer(64, 96, residual=True)]
GATED_QKV = layer(384, 64, norm=True)
FAMILIES = {
    # The MLP's down has the shape of the delta net's projection.
    "qwen3_5_text": [*DELTA_NET, layer(192, 64, norm=True, silu_mul=True), GATED_QKV, O, HEAD],
    "qwen3_next": [*DELTA_NET, *SHARED, GATED_QKV, O, HEAD],
    "qwen2_moe": [QKV, O, *SHARED, HEAD],
    # Its layer norms are no RMSNorms, and nothing multiplies in its MLP.
    "starcoder2": [layer(256, 64), layer(64, 128), layer(96, 64), layer(64, 96), head(131, 64, norm=False)],
}


# The delta net is that of Qwen3.5, and the experts are those of Qwen2.
BOTH = pytest.mark.shown_by("tune/test_graph_linears.py::test_a_family_has_all_linears_that_its_graph_calls")


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=BOTH) if name == "qwen3_next" else name for name in FAMILIES]
)
def test_a_family_has_all_linears_that_its_graph_calls(name: str, tmp_path: Path) -> None:
    assert linears_of(config_of(family_folder(tmp_path, name))) == FAMILIES[name]


def family_folder(folder: Path, name: str) -> Path:
    """Write the config.json of a family."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(name, **family(name).config())
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
    config.save_pretrained(folder)
    return folder


def test_what_a_library_multiplies_is_no_case(tmp_path: Path) -> None:
    """GPT-2's weights [K, N] never meet tiles."""
    config = config_of(family_folder(tmp_path, "gpt2"), strict_passes=False)
    assert linears_of(config) == [head(131, 64, norm=False)]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_linear_may_follow_any_other(tokens: int) -> None:
    """One that is too narrow for the next, and one that is wider than all before it."""
    cases = at_each([layer(8, 64, norm=True), layer(64, 128), layer(512, 64, silu_mul=True)], [tokens])
    chain = Chain(cases, layers=2, device="cpu")
    assert chain.run([reference] * 3).shape == (tokens, 256)


def test_every_kernel_is_tuned_for_what_the_graph_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM2's code takes two thirds of intermediate_size, and most of its layers have a convolution."""
    tuned: dict[str, list[LinearCase]] = {}
    monkeypatch.setattr(device_tuning, "device_name", lambda: "A GPU")
    monkeypatch.setattr(device_tuning, "is_hopper", lambda: False)
    monkeypatch.setattr(device_tuning, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(device_tuning, "compile_first", lambda launches, progress: None)
    for name in ("tune_linears", "tune_hopper_linears", "tune_products"):
        monkeypatch.setattr(device_tuning, name, lambda cases, *others, name=name: tuned.setdefault(name, cases)[:0])
    monkeypatch.setattr(device_tuning, "measure", lambda *others: {})
    device_tuning.tune_device([few_layers(tmp_path / "lfm2", "lfm2-1.2b")], SilentProgress())
    assert tuned["tune_linears"] == at_each(LFM2, TOKEN_BUCKETS)
    layers = [(case.num_rows, case.k) for case in LFM2[:-1]]
    assert [(case.num_rows, case.k) for case in tuned["tune_hopper_linears"] if case.num_tokens == 1] == layers
    assert {(case.num_rows, case.k) for case in tuned["tune_products"]} == {(16384, 2048)}


@pytest.mark.parametrize("shape", ["minilm", "bge-m3"])
def test_a_model_that_pools_is_an_error(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tuning, "device_name", lambda: "A GPU")
    folder = write_shape(tmp_path / shape, shape)
    with pytest.raises(ValueError, match=f"^model is '{folder}', which pools; allowed: models that generate"):
        device_tuning.tune_device([folder], SilentProgress())


def test_a_context_may_be_shorter_than_what_is_measured(tmp_path: Path) -> None:
    config = device_tuning._config(family_folder(tmp_path, "starcoder2"), (1,))
    assert config.model.max_model_len == 256
