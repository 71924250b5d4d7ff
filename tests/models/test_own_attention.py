"""Families whose modules compute attention or count positions themselves give the results of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Family, family, write_checkpoint
from family_comparison import TOLERANCE, difference_after_passes, difference_of, fused_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from compiled_engine.llm import LLM
from compiled_engine.models.foreign.alibi import LONGEST, Alibi, fill_slopes
from compiled_engine.models.foreign.interfaces import Step
from compiled_engine.models.foreign.observation import UnsupportedModelError
from compiled_engine.models.foreign.transformers_model import build_foreign_model
from compiled_engine.other_engines.translate import make_options
from compiled_engine.resolve.engine import resolve

# One family of each mechanism: biases by positions and an own computation; a window of the module's own; positions
# that transformers counts from its cache; positions that begin after the padding's.
OF_EACH_MECHANISM = ("bloom", "gpt_neo", "bart", "roberta")
OTHERS = (
    "gpt_neox_japanese",
    "openai-gpt",
    "megatron-bert",
    "rembert",
    "roformer",
    "big_bird",
    "xglm",
    "falcon",
    "mpt",
)
OTHERS += (
    "mimo_v2_flash",
    "mllama",
    "gemma3n_text",
    "blenderbot",
    "marian",
    "mvp",
    "trocr",
    "whisper",
    "data2vec-text",
)


@pytest.fixture(scope="module", params=OF_EACH_MECHANISM)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A family's folder, and its model in transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_checkpoint(folder, family(request.param))


@pytest.mark.product(one_in=2)
@pytest.mark.usefixtures("one_thread")
def test_chunks_decodes_and_cached_prefixes_give_the_tokens_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    difference = difference_of(*checkpoint, {"mode": "eager", "device": "cpu"})
    assert difference.is_right(torch.float32), difference
    assert difference.tokens_equal


@pytest.mark.product(one_in=16)
@pytest.mark.usefixtures("one_thread")
def test_graphs_after_all_passes_are_right(checkpoint: tuple[Path, Any]) -> None:
    folder, oracle = checkpoint
    difference = difference_after_passes(fused_model(folder, {"device": "cpu"}), oracle)
    assert difference.is_right(torch.float32), difference


@pytest.mark.product(one_in=18)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_of_these_mechanisms_are_right(name: str, tmp_path: Path) -> None:
    difference = difference_of(tmp_path, write_checkpoint(tmp_path, family(name)), {"mode": "eager", "device": "cpu"})
    assert difference.is_right(torch.float32), difference
    assert difference.tokens_equal


def heads_of_their_own(*, multi_query: bool) -> Family:
    changes = {"alibi": True, "multi_query": multi_query, "num_attention_heads": 6, "hidden_size": 96}
    return replace(family("falcon"), changes=changes)


@pytest.mark.usefixtures("one_thread")
def test_falcons_biases_are_rounded_as_in_transformers(tmp_path: Path) -> None:
    """The reference is transformers' default; its eager attention adds the biases twice."""
    write_checkpoint(tmp_path, heads_of_their_own(multi_query=False))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        difference = difference_of(tmp_path, oracle, {"mode": "eager", "device": "cpu"})
    assert difference.largest <= TOLERANCE


