"""quantization_ignore: each entry matches a linear, which is checked before any weight is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from compiled_engine.other_engines.translate import make_options
from compiled_engine.resolve.engine import resolve


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights."""
    folder = tmp_path_factory.mktemp("folders")
    for family in ("llama", "qwen3_moe"):
        make_checkpoint(folder / family, family)
        (folder / family / "model.safetensors").unlink()
    return folder


def ignoring(folder: Path, *targets: str, model_impl: str = "auto") -> tuple[str, ...]:
    options = make_options(
        {
            "model": folder,
            "device": "cpu",
            "load_format": "dummy",
            "model_impl": model_impl,
            "quantization": "fp8",
            "quantization_ignore": targets,
        }
    )
    quantisation = resolve(options).model.quantisation
    assert quantisation is not None
    return quantisation.ignore


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("target", "instead"),
    [
        ("lm_hed", "did you mean 'lm_head'?"),
        ("model.layers.1.mlp.down_prj", "did you mean 'model.layers.1.mlp.down_proj'?"),
        ("down_proj", r"did you mean 're:.*\\.down_proj$'?"),
        ("re:.*dwn_proj", "model.layers.0.self_attn.k_proj, "),
        ("re:down_proj", "it has model."),
    ],
)
def test_what_matches_no_linear_is_refused(folders: Path, target: str, instead: str, model_impl: str) -> None:
    message = f"quantization_ignore has {target!r}, which matches no linear of the model; "
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        ignoring(folders / "llama", "lm_head", target, model_impl=model_impl)
    assert instead in str(caught.value)


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("llama", "model.layers.1.mlp.down_proj"),
        ("llama", "re:.*down_proj"),
        ("llama", "Linear"),
        ("llama", "lm_head"),
        ("qwen3_moe", r"re:.*\.experts\..*"),
        ("qwen3_moe", r"re:.*\.gate$"),
    ],
)
def test_what_matches_one_is_taken(folders: Path, family: str, target: str, model_impl: str) -> None:
    assert ignoring(folders / family, target, model_impl=model_impl)[0] == target


def test_one_expert_may_be_named(folders: Path) -> None:
    target = "model.layers.0.mlp.experts.1.up_proj"
    assert ignoring(folders / "qwen3_moe", target)[0] == target
    with pytest.raises(ValueError, match=r"experts\.9999\.up_proj', which matches no linear"):
        ignoring(folders / "qwen3_moe", "model.layers.0.mlp.experts.9999.up_proj")


def test_the_head_of_a_model_that_pools_may_be_named() -> None:
    options = {"runner": "pooling", "device": "cpu", "quantization": "fp8", "quantization_ignore": ("lm_head",)}
    assert resolve(make_options(options)).model.quantisation is not None
