"""config.json means what it means to transformers, in either spelling, and every mistake in it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from compiled_engine.config import LengthAngles, ModelConfig, RopeConfig
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.checkpoint.families import FAMILIES
from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.models.checkpoint.speech_rules import read_speech_rules
from compiled_engine.models.textbook.rope import RotaryEmbedding, inverse_frequencies

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

SMALLEST: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


def write(folder: Path, architecture: str = "LlamaForCausalLM", **fields: Any) -> Path:
    """Write a config.json with SMALLEST and these fields; a field with the value `...` is left out."""
    values = {"architectures": [architecture], "model_type": ARCHITECTURES.get(architecture, "llama")}
    values |= SMALLEST | fields
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    return folder


def read(path: Path, **arguments: Any) -> tuple[ModelConfig, dict[str, str]]:
    defaults = {
        "dtype": "auto",
        "max_model_len": None,
        "load_format": "dummy",
        "seed": 0,
        "device_type": "cpu",
    }
    return read_model_config(path, **(defaults | arguments))


def expect_error(path: Path, *parts: str, **arguments: Any) -> None:
    """Expect a ValueError whose message has every part."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked below)
        read(path, **arguments)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True, "rope_theta": 5e5},
        {"num_key_value_heads": None, "head_dim": None},
        {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 7, "use_sliding_window": False},
        {"sliding_window": None},
    ],
)
def test_fields_mean_what_they_mean_to_transformers(architecture: str, fields: dict[str, Any], tmp_path: Path) -> None:
    if architecture == "Qwen3ForCausalLM" and "head_dim" in fields:
        fields = fields | {"head_dim": 8}  # transformers has no null there, nor in the next
    if architecture == "MistralForCausalLM" and "num_key_value_heads" in fields:
        fields = fields | {"num_key_value_heads": 2}
    path = write(tmp_path, architecture, **fields)
    theirs = AutoConfig.from_pretrained(path)
    ours, _ = read(path)
    assert ours.architecture == architecture
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // 32)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    window = getattr(theirs, "sliding_window", None)
    if architecture == "LlamaForCausalLM":
        window = None
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    assert ours.sliding_windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize(
    ("architecture", "kind"), [("Gemma2ForCausalLM", "gemma2"), ("Gemma3ForCausalLM", "gemma3_text")]
)
@pytest.mark.parametrize("given", [{}, {"attn_logit_softcapping": None, "final_logit_softcapping": None}])
def test_what_gemma_leaves_unsaid_is_what_transformers_takes(
    architecture: str, kind: str, given: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path, architecture, model_type=kind, head_dim=64, num_key_value_heads=4, **given)
    model, theirs = read(folder)[0], AutoConfig.from_pretrained(folder)
    assert model.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert model.attention_soft_cap == (theirs.attn_logit_softcapping or 0.0)
    assert model.logit_soft_cap == (theirs.final_logit_softcapping or 0.0)
    ropes = theirs.rope_parameters
    assert model.rope == RopeConfig(ropes.get("full_attention", ropes)["rope_theta"])
    assert model.local_rope_theta == (
        ropes["sliding_attention"]["rope_theta"] if "sliding_attention" in ropes else None
    )


@pytest.mark.parametrize("in_use", [True, False])
def test_a_window_of_qwen3_moe_is_for_all_layers(in_use: bool, tmp_path: Path) -> None:
    fields = {"use_sliding_window": in_use, "sliding_window": 4, "max_window_layers": 2, "head_dim": 8}
    folder = write(tmp_path, "Qwen3MoeForCausalLM", model_type="qwen3_moe", num_key_value_heads=4, **fields)
    assert read(folder)[0].sliding_windows == (AutoConfig.from_pretrained(folder).sliding_window,) * 4


