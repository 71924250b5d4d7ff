"""The features that a configuration switches on. Whoever builds an engine core hands them to it."""

from __future__ import annotations

from compiled_engine.config import EngineConfig
from compiled_engine.core.hooks import PlanFeature
from compiled_engine.features.recurrence.snapshots import StateSnapshots


def plan_features(config: EngineConfig) -> list[PlanFeature]:
    """Return the parts of the features in planning steps."""
    features: list[PlanFeature] = []
    recurrences = config.model.recurrences
    if recurrences is not None and recurrences.num_snapshots and config.cache.enable_prefix_caching:
        features.append(StateSnapshots(recurrences.num_snapshots, config.cache.block_size))
    return features
