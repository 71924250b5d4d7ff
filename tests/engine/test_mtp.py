"""MTP layers of checkpoints: their drafts are those that the whole sequence gives, and change no token."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_engines import ENGINE, PENALISED, SAMPLING, VOCAB, generate, generate_each, record_drafts
from mtp_layers import (
    DEEPSEEK,
    ERNIE,
    FILE,
    GLM,
    GLM_LITE,
    HY,
    MELLUM,
    MIMO,
    QWEN3,
    QWEN_NEXT,
    QWEN_VISION,
    MtpCase,
    Written,
    add_mtp_layer,
    make_exact,
    write_mtp_checkpoint,
    write_quantised_mtp,
)
from quantised_checkpoints import LAYOUTS, write_quantised
from safetensors.torch import load_file, save_file
from scripted_drafts import AnyLength

from compiled_engine.engine.executor import InProcessExecutor
from compiled_engine.features import registry
from compiled_engine.features.speculation.draft_head import DraftHead
from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.mtp_layer import mtp_tensors
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.group import FakeGroup
from compiled_engine.process.progress import Progress
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.sampling.ranks import VocabularySlice

pytestmark = pytest.mark.usefixtures("one_thread")
OF_ATTENTION = {"ernie": ERNIE, "mimo": MIMO, "glm": GLM, "hy": HY, "mellum": MELLUM}
LATENT = {"deepseek": DEEPSEEK, "glm_lite": GLM_LITE}
HYBRIDS = {"qwen3_next": QWEN_NEXT, "qwen3_5": QWEN_VISION}


def one_layer(case: MtpCase) -> MtpCase:
    """The case with a model of one layer, which has fewer pieces to compile."""
    return replace(case, family=replace(case.family, changes={**case.family.changes, "num_hidden_layers": 1}))


CASES = OF_ATTENTION | LATENT | HYBRIDS | {"ernie of one layer": one_layer(ERNIE)}
OF_TEXTBOOK = pytest.mark.parametrize("written", ["mimo"], indirect=True)


def mtp(num_drafts: int = 3, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": num_drafts, **more}}


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_mtp_checkpoint(tmp_path_factory.mktemp(request.param), CASES[request.param])


@pytest.fixture(scope="module")
def plain(written: Written) -> Iterator[LLM]:
    """The model without drafts, which does not read the MTP layer."""
    with LLM(model=str(written.folder), mode="eager", **ENGINE) as llm:
        yield llm


def test_transformers_own_mtp_layer_is_the_same(tmp_path: Path) -> None:
    """The layer that tests compare with, and the names of its tensors."""
    modeling_layers = importlib.import_module("transformers.modeling_layers")
    if not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"):
        pytest.skip("this version of transformers runs no MTP layer alone")
    written = write_mtp_checkpoint(tmp_path, GLM)
    written.model._keys_to_ignore_on_load_unexpected = [rf"{re.escape(GLM.prefix)}.*"]
    layer = modeling_layers.MtpModel.from_pretrained(written.model).eval()
    token_ids = [(5 * i * i + 3) % VOCAB for i in range(20)]
    hidden = torch.randn(1, len(token_ids), written.single.config.hidden_size)
    given = hidden, torch.arange(len(token_ids))[None], None, torch.tensor([token_ids])
    with torch.no_grad():
        theirs = layer.forward_layer(0, *given)[0]
        ours = written.layer(token_ids, hidden[0])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("written", OF_ATTENTION | LATENT, indirect=True)
def test_drafts_are_those_of_the_whole_sequence(written: Written, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft after chunks of prompts, cached prefixes, preemptions and accepted drafts."""
    seen = record_drafts(monkeypatch)
    with LLM(model=str(written.folder), mode="eager", **ENGINE, **mtp()) as llm:
        assert generate(llm, temperature=0) == generate(plain, temperature=0)
        metrics = llm.metrics()
    assert metrics["preemptions"] > 0
    assert metrics["prefix_hits"] > 0
    assert len(seen) > 50
    for known, drafts in list(seen.items())[::8]:
        assert written.drafts(list(known), len(drafts)) == drafts