@pytest.mark.parametrize("attention_bias", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_biases_are_where_transformers_has_them(architecture: str, attention_bias: bool, tmp_path: Path) -> None:
    fields = {"attention_bias": attention_bias, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": 8}
    oracle = make_checkpoint(tmp_path, ARCHITECTURES[architecture], **(SMALLEST | fields))
    config, _ = read(tmp_path)
    ours = {name for name, _ in build_model(config).named_parameters() if name.endswith("bias")}
    assert ours == {name for name, _ in oracle.named_parameters() if name.endswith("bias")}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
FACTORS = {"short_factor": [1.0 + i / 64 for i in range(64)], "long_factor": [2.0 + i / 8 for i in range(64)]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 2048, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0},
    YARN,
    {"rope_type": "yarn", "factor": 2.0},
    YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    YARN | {"attention_factor": 0.7, "factor": 3.3},
    YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
    YARN | {"mscale": 0.8},
    YARN | {"factor": 1.0},
    LONGROPE,
    LONGROPE | {"factor": 8.0, "attention_factor": 1.5},
    DYNAMIC,
]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "rope_scaling with type"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_frequencies_are_those_of_transformers(rope: dict[str, Any], spelling: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 8192}
    if spelling == "rope_parameters":
        fields["rope_parameters"] = rope | {"rope_theta": 1e6}
    else:
        renamed = {"type" if name == "rope_type" and "type" in spelling[6:] else name: v for name, v in rope.items()}
        fields |= {"rope_theta": 1e6, "rope_scaling": renamed}
    path = write(tmp_path, **fields)
    config, _ = read(path)
    frequencies, scaling = inverse_frequencies(config.rope, config.head_dim)
    if rope["rope_type"] == "default":
        torch.testing.assert_close(frequencies, 1e6 ** -(torch.arange(0, 128, 2) / 128))
        assert scaling == 1.0
        return
    expected, expected_scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](AutoConfig.from_pretrained(path))
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0)
    assert scaling == pytest.approx(expected_scaling, rel=1e-12)


@pytest.mark.parametrize(("rope", "border"), [(LONGROPE, 2048), (DYNAMIC, 8192)])
def test_frequencies_by_length_are_those_of_transformers(rope: dict[str, Any], border: int, tmp_path: Path) -> None:
    path = write(tmp_path, head_dim=128, max_position_embeddings=8192, rope_parameters=rope | {"rope_theta": 1e6})
    config, _ = read(path)
    assert config.length_angles == LengthAngles(border, recomputes=rope is LONGROPE)
    rotary = RotaryEmbedding(config.rope, config.head_dim, torch.float32)
    lengths = torch.tensor([1, border, border + 1, 12345])
    for length, frequencies in zip(lengths, rotary.frequencies(lengths), strict=True):
        init: Any = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        expected, _ = init(AutoConfig.from_pretrained(path), torch.device("cpu"), seq_len=length)
        torch.testing.assert_close(frequencies, expected, rtol=2e-7, atol=0)


def test_angles_by_length_must_fit_the_heads_and_concern_all_layers(tmp_path: Path) -> None:
    expect_error(write(tmp_path, head_dim=64, rope_parameters=LONGROPE), "short_factor must have 32 numbers, got 64")
    wrong = LONGROPE | {"long_factor": [0.0]}
    expect_error(
        write(tmp_path, head_dim=128, rope_parameters=wrong), "long_factor", "a list of finite numbers above 0"
    )
    gemma = {"model_type": "gemma3_text", "head_dim": 128, "rope_scaling": DYNAMIC}
    expect_error(write(tmp_path, "Gemma3ForCausalLM", **gemma), "in some layers", "default, linear, llama3 or yarn")


@pytest.mark.parametrize("rope", [rope for rope in ROPES if rope["rope_type"] in ("llama3", "yarn")])
def test_an_original_length_beside_the_rope_section_comes_first(rope: dict[str, Any], tmp_path: Path) -> None:
    length = {"max_position_embeddings": 8192, "original_max_position_embeddings": 1024}
    path = write(tmp_path, head_dim=128, rope_parameters=rope | {"rope_theta": 1e6}, **length)
    config, _ = read(path)
    assert config.rope.original_max_position_embeddings == 1024
    frequencies, _ = inverse_frequencies(config.rope, config.head_dim)
    expected, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](AutoConfig.from_pretrained(path))
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0)


def test_of_two_spellings_the_one_with_a_value_counts(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    config, _ = read(write(tmp_path, rope_scaling=None, rope_parameters=rope))
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 2.0, 1e6)
    config, _ = read(write(tmp_path, dtype="float16", torch_dtype="bfloat16"), device_type="cuda")
    assert config.dtype is torch.float16


