"""`compiled-engine config`: the resolved configuration with reasons."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.device_plan import rank_plan, rank_table, stage_shares, stage_table
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.output import AsJson, console, print_json

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig


@takes_engine_options
def config(
    *,
    engine: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Show the configuration that the engine would run with, and why.

    Nothing is compiled, and no weights are read or downloaded. A model on several devices is shown with each device's
    share.

    Examples:

      compiled-engine config

      compiled-engine config --model path/to/Qwen3-0.6B --mode eager --max-num-seqs 8

      compiled-engine config --tensor-parallel-size 2 --pipeline-parallel-size 2

      compiled-engine config --json | jq .scheduler
    """
    with bad_input_is_reported():
        from compiled_engine.config import json_value
        from compiled_engine.other_engines.translate import make_options
        from compiled_engine.resolve.engine import resolve

        resolved = resolve(make_options(engine))
    replicas = replica_plan(resolved)
    shows_replicas = len(replicas) > 1 or resolved.parallel.executor == "ray"
    plan = rank_plan(resolved) if resolved.parallel.tensor_parallel_size > 1 else None
    stages = stage_shares(resolved) if resolved.parallel.num_stages > 1 else []
    if as_json:
        plans: dict[str, Any] = {} if plan is None else {"ranks": asdict(plan)}
        plans |= {"stages": [asdict(stage) for stage in stages]} if stages else {}
        plans |= {"replicas": replicas} if shows_replicas else {}
        print_json(json_value(resolved) | plans)
    else:
        out = console()
        out.print(config_table(resolved))
        if (note := profile_note(resolved)) is not None:
            out.print(note)
        if shows_replicas:
            where = (f"replica {number} on {', '.join(devices)}" for number, devices in enumerate(replicas))
            out.print(f"{len(replicas)} replicas, each in processes of its own: {'; '.join(where)}")
        if stages:
            out.print(stage_table(stages))
        if plan is not None:
            out.print(rank_table(plan))


def replica_plan(config: EngineConfig) -> list[list[str]]:
    """Return the names of the devices of each replica."""
    from compiled_engine.processes.start_cores import gpus_of_replica

    parallel = config.parallel
    if parallel.executor == "ray":
        what = "GPUs" if config.device.type == "cuda" else "CPUs"
        return [[f"{parallel.devices_per_replica} {what} of a node of the Ray cluster"]] * parallel.data_parallel_size
    gpus = [gpus_of_replica(config, number) for number in range(config.parallel.data_parallel_size)]
    return [[f"GPU {name}" for name in names] or ["the CPU"] for names in gpus]


def config_table(config: EngineConfig) -> Table:
    """Return a table with a row for each value: its dotted name, the value, and the reason if the engine chose it."""
    from compiled_engine.config import flat_fields

    table = Table(box=None)
    table.add_column("field", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("reason", overflow="fold")
    for name, value in flat_fields(config).items():
        if name != "reasons":
            table.add_row(name, _shown(value), config.reasons.get(name, ""))
    return table


def profile_note(config: EngineConfig) -> str | None:
    """Return a note that the GPU has no profile (measured kernel times), and the command that measures one.

    Returns None if the GPU has a profile. Also returns None for a CPU, and if the compiler is off: no profile is used
    then.
    """
    import torch

    from compiled_engine.passes.framework.profile import profile_of

    if config.device.type != "cuda" or not config.compile.enabled or profile_of(config.device) is not None:
        return None
    name = torch.cuda.get_device_name(config.device)
    return (
        f"{name} has no profile: all passes that apply run, and tile sizes follow rules. "
        f"To measure one: compiled-engine tune --quick --model {config.model.path}"
    )


def _shown(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    if len(value) > 1 and all(each == value[0] for each in value):
        return f"{value[0]} ({len(value)} times)"
    return ", ".join(map(str, value))
