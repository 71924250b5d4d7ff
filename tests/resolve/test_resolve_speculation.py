"""speculative_config: what its keys come to, and one-line errors for what is impossible."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig, SpeculationConfig
from compiled_engine.features.speculation.draft_sharpness import GREEDY_DRAFTS
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.options import EngineOptions
from compiled_engine.pooling import EMBED, LAST, NORMALISE, Pooling
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve
from compiled_engine.resolve.speculation import resolve_speculation

SCHEDULER = SchedulerConfig(4, 16, 256, "fcfs")


def resolved(
    value: Any, device: str = "cpu", *, pools: bool = False, vocab_size: int = 4096, **options: Any
) -> SpeculationConfig:
    given = EngineOptions(speculative_config=value, **options)
    config = tiny_config(vocab_size=vocab_size)
    stages = (1,) * given.pipeline_parallel_size if given.pipeline_parallel_size > 1 else ()
    parallel = replace(config.parallel, tensor_parallel_size=given.tensor_parallel_size, stage_layers=stages)
    model = replace(config.model, pooling=Pooling(EMBED, LAST, (), NORMALISE) if pools else None)
    config = replace(config, model=model, scheduler=SCHEDULER, device=torch.device(device), parallel=parallel)
    return resolve_speculation(given, config, SilentProgress())


def of(**more: Any) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": 3, **more}


def synthetic(**more: Any) -> dict[str, Any]:
    return of(rejection_sample_method="synthetic", **more)


@pytest.mark.parametrize("value", [None, {}, "{}"])
def test_without_drafts(value: Any) -> None:
    assert resolved(value).num_tokens == 0


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (of(), (5, 5)),
        (of(prompt_lookup_max=3), (3, 3)),
        (of(prompt_lookup_min=2, prompt_lookup_max=None), (2, 2)),
        (of(prompt_lookup_min=2, prompt_lookup_max=4), (4, 2)),
        ('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 7}', (7, 7)),
    ],
)
def test_tokens_to_look_for(value: Any, bounds: tuple[int, int]) -> None:
    assert resolved(value) == SpeculationConfig("ngram", 3, *bounds)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "speculative_config is 3; allowed: a dict, or one as JSON"),
        ("[3]", "speculative_config is [3]; allowed: a dict, or one as JSON"),
        ("{", "speculative_config is '{'; allowed: a dict as JSON ("),
        (of(num_speculativ_tokens=3), "has no key 'num_speculativ_tokens'; did you mean 'num_speculative_tokens'?"),
        (of(wings=3), "has no key 'wings'; allowed: method, num_speculative_tokens, prompt_lookup_max"),
        (of(disable_by_batch_size=4), "['disable_by_batch_size'] is 4, which is not supported; give enable_adaptive"),
        (of(max_model_len=50), "['max_model_len'] is 50, which is not supported; leave it out (allowed: False, None)"),
        ({"method": "ngram"}, "speculative_config has no 'num_speculative_tokens', which it must have"),
        (
            {"num_speculative_tokens": 2},
            "no 'method', which it must have; got {'num_speculative_tokens': 2}; allowed: ngram, draft_model, eagle3",
        ),
        (
            of(method="eagle", moe_backend="triton"),
            "['method'] is 'eagle'; allowed: ngram, draft_model, eagle3, mtp, or no speculative_config, which",
        ),
        (of(method="draft_model"), "speculative_config has no 'model', which it must have"),
        (of(model="a"), "speculative_config['model'] is 'a', but 'method' is 'ngram'; allowed with it: 'draft_model'"),
        (
            {**of(method="draft_model", model="a"), "prompt_lookup_max": 2},
            "speculative_config['prompt_lookup_max'] is 2, but 'method' is 'draft_model'; allowed with it: 'ngram'",
        ),
        (of(rejection_sample_method="block"), "['rejection_sample_method'] is 'block'; allowed: standard, synthetic"),
        (
            of(synthetic_acceptance_length=2),
            "but 'rejection_sample_method' is None; allowed with it: 'synthetic'",
        ),
        (of(rejection_sample_method="synthetic"), "synthetic_acceptance_length, got neither"),
        (synthetic(synthetic_acceptance_length=2, synthetic_acceptance_rates=[1, 1, 0]), "got both"),
        (synthetic(synthetic_acceptance_length=4.5), "['synthetic_acceptance_length'] is 4.5; allowed: at most 4"),
        (synthetic(synthetic_acceptance_length=0.5), "['synthetic_acceptance_length'] is 0.5; allowed: at least 1"),
        (synthetic(synthetic_acceptance_rates=[0.5, 0.5]), "is [0.5, 0.5]; allowed: 3 numbers from 0 to 1"),
        (synthetic(synthetic_acceptance_rates=[0.5, 0.6, 0.1]), "allowed: 3 numbers from 0 to 1, none above"),
        (
            synthetic(synthetic_acceptance_rates=[1.5, 0.6, 0.1]),
            "synthetic_acceptance_rates'] is 1.5; allowed: from 0",
        ),
        (synthetic(synthetic_acceptance_rates=0.5), "is 0.5; allowed: 3 numbers from 0 to 1, none above"),
        (synthetic(synthetic_acceptance_rates="abc"), "is 'abc'; allowed: 3 numbers from 0 to 1, none above"),
        (synthetic(synthetic_acceptance_rates=[0.5, 0.1, -0.1]), "rates'] is -0.1; allowed: from 0"),
        (of(draft_sharpness=1), "['draft_sharpness'] is 1, but 'method' is 'ngram'; allowed with it: 'eagle3'"),
        (of(revision="main"), "['revision'] is 'main', but 'method' is 'ngram'; allowed with it: 'draft_model'"),
        (of(draft_tensor_parallel_size=1), "size'] is 1, but 'method' is 'ngram'; allowed with it: 'draft_model'"),
        (of(prompt_lookup_max=0), "['prompt_lookup_max'] is 0; allowed: an integer from 1 to 1024"),
        (of(enable_adaptive_verification=1), "['enable_adaptive_verification'] is 1; allowed: True or False"),
        *(
            (of(draft_sharpness=value), f"['draft_sharpness'] is {value!r}; allowed: auto, greedy, or a number above 0")
            for value in (0, -1, 1000.5, True, "soft", [1])
        ),
        (of(num_speculative_tokens=0), "['num_speculative_tokens'] is 0; allowed: an integer from 1 to 64"),
        (of(num_speculative_tokens=True), "['num_speculative_tokens'] is True; allowed: an integer from 1 to 64"),
        (of(num_speculative_tokens=16), "is 16; allowed: at most 15, one less than max_num_batched_tokens"),
        (of(prompt_lookup_min=4, prompt_lookup_max=2), "is 4; allowed: at most 2, prompt_lookup_max"),
    ],
)
def test_values_that_are_refused(value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        resolved(value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({"synthetic_acceptance_length": 1}, (0, 0, 0)),
        ({"synthetic_acceptance_length": 2.6}, (1, 0.6, 0)),
        ({"synthetic_acceptance_length": 4}, (1, 1, 1)),
        ({"synthetic_acceptance_rates": [0.8, 0.5, 0.5]}, (0.8, 0.5, 0.5)),
        ({"synthetic_acceptance_rates": [1, 0.5, 0]}, (1, 0.5, 0)),
    ],
)
def test_synthetic_acceptance(given: dict[str, Any], rates: tuple[float, ...]) -> None:
    assert resolved(synthetic(**given)).acceptance_rates == pytest.approx(rates)
    assert resolved(of(rejection_sample_method="standard")).acceptance_rates == ()


def test_keys_of_vllm_that_ask_for_nothing() -> None:
    """Scripts write defaults out."""
    given = of(enforce_eager=False, parallel_drafting=False, quantization=None, max_model_len=None)
    assert resolved(given) == resolved(of())


def test_a_head_is_no_draft_model(bundled_model_path: Path) -> None:
    """Nor is a model a head; the errors say which method each has."""
    with pytest.raises(
        ValueError, match="it is an EAGLE-3 head; allowed: a model that generates, or 'method': 'eagle3'"
    ):
        resolved(of(method="draft_model", model=bundled_model_path / "head"))
    with pytest.raises(ValueError, match=r"architectures must be that of a head .*; a whole model is a 'draft_model'"):
        resolved(of(method="eagle3", model=bundled_model_path))


def test_a_draft_model(bundled_model_path: Path) -> None:
    """It is run in the type, with the passes and with the length of the model that it drafts for."""
    speculation = resolved(of(method="draft_model", model=bundled_model_path))
    assert (speculation.method, speculation.num_tokens) == ("draft_model", 3)
    assert speculation.draft is not None
    draft, config = speculation.draft, tiny_config()
    assert (draft.model.num_layers, draft.model.dtype, draft.model.max_model_len) == (6, torch.float32, 256)
    assert draft.compile.passes == config.compile.passes
    assert draft.graph.mode is GraphMode.NONE


@pytest.mark.parametrize(
    ("fields", "more", "options", "message"),
    [
        ({"vocab_size": 100}, {}, {}, "vocab_size is 100; allowed: that of the model it drafts for, 4096"),
        ({"architectures": ["FooForCausalLM"]}, {}, {}, "architecture 'FooForCausalLM' is not known; the textbook has"),
        ({"max_position_embeddings": 128}, {}, {}, "max_model_len must be a whole number from 1 to 128"),
        (
            {"intermediate_size": 641},
            {},
            {"tensor_parallel_size": 2},
            "does not divide the model's 641 rows of the MLP",
        ),
        (
            {},
            {"draft_tensor_parallel_size": 2},
            {},
            "draft_tensor_parallel_size is 2; allowed: tensor_par",
        ),
        ({}, {"revision": "main"}, {}, "revision is 'main', but model is"),
    ],
)
def test_draft_models_that_are_refused(
    fields: dict[str, Any],
    more: dict[str, Any],
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    bundled_model_path: Path,
) -> None:
    stated = json.loads((bundled_model_path / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(stated))
    config = of(method="draft_model", model=str(tmp_path), **more)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        resolved(config, load_format="dummy", **options)
    assert str(error.value).startswith(f"speculative_config['model'] is {str(tmp_path)!r}: ")
    assert "\n" not in str(error.value)


def test_a_draft_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"speculative_config\['model'\] is .* model must be a folder that holds"):
        resolved(of(method="draft_model", model=str(tmp_path / "none")))
    with pytest.raises(TypeError, match=r"speculative_config\['model'\] is '3': model is 3; allowed: the path"):
        resolved(of(method="draft_model", model=3))


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cpu", {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ("cpu", {"logits_processors": ("a:B",)}, "there are logits_processors"),
        ("cpu", {"pools": True}, "the model pools"),
    ],
)
def test_what_drafts_do_not_go_with(device: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(of(), device, **options)


@pytest.mark.parametrize(
    ("graph", "mode", "sizes"),
    [
        (GraphConfig(GraphMode.FULL, (1, 2, 3), (4, 16), ((2, 64),)), GraphMode.FULL_DECODE_ONLY, (1, 2, 3)),
        (GraphConfig(GraphMode.PIECEWISE, (), (4, 16)), GraphMode.FULL_DECODE_ONLY, (1, 2, 4)),
        (GraphConfig(GraphMode.NONE), GraphMode.NONE, ()),
    ],
)
def test_the_passes_of_a_draft_model_are_captured(
    graph: GraphConfig, mode: GraphMode, sizes: tuple[int, ...], bundled_model_path: Path
) -> None:
    """For decodes, where the engine captures anything."""
    config = tiny_config(vocab_size=4096)
    device = torch.device("cuda", 0)
    config = replace(config, scheduler=SCHEDULER, device=device, graph=graph, attention_backend="triton")
    given = EngineOptions(speculative_config=of(method="draft_model", model=bundled_model_path))
    draft = resolve_speculation(given, config, SilentProgress()).draft
    assert draft is not None
    assert (draft.graph.mode, draft.graph.decode_sizes, draft.graph.token_sizes) == (mode, sizes, ())
    assert config.reasons.get("speculation.draft.graph.mode") == (
        "the passes of a draft model are captured for decodes" if sizes else None
    )


def test_the_passes_of_a_head_are_captured_in_few_sizes() -> None:
    config = resolve(EngineOptions(device="cpu", mode="eager"))
    graph = GraphConfig(GraphMode.FULL, (*range(1, 9), 24), (4, 16), ((2, 64),), ((2, 64),))
    config = replace(config, device=torch.device("cuda", 0), graph=graph, attention_backend="triton")
    drafts = {"method": "eagle3", "model": str(BUNDLED_MODEL_PATH / "head"), "num_speculative_tokens": 3}
    draft = resolve_speculation(EngineOptions(speculative_config=drafts), config, SilentProgress()).draft
    assert draft is not None
    assert draft.graph == GraphConfig(GraphMode.FULL_DECODE_ONLY, (1, 2, 4, 8, 24))


@pytest.mark.parametrize(
    ("more", "sharpnesses", "is_chosen"),
    [
        ({}, (3.0, 1.0, 1.5, GREEDY_DRAFTS), True),
        ({"draft_sharpness": "auto"}, (3.0, 1.0, 1.5, GREEDY_DRAFTS), True),
        ({"draft_sharpness": "greedy"}, (GREEDY_DRAFTS,), False),
        ({"draft_sharpness": 2}, (2.0,), False),
        ({"draft_sharpness": 0.5}, (0.5,), False),
        ({"draft_sharpness": 1000}, (1000.0,), False),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}, (1.0,), False),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2, "draft_sharpness": "greedy"},
            (GREEDY_DRAFTS,),
            False,
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2, "draft_sharpness": 2},
            (2.0,),
            False,
        ),
    ],
)
def test_a_head_and_the_sharpness_of_its_drafts(
    more: dict[str, Any], sharpnesses: tuple[float, ...], is_chosen: bool
) -> None:
    """Unless it is given it is found, but for synthetic acceptance, which does not depend on drafts."""
    config = resolve(EngineOptions(device="cpu", mode="eager"))
    drafts = {"method": "eagle3", "model": str(BUNDLED_MODEL_PATH / "head"), "num_speculative_tokens": 3, **more}
    found = resolve_speculation(EngineOptions(speculative_config=drafts), config, SilentProgress())
    assert found.sharpnesses == sharpnesses
    assert ("speculation.sharpnesses" in config.reasons) == is_chosen
    assert len(found.aux_layers) == 3
    assert all(0 <= layer < config.model.num_layers for layer in found.aux_layers)
    assert ", ".join(map(str, found.aux_layers)) in config.reasons["speculation.aux_layers"]
    assert found.acceptance_rates == ((1, 0, 0) if "synthetic_acceptance_length" in more else ())


@pytest.mark.parametrize(
    ("value", "reasons"),
    [
        (of(), {"lookup_max": "default", "lookup_min": "default"}),
        (of(prompt_lookup_max=3), {"lookup_min": "the other bound"}),
        (of(prompt_lookup_min=3), {"lookup_max": "the other bound"}),
        (of(prompt_lookup_min=3, prompt_lookup_max=3), {}),
    ],
)
def test_what_was_not_given_has_a_reason(value: dict[str, Any], reasons: dict[str, str]) -> None:
    config = replace(tiny_config(), scheduler=SCHEDULER)
    resolve_speculation(EngineOptions(speculative_config=value), config, SilentProgress())
    given = {name: why for name, why in config.reasons.items() if name.startswith("speculation.")}
    assert given == {f"speculation.{name}": why for name, why in reasons.items()}


@pytest.mark.parametrize("adapts", [False, True])
def test_a_draft_model_has_reasons_and_rates_of_its_own(adapts: bool, bundled_model_path: Path) -> None:
    config = replace(tiny_config(vocab_size=4096), scheduler=SCHEDULER, graph=GraphConfig(GraphMode.RECORDED))
    value = synthetic(method="draft_model", model=bundled_model_path, synthetic_acceptance_length=2.5)
    given = EngineOptions(
        speculative_config=value | {"enable_adaptive_verification": adapts}, disable_passes=("rms_norm",)
    )
    found = resolve_speculation(given, replace(config, attention_backend="torch"), SilentProgress())
    assert (found.acceptance_rates, found.adapts, found.aux_layers, found.sharpnesses) == (
        (1, 0.5, 0),
        adapts,
        (),
        (1.0,),
    )
    assert found.draft is not None
    assert "rms_norm" not in found.draft.compile.passes
    assert found.draft.graph.mode is GraphMode.NONE
    assert config.reasons["speculation.draft.graph.mode"] == (
        "decodes cannot be recorded: attention backend torch cannot be recorded"
    )
    assert "speculation.draft.model.max_model_len" not in config.reasons
    assert "speculation.draft.model.load_format" in config.reasons
    assert ("speculation.adapts" in config.reasons) == adapts


def test_the_number_of_drafts_may_adapt() -> None:
    assert [resolved(of(**given)).adapts for given in ({}, {"enable_adaptive_verification": True})] == [False, True]