def test_the_length_of_gemma_3_has_the_linear_factor_in_it(tmp_path: Path) -> None:
    """Its linear factor applies to full-attention layers only."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    folder = write(tmp_path, "Gemma3ForCausalLM", model_type="gemma3_text", rope_scaling=scaling)
    assert read(folder)[0].max_model_len == 512
    expect_error(folder, "max_model_len", "1 to 512", max_model_len=513)


@pytest.mark.parametrize("kind", ["mrope", "ntk"])
def test_an_unknown_rope_type_is_refused_with_the_known_ones(kind: str, tmp_path: Path) -> None:
    known = "default, linear, llama3, yarn, longrope, dynamic"
    path = write(tmp_path, rope_scaling={"rope_type": kind, "factor": 2.0})
    expect_error(path, "rope_scaling: rope_type", known, repr(kind))
    with pytest.raises(ValueError, match=known):
        inverse_frequencies(RopeConfig(theta=1e4, kind=kind), 64)


def test_yarn_without_an_original_length_is_refused() -> None:
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        inverse_frequencies(RopeConfig(theta=1e4, kind="yarn", factor=2.0), 64)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 512),
        ({"type": "linear", "factor": 2.5}, 1280),
        ({"type": "dynamic", "factor": 2.5}, 1280),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "original_max_position_embeddings": 256}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}, 512),
    ],
)
def test_the_longest_model_len_follows_the_rope_scaling(
    scaling: dict[str, Any] | None, length: int, tmp_path: Path
) -> None:
    path = write(tmp_path, rope_scaling=scaling)
    config, reasons = read(path)
    assert config.max_model_len == length
    assert "max_position_embeddings" in reasons["model.max_model_len"]
    shorter, reasons = read(path, max_model_len=100)
    assert shorter.max_model_len == 100
    assert "model.max_model_len" not in reasons
    expect_error(path, "max_model_len", f"1 to {length}", str(length + 1), max_model_len=length + 1)


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_auto_dtype_is_float32_on_cpu_and_the_checkpoints_on_cuda(field: str, tmp_path: Path) -> None:
    for stated in (torch.bfloat16, torch.float16, torch.float32):
        path = write(tmp_path, **{field: str(stated).removeprefix("torch.")})
        config, reasons = read(path, device_type="cuda")
        assert config.dtype is stated
        assert field in reasons["model.dtype"]
        config, reasons = read(path, device_type="cpu")
        assert config.dtype is torch.float32
        assert "CPU" in reasons["model.dtype"]


def test_auto_dtype_without_a_stated_one_is_that_of_the_weights(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert read(path, device_type="cuda")[0].dtype is torch.bfloat16
    save_file({"a": torch.ones(3, dtype=torch.float16)}, path / "model.safetensors")
    config, reasons = read(path, device_type="cuda", load_format="safetensors")
    assert config.dtype is torch.float16
    assert "states none" in reasons["model.dtype"]
    expect_error(
        path, "config.json states none", "org/a", device_type="cuda", load_format="safetensors", hub_name="org/a"
    )
    save_file({"a": torch.ones(3, dtype=torch.int8)}, path / "model.safetensors")
    expect_error(path, "int8", "bfloat16", device_type="cuda", load_format="safetensors")


def test_dtype_names(tmp_path: Path) -> None:
    path = write(tmp_path, dtype="bfloat16")
    names = {
        "float32": torch.float32,
        "float": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "half": torch.float16,
    }
    for name, dtype in names.items():
        config, reasons = read(path, dtype=name)
        assert config.dtype is dtype
        assert "model.dtype" not in reasons
    expect_error(write(tmp_path, dtype="float8_e4m3fn"), "dtype", "float8_e4m3fn", device_type="cuda")


def test_load_format_is_resolved(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert read(path, load_format="dummy")[0].load_format == "dummy"
    save_file({"a": torch.ones(3)}, path / "model.safetensors")
    config, reasons = read(path, load_format="auto", seed=7)
    assert (config.load_format, config.seed) == ("safetensors", 7)
    assert "model.load_format" in reasons


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    expect_error(path, "safetensors", "none", load_format="auto")
    for name in ("pytorch_model.bin", "model.pt", "model.pth"):
        (path / name).touch()
        expect_error(path, "safetensors", name, "pickle", load_format="auto")
        (path / name).unlink()


def test_a_missing_folder_or_file_or_damaged_json_is_named(tmp_path: Path) -> None:
    expect_error(tmp_path / "nowhere", "folder", str(tmp_path / "nowhere"))
    expect_error(tmp_path, "config.json", "missing")
    for text, part in (("{", "damaged"), ("[1]", "object"), ("\xff", "damaged")):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        expect_error(tmp_path, "config.json", part)


@pytest.mark.parametrize(
    "field", ["architectures", "hidden_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"]
)
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    expect_error(write(tmp_path, **{field: ...}), "config.json", field, "missing")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("architectures", "LlamaForCausalLM", "list of strings"),
        ("hidden_size", "64", "whole number"),
        ("hidden_size", 250, "multiple of num_attention_heads"),
        ("vocab_size", 0, "at least 1"),
        ("num_attention_heads", 4.0, "whole number"),
        ("num_key_value_heads", 5, "divisor of num_attention_heads"),
        ("intermediate_size", True, "whole number"),
        ("head_dim", 15, "even"),
        ("rms_norm_eps", -1e-6, "above 0"),
        ("rms_norm_eps", float("nan"), "above 0"),
        ("tie_word_embeddings", "no", "true or false"),
        ("rope_theta", "big", "above 0"),
        ("rope_scaling", [2.0], "object"),
        ("hidden_act", "gelu", "silu, got 'gelu'; model_impl='transformers' runs"),
        ("hidden_act", 3, "string"),
        ("partial_rotary_factor", 0.5, "1.0, got 0.5; model_impl='transformers' runs"),
        ("quantization_config", {"quant_method": "mxfp4"}, "model_impl='transformers'"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field: str, value: Any, allowed: str, tmp_path: Path) -> None:
    expect_error(write(tmp_path, **{field: value}), "config.json", field, allowed)


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4}, "low_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "1"},
            "original_max_position",
        ),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.25},
            "partial_rotary_factor must be 1.0, got 0.25; model_impl='transformers' runs",
        ),
    ],
)
def test_a_wrong_rope_field_is_named(scaling: dict[str, Any], field: str, tmp_path: Path) -> None:
    expect_error(write(tmp_path, rope_scaling=scaling), "config.json", "rope_scaling", field)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["chunked_attention"] * 4},
        {"layer_types": ["sliding_attention"] * 4},
        {"use_sliding_window": True, "sliding_window": 0},
        {"use_sliding_window": True, "max_window_layers": -1},
        {"use_sliding_window": 1},
    ],
)
def test_wrong_sliding_windows_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    expect_error(
        write(tmp_path, "Qwen2ForCausalLM", **fields),
        next(iter(fields.keys() - {"use_sliding_window"}), "use_"),
    )


def test_layer_types_choose_the_layers_with_a_window(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    fields = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 9}
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        config, _ = read(write(tmp_path, architecture, **fields))
        assert config.sliding_windows == (9, None, None, 9)


def test_an_unknown_architecture_is_refused_with_the_known_and_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, "Qwen3NextForCausalLM")
    expect_error(path, "'Qwen3NextForCausalLM'", *FAMILIES, "nearest name is Qwen3ForCausalLM")
    expect_error(write(tmp_path, "BertModel"), "'BertModel'", "nearest")


def test_a_folder_in_place_of_a_file_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{tmp_path} cannot be read: Is a directory$"):
        JsonFields.from_file(tmp_path)


SPEECH = {"decoder_start_token_id": 1, "no_timestamps_token_id": 9, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eos_token_id": [2.5]}, r"eos_token_id must be a list of token ids, got \[2.5\]"),
        ({"max_length": [448]}, r"max_length must be a whole number of at least 1, got \[448\]"),
        ({"suppress_tokens": 5}, "suppress_tokens must be a list of token ids, got 5"),
        ({"begin_suppress_tokens": [-1]}, r"begin_suppress_tokens must be a list of token ids, got \[-1\]"),
        ({"lang_to_id": [3]}, r"lang_to_id must be an object, got \[3\]"),
        ({"task_to_id": {"transcribe": [4]}}, r"task_to_id: transcribe must be a token id, got \[4\]"),
        ({"prev_sot_token_id": True}, "prev_sot_token_id must be a token id, got True"),
    ],
    ids=str,
)
def test_rules_of_speech_of_another_type_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(SPEECH | {"lang_to_id": {"<|en|>": 3}, "suppress_tokens": [7]}))
    rules = read_speech_rules(tmp_path, 50)
    assert rules is not None
    assert (rules.most_tokens, rules.languages, rules.suppressed) == (50, {"en": 3}, (7,))
    for ends, expected in (([2], 2), (2, 2), ([2, 5], None), ([], None)):
        path.write_text(json.dumps(SPEECH | {"eos_token_id": ends}))
        rules = read_speech_rules(tmp_path, 50)
        assert (rules and rules.eos) == expected
    path.write_text(json.dumps(SPEECH | fields))
    with pytest.raises(ValueError, match=message):
        read_speech_rules(tmp_path, 50)
