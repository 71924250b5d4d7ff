"""The program that trains heads of the bundled model: its steps are those of drafting, and it learns and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from bundled_training import train_head
from bundled_training.head_methods import LAYERS, MTP_NAMES, Eagle3, HeadRecipe, Mtp, TrainedHead
from bundled_training.train_head import STATE, TrainingPasses, losses, main
from eagle_heads import Reference
from head_engines import record_drafts
from mtp_layers import QWEN3, Written
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from compiled_engine import LLM, SamplingParams
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH

pytestmark = pytest.mark.usefixtures("one_thread")
RECIPE = HeadRecipe(steps=3, batch_tokens=64, window=32, test_steps=3, draft_vocab=60, intermediate_size=32)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL_PATH, dtype=torch.float32).eval()


def sharpen(head: TrainedHead) -> None:
    """Let the random head decide clearly, with weights that are the same in bfloat16."""
    for parameter in head.trained.parameters():
        if parameter.ndim > 1:
            parameter.mul_(4.0)
        parameter.copy_(parameter.bfloat16())


@dataclass(frozen=True)
class Whole:
    """A head in plain torch, which computes whole sequences without a cache."""

    features: Callable[[list[int]], Tensor]
    layer: Callable[[list[int], Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]


def eagle3_reference(head: Eagle3) -> Whole:
    shape = head.shape
    config = {
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
    }
    reference = Reference(BUNDLED_MODEL_PATH, config, dict(head.model.named_parameters()))
    return Whole(reference.features, reference.layer, reference.logits)


def mtp_layer(head: Mtp, target: PreTrainedModel) -> Written:
    """The layer in transformers, as one layer of a model of the family."""
    config = target.config.__class__.from_dict(
        target.config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    )
    single = Qwen3ForCausalLM(config).eval()
    own = dict(head.model.named_parameters())
    loaded = single.load_state_dict(
        {name: each for name, each in own.items() if name.startswith("model.")}, strict=False
    )
    assert loaded.missing_keys in ([], ["lm_head.weight"])
    tensors = {
        name.replace(stem, theirs).removeprefix(QWEN3.prefix): each
        for name, each in own.items()
        for stem, theirs in MTP_NAMES.items()
        if stem.startswith("mtp.") and name.startswith(stem)
    }
    return Written(BUNDLED_MODEL_PATH, target, single, tensors, QWEN3)


def mtp_reference(head: Mtp, target: PreTrainedModel) -> Whole:
    def features(token_ids: list[int]) -> Tensor:
        return target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0]

    return Whole(features, mtp_layer(head, target).layer, target.get_output_embeddings())


@torch.no_grad()
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_the_steps_of_training_are_those_of_drafting(method: str, target: PreTrainedModel) -> None:
    head: Eagle3 | Mtp
    if method == "mtp":
        head = Mtp(RECIPE, target, torch.arange(0))
        sharpen(head)
        reference = mtp_reference(head, target)
    else:
        head = Eagle3(replace(RECIPE, seed=1), target, torch.arange(0, 120, 2))
        sharpen(head)
        reference = eagle3_reference(head)
    ids = torch.randint(4096, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    features = reference.features(ids[:-1])
    passes = TrainingPasses(head, torch.tensor([ids[1:]]), features[None])
    for number in range(4):
        logits = passes.step()[0]
        for position in (number, 7, 10):
            begin = position - number
            chain, hidden = features[: begin + 1], reference.layer(ids[1 : begin + 2], features[: begin + 1])
            for end in range(begin + 1, position + 1):
                chain = torch.cat((chain, hidden[-1:]))
                hidden = reference.layer(ids[1 : end + 2], chain)
            torch.testing.assert_close(logits[position], reference.logits(hidden[-1]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_engine_drafts_with_a_layer_that_was_saved(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Mtp(RECIPE, target, torch.arange(0))
    sharpen(head)
    head.save(tmp_path)
    options = train_head.engine_options("mtp", tmp_path, 3)
    seen, layer = record_drafts(monkeypatch), mtp_layer(head, target)
    with LLM(device="cpu", dtype="float32", mode="eager", max_model_len=96, progress=False, **options) as llm:
        llm.generate("class A:", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert len(seen) > 5
    for known, drafts in seen.items():
        assert layer.drafts(list(known), len(drafts)) == drafts


@pytest.mark.parametrize("method", [Eagle3, Mtp])
def test_agreement_counts_steps_whose_earlier_steps_agree(
    method: type[Eagle3] | type[Mtp], target: PreTrainedModel
) -> None:
    head = method(RECIPE, target, torch.arange(4096))
    ids = torch.randint(4096, (2, 33), generator=torch.Generator().manual_seed(0))
    found, agreed = losses(head, target, ids, 3)
    assert [loss.isfinite().item() for loss in found] == [True] * 3
    assert agreed[0] >= agreed[1] >= agreed[2]
    torch.stack(found).sum().backward()
    assert all(parameter.grad is not None for parameter in head.trained.parameters())
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("method", "ngram", "method must be one of eagle3, mtp, got 'ngram'"),
        ("steps", 0, "steps must be at least 1, got 0"),
        ("window", 4, r"window must be from test_steps \+ 2 to batch_tokens, got 4"),
    ],
)
def test_a_recipe_that_is_out_of_range_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RECIPE, **{field: value})


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run ends with the head of an uninterrupted one."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(60):
        text = f"def f_{number}(x):\n    return [x, {number}]\n\n\n"
        (corpus / f"part_{number}.py").write_text(text * (8 + number))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(RECIPE).items()]
    options += ["--device=cpu", f"--corpus={corpus}"]
    monkeypatch.setattr(train_head, "HELD_OUT_PROMPTS", 2)
    monkeypatch.setattr(train_head, "GENERATED", 8)
    monkeypatch.setattr(train_head, "SPEED_MODE", "eager")
    main([*options, f"--out={tmp_path / 'whole'}"])
    monkeypatch.setattr(train_head, "SAVE_SECONDS", 0.0)
    save, saved = torch.save, []

    def interrupted(state: dict[str, object], path: Path) -> None:
        save(state, path)
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([*options, f"--out={tmp_path / 'parts'}"])
    main([*options, f"--out={tmp_path / 'parts'}"])
    assert not (tmp_path / "parts" / STATE).exists()
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    record = json.loads((tmp_path / "parts" / "training.json").read_text())
    assert record["acceptance"]["0.8"]["length"] >= 1
    assert record["acceptance"]["0.8"]["sharpness"] in ("1", "1.5", "3", "greedy")
    assert record["cpu_tokens_per_second"].keys() == {"without", "with"}
    assert len(record["validation_agreement"]) == RECIPE.test_steps
