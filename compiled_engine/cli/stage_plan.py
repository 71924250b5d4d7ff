"""What each stage of a pipeline will have, before any process starts: for `compiled-engine config`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from compiled_engine.cli.rank_plan import GIB, most_blocks

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig


@dataclass(frozen=True)
class StageShare:
    """ranks, layers: their numbers; a layer belongs to the stage that has its attention and KV cache. weight_bytes,
    block_bytes: of each rank. most_blocks: see RankPlan; the engine has as many as the stage with the fewest."""

    stage: int
    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    weight_bytes: int
    block_bytes: int
    most_blocks: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def stage_shares(config: EngineConfig) -> list[StageShare]:
    """Nothing is read, and no GPU's context is made."""
    from compiled_engine.models.textbook.architectures import build_model
    from compiled_engine.parallel.stages import parameter_places, stages_of
    from compiled_engine.runner.kv_cache import block_bytes

    model, tensor = build_model(config.local_model), config.parallel.tensor_parallel_size
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places = parameter_places(model, config.local_model)
    shares = []
    for stage in stages_of(config.parallel.stage_layers, config.model.num_layers):
        own = {id(parameters[name]): parameters[name] for name in places.of_stage(stage)}  # a tied one counts once
        weight_bytes = sum(parameter.nbytes for parameter in own.values())
        ranks = tuple(range(stage.index * tensor, (stage.index + 1) * tensor))
        blocks = most_blocks(config, weight_bytes, stage.layers)
        size = block_bytes(config, stage.layers)
        shares.append(StageShare(stage.index, ranks, tuple(stage.layers), weight_bytes, size, blocks))
    return shares


def stage_table(shares: list[StageShare]) -> Table:
    """A row for each stage."""
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
