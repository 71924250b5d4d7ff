"""Loading an eager model with a feature: the tensors that it asks for, and the callables that it changes and adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from compiled_engine.config import EngineConfig
from compiled_engine.engine.load_model import load_model
from compiled_engine.graphs.compiler.signature import ADAPTED_LOGITS, FORWARD, LOGITS
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.group import FakeGroup
from compiled_engine.passes.framework.parameter import KEPT, Parameter
from compiled_engine.passes.linear.adapters import ADAPTED
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve

HIDDEN_RD = torch.ones(2, 3)


class Offsets:
    """Adds a kept tensor to the logits of a variant, and marks every result of the forward."""

    def parameters(self, model: nn.Module) -> tuple[Parameter, ...]:
        return (Parameter("offset", (1,), "float32", KEPT),)

    def callables(
        self, model: nn.Module, callables: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, Any]:
        tensors["offset"].fill_(7)
        return {
            FORWARD: lambda *arguments: (callables[FORWARD], "marked"),
            ADAPTED: callables[FORWARD],
            LOGITS: callables[LOGITS],
            ADAPTED_LOGITS: lambda hidden_RD: hidden_RD + tensors["offset"],
        }


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return resolve(EngineOptions(device="cpu", mode="eager", max_model_len=64, num_blocks=8))


def test_an_eager_model_has_the_ends_of_its_configuration(config: EngineConfig) -> None:
    loaded = load_model(config, None, FakeGroup(), SilentProgress())
    assert (loaded.callables.variants, loaded.callables.ends) == ((), (LOGITS,))
    assert loaded.callables.bind(FORWARD, {})[-1].call is loaded.module
    assert loaded.num_parameters == sum(parameter.numel() for parameter in loaded.module.parameters())


def test_a_feature_has_its_tensors_and_changes_callables(config: EngineConfig) -> None:
    loaded = load_model(config, None, FakeGroup(), SilentProgress(), features=(Offsets(),))
    assert (loaded.callables.variants, loaded.callables.ends) == ((ADAPTED,), (LOGITS, ADAPTED_LOGITS))
    assert loaded.tensors["offset"].tolist() == [7]
    calls = {name: loaded.callables.bind(name, {})[-1].call for name in (FORWARD, ADAPTED, ADAPTED_LOGITS)}
    assert calls[FORWARD]() == (loaded.module, "marked")
    assert calls[ADAPTED] is loaded.module
    assert torch.equal(calls[ADAPTED_LOGITS](HIDDEN_RD), HIDDEN_RD + 7)


def test_a_feature_gets_the_callables_of_those_before_it(config: EngineConfig) -> None:
    seen: list[list[str]] = []

    class Looks(Offsets):
        def parameters(self, model: nn.Module) -> tuple[Parameter, ...]:
            return ()

        def callables(
            self, model: nn.Module, callables: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
        ) -> Mapping[str, Any]:
            seen.append(list(callables))
            return callables

    load_model(config, None, FakeGroup(), SilentProgress(), features=(Looks(), Offsets(), Looks()))
    assert seen == [[FORWARD, LOGITS], [FORWARD, ADAPTED, LOGITS, ADAPTED_LOGITS]]