@pytest.mark.parametrize("written", ["glm_lite"], indirect=True)
def test_drafts_change_no_token_of_a_model_with_latent_rows_of_8_bits(written: Written) -> None:
    with LLM(model=str(written.folder), mode="eager", kv_cache_dtype="fp8", **ENGINE) as llm:
        expected = generate(llm, temperature=0)
    with LLM(model=str(written.folder), mode="eager", kv_cache_dtype="fp8", **ENGINE, **mtp()) as llm:
        assert generate(llm, temperature=0) == expected
        metrics = llm.metrics()
    assert metrics["preemptions"] > 0
    assert metrics["prefix_hits"] > 0
    assert metrics["draft_tokens"] > 0


@pytest.mark.parametrize("written", ["ernie of one layer"], indirect=True)
def test_compiled_drafts_are_those_of_the_whole_sequence(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer reads hidden states before the model's last norm."""
    seen = record_drafts(monkeypatch)
    with LLM(model=str(written.folder), mode="compiled", compile_ranges=(), **ENGINE, **mtp()) as llm:
        generate(llm, temperature=0)
    assert len(seen) > 50
    for known, drafts in list(seen.items())[::8]:
        assert written.drafts(list(known), len(drafts)) == drafts


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("written", HYBRIDS, indirect=True)
def test_drafts_for_recurrences_are_those_of_the_whole_sequence(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft after prefixes whose states come from snapshots, and the layer's keys from blocks."""
    more = {"max_model_len": 160, "num_blocks": 64, "num_state_snapshots": 4, "enable_prefix_caching": True}
    given = {"model": str(written.folder), "mode": "eager", **ENGINE, **more}
    with LLM(**given) as llm:
        expected = [generate(llm, 66, temperature=temperature) for temperature in (0, 1.1)]
    with LLM(**given, async_scheduling=True, **mtp()) as llm:
        assert generate(llm, 66, temperature=1.1) == expected[1]
    seen = record_drafts(monkeypatch)
    with LLM(**given, **mtp()) as llm:
        for _ in range(2):
            assert generate(llm, 66, temperature=0) == expected[0]
        metrics = llm.metrics()
    assert metrics["preemptions"] > 0
    assert metrics["prefix_hits"] > 0
    assert len(seen) > 50
    for known, drafts in list(seen.items())[::8]:
        assert written.drafts(list(known), len(drafts)) == drafts


def copies_of(folder: Path) -> dict[str, torch.Tensor]:
    """The embedding and the output projection that layers of GLM's family have beside the model's."""
    tensors = load_file(folder / FILE)
    return {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "shared_head.head.weight": tensors["lm_head.weight"],
    }


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_layer_with_an_embedding_or_output_projection_of_its_own_is_refused(name: str, tmp_path: Path) -> None:
    written = write_mtp_checkpoint(tmp_path, GLM)
    copies = copies_of(tmp_path)
    add_mtp_layer(tmp_path, GLM, written.tensors | copies | {name: torch.randn_like(copies[name])})
    message = rf"{GLM.prefix}{name} of the MTP layer differs from the model's; allowed: a layer that shares"
    with pytest.raises(ValueError, match=message):
        resolve(EngineOptions(model=str(tmp_path), device="cpu", **mtp()))


def test_a_quantised_output_projection_is_refused(tmp_path: Path) -> None:
    written = write_mtp_checkpoint(tmp_path / "plain", GLM)
    folder = tmp_path / "quantised"
    layout = LAYOUTS["compressed-tensors, channel, weights alone"]
    write_quantised(written.folder, folder, layout, [], round_inputs=False)
    with pytest.raises(ValueError, match=r"'mtp': the output projection of .* is quantised \(e4m3 1x\*\); allowed: "):
        resolve(EngineOptions(model=str(folder), device="cpu", **mtp()))


def test_the_first_of_several_layers_makes_all_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the further layers nor copies of the model's tensors are read, and the configuration says so."""
    written = write_mtp_checkpoint(tmp_path, GLM)
    add_mtp_layer(tmp_path, GLM, written.tensors | copies_of(tmp_path))
    further = replace(GLM, prefix="model.layers.4.")
    add_mtp_layer(tmp_path, further, {name: torch.randn_like(each) for name, each in written.tensors.items()})
    seen = record_drafts(monkeypatch)
    with LLM(model=str(tmp_path), mode="eager", **ENGINE, **mtp()) as llm:
        assert llm.config.reasons["speculation.method"] == "the first of 2 MTP layers makes all drafts"
        generate(llm, temperature=0)
    assert len(seen) > 50
    for known, drafts in list(seen.items())[::8]:
        assert written.drafts(list(known), len(drafts)) == drafts


@pytest.mark.parametrize("case", [MIMO, GLM, ERNIE, QWEN3], ids=["mimo", "glm", "ernie", "qwen3"])
def test_layers_are_counted_in_each_spelling(case: MtpCase, tmp_path: Path) -> None:
    """Of several layers, the tensors of the first one are read."""
    written = write_mtp_checkpoint(tmp_path, case)
    tensors, stored = load_file(tmp_path / FILE), {case.stored(name) for name in written.tensors}
    options = EngineOptions(model=str(tmp_path), device="cpu", **mtp())
    config = resolve(options)
    assert config.speculation.draft is not None
    assert "speculation.method" not in config.reasons
    layer = config.speculation.draft.model
    own = mtp_tensors(tensors, layer)
    further = {re.sub(r"\.\d+\.", f".{number}.", name, count=1) for name in stored for number in (9, 10)} - stored
    save_file(tensors | {name: torch.zeros(1) for name in further}, tmp_path / FILE, metadata={"format": "pt"})
    assert resolve(options).reasons["speculation.method"] == "the first of 3 MTP layers makes all drafts"
    again = mtp_tensors(load_file(tmp_path / FILE), layer)
    assert own.keys() == again.keys()
    assert all(torch.equal(own[name], again[name]) for name in own if not own[name].is_meta)


QUANTISED = ("compressed-tensors, channel, weights alone", "compressed-tensors, int8, channel and token", "fp8, block")
QUANTISED += ("compressed-tensors, groups",)


@pytest.mark.product(one_in=1000, each=("layer",))
@pytest.mark.parametrize("layer", [False, True], ids=["model", "model and layer"])
@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("name", ["glm", "deepseek", "qwen3_next", "qwen3_5"])
def test_a_quantised_checkpoint_has_a_layer_in_16_bits_or_in_codes(
    name: str, form: str, layer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patterns of what is not quantised name the model's layers alone."""
    written = write_mtp_checkpoint(tmp_path / "plain", CASES[name])
    written = write_quantised_mtp(written, tmp_path / "quantised", form, layer=layer)
    seen = record_drafts(monkeypatch)
    with LLM(model=str(written.folder), mode="eager", **ENGINE, **mtp()) as llm:
        generate(llm, temperature=0)
    assert len(seen) > 50
    for known, drafts in list(seen.items())[::8]:
        assert written.drafts(list(known), len(drafts)) == drafts


@OF_TEXTBOOK
def test_drafts_change_no_token(written: Written, plain: LLM) -> None:
    """Two ranks that verify wrong drafts are in test_eagle.py, and ranks with an MTP layer below."""
    several = [*SAMPLING, PENALISED, {"temperature": 0.8, "n": 2}, {"temperature": 0, "stop_token_ids": [7, 60, 90]}]
    several.append({"temperature": 0, "prompt_logprobs": 1})
    with LLM(model=str(written.folder), mode="eager", **ENGINE, **mtp()) as llm:
        for samplings in (several, several[4:] + several[:4]):
            assert generate_each(llm, samplings) == generate_each(plain, samplings)
        metrics = llm.metrics()
    assert metrics["draft_tokens"] > metrics["accepted_tokens"]
    assert metrics["kv_usage"] == 0


@OF_TEXTBOOK
def test_a_layer_at_rest_changes_no_token(written: Written, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DraftLength", AnyLength)
    options = mtp(enable_adaptive_verification=True)
    with LLM(model=str(written.folder), mode="eager", async_scheduling=True, **ENGINE, **options) as llm:
        for sampling in ({"temperature": 0}, {"temperature": 0.9}):
            assert generate(llm, **sampling) == generate(plain, **sampling)
        metrics = llm.metrics()
    assert metrics["rested"] > 0
    assert metrics["draft_tokens"] > 0


# ERNIE compiled above, and two ranks of the textbook are those that run always.
OTHERS = pytest.mark.shown_by(
    "engine/test_mtp.py::test_compiled_drafts_are_those_of_the_whole_sequence",
    "engine/test_mtp.py::test_drafts_for_recurrences_are_those_of_the_whole_sequence",
    "engine/test_recurrent_drafts.py::test_ranks_divide_states_with_drafts",
)
DIVIDED = [replace(case, family=case.family.to_divide()) for case in (MIMO, QWEN_VISION)]
TIED = [
    replace(case, family=replace(case.family, changes={**case.family.changes, "tie_word_embeddings": True}))
    for case in (MIMO, GLM)
]


@pytest.mark.parametrize(
    ("case", "mode", "ranks"),
    [
        pytest.param(MIMO, "eager", 1, id="mimo"),
        pytest.param(TIED[0], "eager", 1, id="tied mimo"),
        pytest.param(TIED[1], "eager", 1, id="tied glm"),
        pytest.param(DIVIDED[0], "eager", 2, id="mimo on two ranks"),
        pytest.param(DIVIDED[1], "eager", 2, id="qwen3_5 on two ranks", marks=OTHERS),
        pytest.param(one_layer(MIMO), "auto", 1, id="compiled mimo", marks=OTHERS),
        pytest.param(QWEN_NEXT, "auto", 1, id="compiled qwen3_next", marks=OTHERS),
        pytest.param(TIED[0], "auto", 1, id="compiled tied mimo", marks=OTHERS),
        pytest.param(DIVIDED[0], "auto", 2, id="compiled mimo on two ranks", marks=OTHERS),
    ],
)
def test_an_exact_layer_is_always_right(case: MtpCase, mode: str, ranks: int, tmp_path: Path) -> None:
    """Compiled too, where forwards of few tokens return logits beside hidden states; and with a divided vocabulary."""
    written = write_mtp_checkpoint(tmp_path, case)
    make_exact(written)
    # With another sharpness the noise decides otherwise.
    options = {"mode": mode, "tensor_parallel_size": ranks, **ENGINE}
    with LLM(model=str(tmp_path), **options, **mtp(5, draft_sharpness=1)) as llm:
        num_tokens = sum(len(tokens) for temperature in (0, 1.1) for tokens in generate(llm, temperature=temperature))
        metrics = llm.metrics()
    assert metrics["draft_tokens"] == metrics["accepted_tokens"] > 0.6 * num_tokens


# A layer beside a tower; towers are updated there.
BESIDE_A_TOWER = pytest.mark.shown_by(
    "engine/test_mtp.py::test_an_update_of_the_weights_has_those_of_the_layer",
    "features/images/test_tower_updates.py::test_the_tower_is_updated_with_the_text_model",
)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(MIMO, id="mimo"),
        pytest.param(GLM, id="glm"),
        pytest.param(QWEN_VISION, id="qwen3_5", marks=BESIDE_A_TOWER),
    ],
)
def test_an_update_of_the_weights_has_those_of_the_layer(
    case: MtpCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards drafts are those of an engine with the new checkpoint; without the layer's tensors it stays."""
    old, new = tmp_path / "old", tmp_path / "new"
    write_mtp_checkpoint(old, case)
    shutil.copytree(old, new)
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: tensor * (1 + 0.5 * torch.rand(tensor.shape, generator=generator))
        for name, tensor in load_file(old / FILE).items()
    }
    save_file(tensors, new / FILE, metadata={"format": "pt"})
    options = {"mode": "eager", **ENGINE, **mtp()}
    seen, found = record_drafts(monkeypatch), list[tuple[list[list[int]], dict[tuple[int, ...], list[int]]]]()

    def draft(llm: LLM) -> None:
        seen.clear()
        found.append((generate(llm, temperature=0), dict(seen)))

    with LLM(model=str(new), **options) as llm:
        draft(llm)
    with LLM(model=str(old), **options) as llm:
        llm.update_weights({name: tensor for name, tensor in tensors.items() if not name.startswith(case.prefix)})
        draft(llm)
        llm.update_weights(tensors)
        draft(llm)
    (tokens, drafts), (tokens_between, drafts_between), updated = found
    assert updated == (tokens, drafts)
    assert tokens_between == tokens
    assert drafts_between != drafts
    assert len(drafts) > 50


def test_zeros_in_the_weight_of_the_models_last_norm_make_no_draft_wrong(tmp_path: Path) -> None:
    """ERNIE's layer reads hidden states before this norm, which are computed from those after it."""
    written = write_mtp_checkpoint(tmp_path, ERNIE)
    make_exact(written)
    tensors = load_file(tmp_path / FILE)
    tensors["model.norm.weight"][::7] = 0
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with LLM(model=str(tmp_path), mode="eager", **ENGINE, **mtp(draft_sharpness=1)) as llm:
        generate(llm, temperature=0)
        metrics = llm.metrics()
    assert metrics["draft_tokens"] == metrics["accepted_tokens"] > 50


class AbsentRanks(FakeGroup):
    """A group whose other ranks do not take part."""

    def gather_columns(self, x_TV: torch.Tensor) -> torch.Tensor:
        raise AssertionError("waits for the other rank")


def test_a_dry_run_of_one_rank_waits_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled by one rank of several, which divide the vocabulary."""
    write_mtp_checkpoint(tmp_path, MIMO)
    heads = list[DraftHead]()
    start_up = DraftHead.start_up

    def record(self: DraftHead, progress: Progress) -> int:
        heads.append(self)
        return start_up(self, progress)

    monkeypatch.setattr(DraftHead, "start_up", record)
    with LLM(model=str(tmp_path), mode="eager", **ENGINE, **mtp()) as llm:
        executor = llm.core.executor
        assert isinstance(executor, InProcessExecutor)
        executor.runner.sampler.vocabulary = VocabularySlice.of(VOCAB, AbsentRanks(2))
        (head,) = heads
        head.launch_inputs(alone=True)
        with pytest.raises(AssertionError, match="waits for the other rank"):
            head.launch_inputs(alone=False)


def test_a_layer_with_random_weights_runs(tmp_path: Path) -> None:
    write_mtp_checkpoint(tmp_path, MIMO)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    with LLM(model=str(tmp_path), mode="eager", load_format="dummy", **ENGINE, **mtp()) as llm:
        generate(llm, temperature=0)
        assert llm.metrics()["draft_tokens"] > 0


@pytest.mark.parametrize("method", ["mimo_mtp", "deepseek_mtp"])
def test_older_names_of_the_method_may_name_the_model_too(method: str, tmp_path: Path) -> None:
    write_mtp_checkpoint(tmp_path, MIMO)
    options = mtp(1, model=f"{tmp_path}/")
    options["speculative_config"]["method"] = method
    with LLM(model=str(tmp_path), mode="eager", **ENGINE, **options) as llm:
        generate(llm, temperature=0)
        assert llm.metrics()["draft_tokens"] > 0


def test_a_layer_that_cannot_be_read_is_an_error_in_one_line(tmp_path: Path) -> None:
    written = write_mtp_checkpoint(tmp_path, MIMO)
    tensors = load_file(tmp_path / FILE)
    in_codes = tensors | {f"{MIMO.prefix}mlp.up_proj.weight": torch.zeros(96, 64, dtype=torch.int8)}
    without = {name: each for name, each in tensors.items() if not name.startswith(MIMO.prefix)}
    changed = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Qwen2ForCausalLM"]}
    for stored, config, message in (
        (without, None, "has no MTP layer: the tensor hidden_layernorm.weight is missing; allowed: "),
        (
            in_codes,
            None,
            "the MTP layer is stored as int8, and config.json does not say how; allowed: a layer in 16 ",
        ),
        (
            without,
            changed,
            "no MTP layer of Qwen2ForCausalLM is known; allowed: models of DeepseekV3ForCausalLM, Ernie4_5_Moe",
        ),
    ):
        save_file(stored, tmp_path / FILE, metadata={"format": "pt"})
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message) as error:
            LLM(model=str(tmp_path), mode="eager", **ENGINE, **mtp())
        assert str(error.value).startswith("speculative_config['method'] is 'mtp': ")
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"'model'.* is 'a', but 'method' is 'mtp'; allowed with it: 'draft_model'"):
        LLM(model=str(written.folder), mode="eager", **ENGINE, **mtp(model="a"))


def test_the_bundled_layer_drafts_what_the_bundled_model_generates() -> None:
    """It is read from a file of its own, which transformers does not read."""
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    options = {"device": "cpu", "mode": "eager", "max_model_len": 256, "progress": False}
    found = []
    for drafts in ({}, mtp(num_speculative_tokens=4)):
        with LLM(**options, **drafts) as llm:
            outputs = llm.generate(["def __init__(self,", "class TestCase"], params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            metrics = llm.metrics()
    assert found[0] == found[1]
    assert metrics["accepted_tokens"] > 1.5 * metrics["drafted_requests"]
