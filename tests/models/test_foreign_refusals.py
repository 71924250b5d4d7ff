"""Every causal language model of transformers is accepted and compared, or refused in one line that names the cause."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import transformers
from families import FAMILIES, TINY, WRAPPERS
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.models.foreign.mechanisms import missing_mechanisms

KNOWN = {case.name: case.config() for case in FAMILIES}
# Of multimodal types transformers' causal language model may be the text model, which has a type of its own.
KNOWN |= {case.name: case.config() for case in WRAPPERS if case.name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
_INDEX = {"n_heads": 2, "kv_heads": 1, "head_dim": 32, "budget": 8, "compress_ratio": 4}
_INDEXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_INDEXED |= {f"indexer_{name}": value for name, value in _INDEX.items()}
# Values of types that TINY is not enough for.
VALUES: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2}, "ffn_config": {"moe_num_experts": 6}},
    "gemma4_assistant": {"text_config": TINY | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "attn_layers": ["lsh", "local", "lsh"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "qwen4_exp": {"text_config": TINY | _INDEXED},
    "qwen4_exp_text": _INDEXED,
}
MODELS = Path(__file__).parents[2] / "docs" / "models.md"
STATED = re.compile(r"(\d+) of the (\d+) types of version ([\d.]+\d) are\s+accepted")
CAUSES = (
    r"it needs .*, which the engine does not have",
    r"its layers .*do not attend through transformers' AttentionInterface",
    r"its attention does not go through transformers' AttentionInterface",
    r"its layers have recurrences alone; at least one must attend",
    r"its mask is neither causal nor causal with a sliding window",
    r"its head calls the decoder in an unsupported way",
    r"its rotary angles depend on a request's length",
    r"the experts have .*; allowed: act\(gate\) \* up, and GPT-OSS's gate",
    r"it is multimodal, and not among the models whose text model runs alone",
    r"transformers has no causal language model for its text model alone",
)


def outcome(kind: str, values: dict[str, Any], folder: Path) -> str:
    """Return "accepted", or the refusal."""
    names = {"model_type": kind, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}
    (folder / "config.json").write_text(json.dumps(values | names))
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": None, "load_format": "dummy", "seed": 0}
    try:
        read_model_config(folder, **options, device_type="cpu", model_impl="transformers")
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.usefixtures("one_thread")
def test_every_type_is_accepted_and_compared_or_refused_by_its_mechanism(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Without --all an eighth of them, which --seed chooses. With it, they are as many as docs/models.md states."""
    told_accepted, told_all, version = STATED.search(MODELS.read_text()).groups()  # type: ignore[union-attr]
    every, seed = pytestconfig.getoption("--all"), pytestconfig.getoption("--seed")
    found: dict[str, str] = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if not every and zlib.crc32(f"{seed} {kind}".encode()) % 8:
            continue
        bare = {name: value for name, value in TINY.items() if name not in ("head_dim", "num_key_value_heads")}
        tries = [KNOWN[kind]] if kind in KNOWN else [each | VALUES.get(kind, {}) for each in (TINY, bare, {})]
        for values in tries:
            found[kind] = outcome(kind, values, tmp_path)
            if found[kind] == "accepted" or any(re.search(cause, found[kind]) for cause in CAUSES):
                break
    refused = {kind: text for kind, text in found.items() if text != "accepted"}
    unclear = {
        kind: text
        for kind, text in refused.items()
        if "\n" in text or not any(re.search(cause, text) for cause in CAUSES)
    }
    assert not unclear
    # Nothing is accepted that compare_families.py does not compare, and nothing that it compares is refused.
    assert found.keys() - refused.keys() == KNOWN.keys() & found.keys()
    accepted = len(found) - len(refused)
    if not every:
        assert accepted >= 10
    elif transformers.__version__.startswith(f"{version}."):
        assert (accepted, len(found)) == (int(told_accepted), int(told_all))
    else:  # another version has other types
        assert accepted > 100


@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [
        ("mamba", "the scan of Mamba 1, which has a state for each channel"),
        ("jamba", "the scan of Mamba 1, which has a state for each channel"),
        ("zamba2", "blocks of attention that several layers share"),
        ("llama4", "chunked attention"),
        ("deepseek_v32", "sparse attention by an index"),
        ("musicgen", "an encoder"),
        ("xmod", "adapters for each language"),
        ("minimax", "lightning attention"),
        ("qwen4_exp_text", "sparse attention by an index"),
        ("diffllama", "differential attention"),
        ("hrm_text", "layers that run several times"),
        ("doge", r"masks that depend on values \(dynamic mask attention\)"),
        ("inkling_text", "biases of attention scores by relative positions"),
        ("longcat_flash", "experts outside of transformers' ExpertsInterface, layers that attend twice"),
        ("dbrx", "experts outside of transformers' ExpertsInterface"),
        ("phi4_multimodal", "encoders of images or sound within the decoder"),
    ],
)
def test_a_refusal_names_the_mechanism(kind: str, mechanism: str, tmp_path: Path) -> None:
    assert re.search(rf"it needs .*{mechanism}", outcome(kind, TINY | VALUES.get(kind, {}), tmp_path))


class ThingAssistantConfig(PreTrainedConfig):
    """Configuration of a model that drafts with another model's keys and values."""


@pytest.mark.parametrize(
    ("stated", "mechanism"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked attention"),
        ({"n_recurrent_loops": 2}, "layers that run several times"),
        ({"H_cycles": 2}, "layers that run several times"),
        ({"L_cycles": 2}, "layers that run several times"),
        ({"num_kv_shared_layers": 2, "num_hidden_layers": 2}, "the keys and values of another model"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"encoder_layers": 2}, "an encoder"),
        ({"vision_config": {"hidden_size": 8}}, "encoders of images or sound within the decoder"),
        ({"audio_config": {"hidden_size": 8}}, "encoders of images or sound within the decoder"),
    ],
    ids=str,
)
def test_a_mechanism_that_a_config_states_is_named_without_the_model(stated: dict[str, Any], mechanism: str) -> None:
    """A single field suffices."""
    assert missing_mechanisms(PreTrainedConfig(**stated), None) == (mechanism,)


@pytest.mark.parametrize("field", ["n_recurrent_loops", "H_cycles", "L_cycles"])
def test_layers_that_run_once_are_no_mechanism(field: str) -> None:
    stated: dict[str, Any] = {field: 1}
    assert missing_mechanisms(PreTrainedConfig(**stated), None) == ()


def test_an_assistant_reads_the_keys_and_values_of_another_model() -> None:
    assert missing_mechanisms(ThingAssistantConfig(), None) == ("the keys and values of another model",)
