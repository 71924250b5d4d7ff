"""Compute the weights and KV cache blocks of each rank and stage of a divided model, without starting a process."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig, ModelConfig
    from compiled_engine.parallel.shards import Shard

GIB = 1 << 30


@dataclass(frozen=True)
class Slice:
    """A group of `count` parameters of the shape `whole` whose names differ only in the layer number."""

    name: str
    count: int
    whole: tuple[int, ...]
    rank: tuple[int, ...]  # shape of each rank's part
    cut: str  # "rows", "columns", "no", or "first rank" for parameters that other ranks lack


@dataclass(frozen=True)
class RankPlan:
    """The weights, recurrent states and KV cache blocks of one rank of a tensor-parallel model."""

    ranks: int
    executor: str
    weight_bytes: int  # weight_bytes and block_bytes: of a rank, or of one rank of each stage together
    whole_weight_bytes: int
    # Of a rank's part of the draft model, without the parameters that it shares with the model; 0 without one.
    draft_weight_bytes: int
    state_bytes: int  # of recurrences, for running requests and snapshots; 0 without them
    block_bytes: int
    # Upper bound on KV cache blocks; activations and CUDA graphs take some. None if unknown or if stages differ.
    most_blocks: int | None
    collectives_a_step: int
    slices: tuple[Slice, ...]


def rank_plan(config: EngineConfig) -> RankPlan:
    """Return what one rank will hold, from the configuration alone: its weights, states and KV cache blocks.

    Reads no weights and creates no CUDA context.
    """
    from compiled_engine.engine.cache_memory import block_bytes
    from compiled_engine.models.checkpoint.build_model import build_tensors, shards_of
    from compiled_engine.parallel.rank_share import local_model

    model = build_tensors(local_model(config), config.compile.cache_dir)
    local, shards = dict(model.named_parameters()), shards_of(config)
    weight_bytes, draft_bytes = sum(parameter.nbytes for parameter in local.values()), 0
    states = getattr(model, "row_states", ())
    state_bytes = sum(tensor.nbytes for name, tensor in model.named_buffers() if name in states)
    if (draft := config.draft) is not None:
        tensors = dict(build_tensors(local_model(draft), draft.compile.cache_dir).named_parameters())
        shared = _shared_names(local_model(draft))
        draft_bytes = sum(parameter.nbytes for name, parameter in tensors.items() if name not in shared)
    used_bytes = weight_bytes + draft_bytes + state_bytes
    sums = sum(_num_sums(name, shards[name]) for name in local)
    return RankPlan(
        ranks=config.parallel.tensor_parallel_size,
        executor=config.parallel.executor,
        weight_bytes=weight_bytes,
        whole_weight_bytes=sum(math.prod(shards[name].whole) * local[name].element_size() for name in local),
        draft_weight_bytes=draft_bytes,
        state_bytes=state_bytes,
        block_bytes=block_bytes(config),
        most_blocks=most_blocks(config, used_bytes) if config.parallel.num_stages == 1 else None,
        collectives_a_step=sums + (local_model(config).vocab_size != config.model.vocab_size),
        slices=_slices({name: (shards[name], tuple(parameter.shape)) for name, parameter in local.items()}),
    )


def _shared_names(draft: ModelConfig) -> frozenset[str]:
    """Return the names of the parameters that a draft model, head or MTP layer shares with the model."""
    from compiled_engine.models.checkpoint.eagle3_folder import EMBEDDING, has_embedding
    from compiled_engine.models.checkpoint.mtp_layer import shared_shapes

    if draft.head is None:
        return frozenset()
    if draft.head.is_mtp:
        return frozenset(shared_shapes(draft))
    return frozenset() if has_embedding(draft) else frozenset((EMBEDDING,))


def _num_sums(name: str, shard: Shard) -> int:
    """Return how many all-reduces a step has because of a parameter: 0 or 1."""
    from compiled_engine.parallel.shards import divides_vocabulary

    return shard.divides_input or shard.norms_row or divides_vocabulary(name, shard)


def most_blocks(config: EngineConfig, used_bytes: int, layers: range | None = None) -> int | None:
    """Return an upper bound on the KV cache blocks of `layers` (None: all layers) that fit with used_bytes in use.

    A configured number of blocks is returned unchanged. Without one, the result is None on devices other than CUDA.
    """
    import torch

    from compiled_engine.engine.cache_memory import block_bytes

    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    if config.device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(config.device).total_memory
    return int(total * config.cache.gpu_memory_utilization - used_bytes) // block_bytes(config, layers)


def _slices(parameters: dict[str, tuple[Shard, tuple[int, ...]]]) -> tuple[Slice, ...]:
    counts: dict[tuple[Any, ...], int] = {}
    for name, (shard, local) in parameters.items():
        cut = "first rank" if shard.first_only else _cut(shard)
        key = re.sub(r"\.\d+\.", ".*.", name), shard.whole, local, cut
        counts[key] = counts.get(key, 0) + 1
    return tuple(Slice(key[0], count, *key[1:]) for key, count in counts.items())


def _cut(shard: Shard) -> str:
    if shard.dim is None:
        return "no"
    how = "columns" if shard.divides_input else "rows"
    return how if len(shard.sections) == 1 else f"{how} of {len(shard.sections)} parts"


def rank_table(plan: RankPlan) -> Table:
    """Return a table with a row for each kind of parameter, and a rank's totals in the title."""
    blocks = "" if plan.most_blocks is None else f", at most {plan.most_blocks:,} of them"
    draft = f", {plan.draft_weight_bytes / GIB:.2f} GiB of a draft model" if plan.draft_weight_bytes else ""
    states = f", {plan.state_bytes / GIB:.2f} GiB of recurrent states" if plan.state_bytes else ""
    table = Table(
        box=None,
        title=f"{plan.ranks} ranks ({plan.executor}): {plan.weight_bytes / GIB:.2f} GiB of "
        f"{plan.whole_weight_bytes / GIB:.2f} GiB of weights each{draft}{states}; KV cache blocks of "
        f"{plan.block_bytes / 2**20:.2f} MiB{blocks}; {plan.collectives_a_step} collectives a step",
        title_justify="left",
    )
    for heading in ("parameter", "count", "whole", "of each rank", "cut"):
        table.add_column(heading, no_wrap=heading != "parameter")
    for entry in plan.slices:
        table.add_row(entry.name, str(entry.count), _shape(entry.whole), _shape(entry.rank), entry.cut)
    return table


