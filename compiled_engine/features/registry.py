"""The features that a configuration switches on."""

from __future__ import annotations

from compiled_engine.features.adapters.step_adapters import StepAdapters
from compiled_engine.features.pipeline.stage_traffic import SendTail, StageTraffic
from compiled_engine.features.pooling.step_pooling import ByToken, StepPooling
from compiled_engine.features.pooling.token_types import TokenTypes
from compiled_engine.features.prompt_logprobs import PromptLogprobs
from compiled_engine.features.recurrence.state_rows import StateRows
from compiled_engine.runner.hooks import RunnerParts, StepFeature, Tail


def step_features(parts: RunnerParts) -> tuple[list[StepFeature], Tail | None]:
    """Implements MakeFeatures."""
    config, model = parts.config, parts.config.model
    features: list[StepFeature] = []
    tail: Tail | None = None
    if config.adapters is not None:
        features.append(StepAdapters.of(parts))
    if parts.link is not None:
        traffic = StageTraffic(parts.link, parts.states, parts.model, config.device)
        features.append(traffic)
        if not parts.link.stage.is_last:
            tail = SendTail(traffic, parts.advance)
    if model.recurrences is not None:
        features.append(StateRows(model.recurrences, parts.tensors, parts.states))
    if model.token_types > 0:
        features.append(TokenTypes(parts.states.fields))
    if model.pooling is not None:
        features.append(by_token := ByToken())
        tail = StepPooling(model.pooling, parts, by_token, parts.advance)
    else:
        features.append(PromptLogprobs(parts, computes=tail is None))
    return features, tail
