"""speculative_config: what its keys come to, and one-line errors for what is impossible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from compiled_engine.config import SchedulerConfig, SpeculationConfig
from compiled_engine.options import EngineOptions
from compiled_engine.pooling import EMBED, LAST, NORMALISE, Pooling
from compiled_engine.resolve.speculation import resolve_speculation

SCHEDULER = SchedulerConfig(4, 16, 64, "fcfs")


def resolved(value: Any, device: str = "cpu", *, pools: bool = False, **options: Any) -> SpeculationConfig:
    given = EngineOptions(speculative_config=value, **options)
    model = tiny_config().model
    if pools:
        model = replace(model, pooling=Pooling(EMBED, LAST, (), NORMALISE))
    return resolve_speculation(given, torch.device(device), model, SCHEDULER, {})


def of(**more: Any) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": 3, **more}


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
        ({"method": "ngram"}, "speculative_config has no 'num_speculative_tokens', which it must have"),
        ({"num_speculative_tokens": 2}, "speculative_config has no 'method', which it must have"),
        (of(method="eagle"), "speculative_config['method'] is 'eagle'; allowed: ngram"),
        (of(num_speculative_tokens=0), "['num_speculative_tokens'] is 0; allowed: an integer from 1 to 64"),
        (of(num_speculative_tokens=True), "['num_speculative_tokens'] is True; allowed: an integer from 1 to 64"),
        (of(num_speculative_tokens=16), "is 16; allowed: at most 15, one less than max_num_batched_tokens"),
        (of(prompt_lookup_min=4, prompt_lookup_max=2), "is 4; allowed: at most prompt_lookup_max (2)"),
    ],
)
def test_values_that_are_refused(value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        resolved(value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cuda:0", {}, "the device is cuda:0"),
        ("cpu", {"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ("cpu", {"logits_processors": ("a:B",)}, "there are logits_processors"),
        ("cpu", {"pools": True}, "the model pools"),
    ],
)
def test_what_drafts_do_not_go_with(device: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(of(), device, **options)
