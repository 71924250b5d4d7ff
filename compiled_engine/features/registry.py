"""Makes the features that a configuration enables, for an engine core and for a runner, and lists their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine.executor import Executor
from compiled_engine.engine.load_model import EagerFeature
from compiled_engine.engine.plan_hooks import PlanFeature
from compiled_engine.engine.step_hooks import MakeFeatures, RunnerFeatures, RunnerParts, Tail
from compiled_engine.engine.step_sampling import Advance, StepAdvance
from compiled_engine.features.adapters import table as adapters
from compiled_engine.features.adapters.eager_adapters import EagerAdapters
from compiled_engine.features.adapters.plan import Adapters, NoAdapters
from compiled_engine.features.adapters.step_adapters import StepAdapters
from compiled_engine.features.angles.plan import AnglesByLength
from compiled_engine.features.angles.step_angles import StepAngles
from compiled_engine.features.images import plan as images
from compiled_engine.features.images.eager_images import EagerImages
from compiled_engine.features.images.plan import ImagePlan
from compiled_engine.features.images.step_images import StepImagesOnDevice
from compiled_engine.features.kv_events import plan as kv_events
from compiled_engine.features.kv_events.plan import KVEvents
from compiled_engine.features.kv_offload import plan as kv_offload
from compiled_engine.features.kv_offload.extras import BLOCKS, STATES
from compiled_engine.features.kv_offload.file_index import FileIndex
from compiled_engine.features.kv_offload.host_rows import HostRows
from compiled_engine.features.kv_offload.plan import HostBlocks
from compiled_engine.features.kv_offload.step_host_blocks import StepHostBlocks
from compiled_engine.features.pipeline.micro_batches import MicroBatches
from compiled_engine.features.pipeline.stage_traffic import SendTail, StageTraffic
from compiled_engine.features.pooling.plan import PoolingPlan
from compiled_engine.features.pooling.step_pooling import ByToken, StepPooling, TokenTypes
from compiled_engine.features.prompt_logprobs.plan import PromptLogprobs
from compiled_engine.features.prompt_logprobs.step_prompt_logprobs import StepPromptLogprobs
from compiled_engine.features.rank_calls.plan import RankCalls
from compiled_engine.features.rank_calls.step_rank_calls import StepRankCalls
from compiled_engine.features.recurrence.snapshots import StateSnapshots
from compiled_engine.features.recurrence.state_rows import StateRows, snapshot_rows
from compiled_engine.features.sleep.plan import Sleep
from compiled_engine.features.sleep.step_sleep import LoseWeights, rank_memory, step_sleep
from compiled_engine.features.speculation import draft_plan as drafts
from compiled_engine.features.speculation.draft_length import DraftLength
from compiled_engine.features.speculation.draft_plan import DraftPlan, NoDrafts
from compiled_engine.features.speculation.drafter import Drafter
from compiled_engine.features.speculation.eager_aux_hidden_states import EagerAuxHiddenStates
from compiled_engine.features.speculation.step_drafts import drafting
from compiled_engine.features.speculation.verification import DraftAdvance
from compiled_engine.features.speech import plan as speech
from compiled_engine.features.speech.eager_speech import EagerSpeech
from compiled_engine.features.speech.plan import SpeechPlan
from compiled_engine.features.speech.step_speech import StepSpeech
from compiled_engine.features.structured import constraints
from compiled_engine.features.structured.plan import Structured
from compiled_engine.features.structured.step_masks import MaskedSteps
from compiled_engine.features.weight_updates.plan import WeightUpdates
from compiled_engine.features.weight_updates.step_weight_updates import CheckTensors, StepWeightUpdates
from compiled_engine.graphs.compiled_model import CompiledModel
from compiled_engine.graphs.stage_model import stage_model
from compiled_engine.parallel.stages import StageLink

# Metrics that add up over replicas: counts since the start, and current values.
COUNTERS = (
    *(*adapters.COUNTERS, *drafts.COUNTERS, *constraints.COUNTERS, *images.COUNTERS),
    *(*kv_events.COUNTERS, *kv_offload.COUNTERS, *speech.COUNTERS),
)
GAUGES = (*adapters.GAUGES, *drafts.GAUGES, *images.GAUGES, *kv_offload.GAUGES, *speech.GAUGES)


def open_block_files(config: EngineConfig) -> FileIndex | None:
    """Return the index of the files of KV cache blocks; None if the configuration has none.

    A start calls this before anything is loaded. Raises ValueError if the folder cannot be used.
    """
    found = config.cache.block_files
    if found is None:
        return None
    num_ranks, weight = config.parallel.devices_per_replica, found.state_weight
    return FileIndex(found.folder, found.limit, num_ranks, found.most_bytes, state_weight=weight)


def plan_features(config: EngineConfig, executor: Executor, files: FileIndex | None = None) -> list[PlanFeature]:
    """Return the planning parts of the enabled features. files: from `open_block_files`; None: no files are written."""
    features: list[PlanFeature] = []
    features.append(_draft_plan(config))
    vocab_size = config.model.vocab_size
    if config.model.pooling is None:
        features += [Structured(config.scheduler.max_num_seqs, vocab_size), PromptLogprobs(vocab_size)]
    else:
        features.append(PoolingPlan())
    features.append(NoAdapters() if config.adapters is None else Adapters(config.adapters, executor.call))
    if config.images is not None:
        features.append(ImagePlan(config.images))
    if config.speech is not None:
        features.append(SpeechPlan(config.speech))
    if config.parallel.num_stages > 1:
        stages, most_requests = config.parallel.num_stages, config.scheduler.max_num_seqs
        features.append(MicroBatches(stages, most_requests, config.steps_in_flight))
    if config.model.length_angles is not None:
        features.append(AnglesByLength(config.model.length_angles))
    recurrences, snapshots = config.model.recurrences, None
    if recurrences is not None and recurrences.num_snapshots and config.cache.enable_prefix_caching:
        features.append(snapshots := StateSnapshots(recurrences.num_snapshots, config.cache.block_size))
    if config.cache.host_blocks:
        slots = config.cache.host_blocks, config.cache.host_states
        features.append(HostBlocks(slots[0], executor.call, files, snapshots=snapshots, num_state_slots=slots[1]))
    if config.kv_events is not None:
        from compiled_engine.features.kv_events.publisher import Publisher  # needs an optional package

        features.append(KVEvents(Publisher(config.kv_events)))
    features.append(updates := WeightUpdates(executor.call))
    features.append(RankCalls(executor.call, updates))
    if config.sleeps:
        features.append(Sleep(executor.call, updates))
    return features


def _draft_plan(config: EngineConfig) -> PlanFeature:
    speculation, length = config.speculation, None
    if not speculation.num_tokens:
        return NoDrafts()
    if speculation.adapts:
        length = DraftLength(speculation.num_tokens, skips_head=speculation.skips_head)
    num_requests, sharpnesses = config.scheduler.max_num_seqs, speculation.sharpnesses
    return DraftPlan(
        speculation.num_tokens, num_requests, config.steps_in_flight, length=length, sharpnesses=sharpnesses
    )


def make_features(link: StageLink | None = None) -> MakeFeatures:
    """Return the functions that make a runner's features.

    `link` connects the stages of a pipeline; None: no pipeline.
    """
    if link is None:
        return MakeFeatures(eager_features, step_features, memory=rank_memory)
    stage = link.stage

    def own_part(config: EngineConfig, compiled: CompiledModel) -> CompiledModel:
        return stage_model(compiled, stage, config.scheduler.max_num_batched_tokens, config.device)

    return MakeFeatures(eager_features, partial(step_features, link=link), own_part, rank_memory)


def _step_host_blocks(parts: RunnerParts, rank: int) -> StepHostBlocks:
    config, caches = parts.config, parts.model.kv_caches
    cache, recurrences = config.cache, config.model.recurrences

    def distinct() -> Sequence[torch.Tensor]:  # layers may share a cache, and `allocate` makes new ones
        return [*{id(each): each for each in caches}.values()]

    kinds = {BLOCKS: HostRows(distinct, cache.host_blocks, config.device)}
    if recurrences is not None:
        states = snapshot_rows(recurrences, parts.tensors)
        kinds[STATES] = HostRows(lambda: states, cache.host_states, config.device)
    return StepHostBlocks(kinds, config.device, rank)


def eager_features(config: EngineConfig) -> list[EagerFeature]:
    """Return the enabled features' parts for an eager model."""
    features: list[EagerFeature] = []
    if layers := config.speculation.aux_layers:
        features.append(EagerAuxHiddenStates(layers))
    if config.adapters is not None:
        features.append(EagerAdapters(config))
    if config.images is not None:
        features.append(EagerImages(config, config.images))
    if config.speech is not None and config.model.speech is not None:
        features.append(EagerSpeech(config, config.speech, config.model.speech))
    return features