def _shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


@dataclass(frozen=True)
class StageShare:
    """The weights and KV cache blocks of a pipeline stage."""

    stage: int
    ranks: tuple[int, ...]
    layers: tuple[int, ...]  # the layers whose attention and KV cache the stage has
    weight_bytes: int  # weight_bytes and block_bytes: of each rank
    block_bytes: int
    most_blocks: int | None  # See RankPlan. The engine uses the smallest of all stages.


def stage_shares(config: EngineConfig) -> list[StageShare]:
    """Return the weights and KV cache blocks of each stage, without reading weights or creating a CUDA context."""
    from compiled_engine.engine.cache_memory import block_bytes
    from compiled_engine.models.textbook.architectures import build_model
    from compiled_engine.parallel.rank_share import local_model
    from compiled_engine.parallel.stages import parameter_places, stages_of

    model, tensor = build_model(local_model(config)), config.parallel.tensor_parallel_size
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places = parameter_places(model, local_model(config))
    shares = []
    for stage in stages_of(config.parallel.stage_layers, config.model.num_layers):
        own = {id(parameters[name]): parameters[name] for name in places.of_stage(stage)}  # tied ones count once
        weight_bytes = sum(parameter.nbytes for parameter in own.values())
        ranks = tuple(range(stage.index * tensor, (stage.index + 1) * tensor))
        blocks = most_blocks(config, weight_bytes, stage.layers)
        size = block_bytes(config, stage.layers)
        shares.append(StageShare(stage.index, ranks, tuple(stage.layers), weight_bytes, size, blocks))
    return shares


def stage_table(shares: list[StageShare]) -> Table:
    """Return a table with a row for each stage."""
    found = [share.most_blocks for share in shares if share.most_blocks is not None]
    blocks = f"; at most {min(found):,} KV cache blocks" if found else ""
    table = Table(box=None, title=f"{len(shares)} stages{blocks}", title_justify="left")
    for heading in ("stage", "ranks", "attention and KV cache of layers", "weights of a rank, GiB", "KV block, MiB"):
        table.add_column(heading, no_wrap=True)
    for share in shares:
        ranks, layers = (f"{numbers[0]} to {numbers[-1]}" for numbers in (share.ranks, share.layers))
        weights, block = share.weight_bytes / GIB, share.block_bytes / 2**20
        table.add_row(str(share.stage), ranks, layers, f"{weights:.2f}", f"{block:.2f}")
    return table