def test_biases_of_heads_that_share_a_key_are_refused(tmp_path: Path) -> None:
    values = heads_of_their_own(multi_query=True).config() | {"architectures": ["FalconForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match=r"biases of scores \(ALiBi\) differ in heads that share keys"):
        build_foreign_model(json.dumps(values | {"model_type": "falcon"}), torch.float32)


def test_texts_are_no_longer_than_two_digits_can_count(tmp_path: Path) -> None:
    """Further positions would be rounded in 16 bits."""
    values = {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "seq_length": 2 * LONGEST}
    (tmp_path / "config.json").write_text(json.dumps(family("bloom").config() | values))
    options = {"model": tmp_path, "device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True}
    assert resolve(make_options(options)).model.max_model_len == LONGEST


class Biased(Alibi, nn.Module):
    """A module with biases of scores, as an attention module of transformers has them."""

    def __init__(self, num_heads: int, scale: float, head_dim: int) -> None:
        super().__init__()
        self.alibi_scale, self.head_dim = scale, head_dim
        self.hold_slopes(num_heads)


class Decoder(nn.Module):
    """A decoder of transformers with such a module; its biases are the slopes times a power of the position."""

    def __init__(
        self, slopes: list[float], scale: float, head_dim: int, power: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.attention, self.slopes, self.power = Biased(len(slopes), scale, head_dim), torch.tensor(slopes), power

    @property
    def base_model(self) -> Decoder:
        return self

    def build_alibi_tensor(self, mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        positions = mask.cumsum(-1)[0] - 1
        return (self.slopes[:, None, None] * positions**self.power).to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    slopes=st.lists(st.floats(2**-9, 0.95), min_size=1, max_size=3),
    positions=st.lists(st.integers(0, LONGEST - 1), min_size=1, max_size=4),
    head_dim=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_a_product_of_a_query_and_a_key_has_the_bias_of_the_keys_position(
    slopes: list[float], positions: list[int], head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    scale, generator = head_dim**-0.5, torch.Generator().manual_seed(seed)
    decoder = Decoder(slopes, scale, head_dim, dtype=dtype)
    fill_slopes(decoder)
    decoder.attention.step = Step(())
    decoder.attention.step.positions_T = torch.tensor(positions)
    shape = 1, len(slopes), len(positions), head_dim
    q, k = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    biased_q, biased_k = decoder.attention.with_positions(q, k)
    assert biased_q.dtype == biased_k.dtype == dtype
    assert biased_q.shape == biased_k.shape
    assert biased_q.shape[-1] % 8 == 0
    found = (biased_q.double() @ biased_k.double().mT - q.double() @ k.double().mT) * scale
    expected = torch.tensor(slopes).double()[:, None, None] * torch.tensor(positions).double()
    precision = {torch.float32: 2**-22, torch.bfloat16: 2**-15, torch.float16: 2**-19}[dtype]
    # The smallest parts of slopes in float16 are multiples of 2**-24, and a position has each of them.
    smallest = max(positions) * 2**-25 if dtype == torch.float16 else 0.0
    torch.testing.assert_close(found[0], expected.expand(found[0].shape), rtol=precision, atol=1e-4 + smallest)


def test_biases_that_are_not_linear_in_positions_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="biases of attention scores are not linear in positions"):
        fill_slopes(Decoder([0.5, 0.25], 0.5, 8, power=0.9))


def written(folder: Path, name: str, architecture: str) -> Path:
    values = family(name).config() | {"model_type": name, "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_positions_in_keys_are_not_rounded_to_8_bits(tmp_path: Path) -> None:
    folder = written(tmp_path, "mpt", "MptForCausalLM")
    options: dict[str, Any] = {"model": folder, "load_format": "dummy", "mode": "eager", "device": "cpu"}
    assert resolve(make_options(options)).model.linear_biases
    with pytest.raises(ValueError, match=r"kv_cache_dtype.*'int8'.*\(ALiBi\)"):
        resolve(make_options(options | {"kv_cache_dtype": "int8"}))


def test_prompts_with_padding_are_refused_where_it_has_no_position(tmp_path: Path) -> None:
    folder = written(tmp_path, "roberta", "RobertaForCausalLM")
    options: dict[str, Any] = {"load_format": "dummy", "mode": "eager", "device": "cpu", "skip_tokenizer_init": True}
    with LLM(folder, **options, num_blocks=16, progress=False) as llm:
        assert llm.config.model.max_model_len == family("roberta").config()["max_position_embeddings"] - 101
        with pytest.raises(ValueError, match="token 1 must be another one than 100, the model's padding"):
            llm.generate([{"prompt_token_ids": [5, 100, 6]}])