def step_features(parts: RunnerParts, link: StageLink | None = None) -> RunnerFeatures:
    """Return the device parts of the enabled features. See `make_features` for `link`."""
    config, model = parts.config, parts.config.model
    stage, tensor = 0 if link is None else link.stage.index, config.parallel.tensor_parallel_size
    rank = stage * tensor + parts.group.rank
    features = drafting(parts)
    others: list[CheckTensors] = [each.check_weights for each in features if isinstance(each, Drafter)]
    asleep: list[LoseWeights] = []
    if config.images is not None:
        features.insert(0, images_on_device := StepImagesOnDevice.of(parts, config.images))
        others.append(images_on_device.tower.check_weights)
        asleep.append(images_on_device.tower.lose_weights)
    if config.speech is not None and model.speech is not None:
        features.append(StepSpeech.of(parts, config.speech, model.speech))
    tail: Tail | None = None
    advance: Advance = StepAdvance(parts.states, parts.buffers)
    if config.speculation.num_tokens:
        advance = DraftAdvance(config, parts.states, parts.buffers)
    if config.adapters is not None:
        features.append(StepAdapters.of(parts))
    if link is not None:
        traffic = StageTraffic(link, parts.states, parts.model, config.device)
        features.append(traffic)
        if not link.stage.is_last:
            tail = SendTail(traffic, advance)
    if config.cache.host_blocks:
        features.append(_step_host_blocks(parts, rank))
    if model.recurrences is not None:
        features.append(StateRows(model.recurrences, parts.tensors, parts.states))
    if model.length_angles is not None:
        features.append(StepAngles(model.length_angles, parts.states.fields))
    if model.token_types > 0:
        features.append(TokenTypes(parts.states.fields))
    if model.pooling is not None:
        features.append(by_token := ByToken())
        tail = StepPooling(model.pooling, parts, by_token, advance)
    else:
        features.append(StepPromptLogprobs(parts, computes=tail is None))
    if tail is None:
        features.append(MaskedSteps(parts.vocabulary, config.device))
    num_ranks = config.parallel.devices_per_replica
    features.append(updates := StepWeightUpdates(parts.weights, config.device, rank, num_ranks, others))
    features.append(StepRankCalls(parts, rank, num_ranks, updates))
    if config.sleeps:
        features.append(step_sleep(parts, asleep))
    return RunnerFeatures(features, tail, advance)
