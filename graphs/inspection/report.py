"""Makes the report on a compiled model: a dict of JSON values, which `compiled-engine inspect --json` prints.

Data about the compilation are read from an entry of the compile cache; nothing is traced or compiled. Data about a run
are read from an engine's metrics.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compiled_engine.config import EngineConfig, GraphConfig, GraphMode, SchedulerConfig, SpeculationConfig
from compiled_engine.features.speculation.graph_keys import FIRST, StepKeys, head_keys, model_keys, prefill_head_keys
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.key import cache_factors
from compiled_engine.graphs.compiler.compiled_range import CompiledRange, read_compiled_ranges
from compiled_engine.graphs.compiler.record import RECORD
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher, GraphKey
from compiled_engine.graphs.inspection.kernels import Kernel, kernels_of
from compiled_engine.graphs.inspection.module_pieces import modules_of_pieces, parameter_uses, with_pieces


def piece_text(piece_json: str) -> list[str]:
    """Return a piece as lines of text: the ranges of its symbolic sizes, then one line per node.

    A node is shown as `v12 = aten::mul.Tensor(v3, v11)`, an input with its type. piece_json: the content of the piece's
    JSON file.
    """
    piece = json.loads(piece_json)
    lines = [f"{name}: {low} to {high}" for name, (low, high) in piece["symbols"].items()]
    for number, (kind, *rest) in enumerate(piece["nodes"]):
        if kind == "input":
            lines.append(f"v{number}: {_type(rest[0])} = input")
        elif kind == "output":
            lines.append(f"return {_value(rest[0])}")
        else:
            arguments = [_value(item) for item in rest[0]]
            arguments += [f"{name}={_value(item)}" for name, item in rest[1]["dict"].items()]
            lines.append(f"v{number} = {kind}({', '.join(arguments)})")
    return lines


def _type(description: dict[str, Any]) -> str:
    if "size" in description:
        return f"size {description['size']}"
    shape = ", ".join(str(size) for size in description["shape"])
    return f"{description['dtype'].removeprefix('torch.')}[{shape}]"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        return f"v{inner}" if kind == "node" else str(inner)
    return repr(value)


@dataclass(frozen=True)
class Report:
    data: dict[str, Any]  # plain JSON
    texts: dict[str, str]  # long texts (graphs, sources, diffs), by file name


@dataclass(frozen=True)
class CompiledEntry:
    """A compiled model in the compile cache: its folder, the status of its lookup, and the factors of its key."""

    folder: Path
    status: str  # hit, miss (built now and kept) or off (built now, not kept)
    factors: dict[str, Any]  # of the entry's key

    @classmethod
    def of(cls, config: EngineConfig, folder: Path, status: str) -> CompiledEntry:
        return cls(folder, status, cache_factors(config))


def make_report(
    config: Mapping[str, Any],
    entry: CompiledEntry | None,
    start_up: Iterable[Mapping[str, Any]],
    metrics: Mapping[str, Any] | None = None,
) -> Report:
    """Return the report on a resolved configuration.

    config: the configuration as JSON values. entry: the compiled model; None in eager mode. start_up: the timed spans
    of this process, see Timeline.as_records. metrics: the metrics of an engine that has run; None if no engine was
    started.
    """
    phases = {"start_up": list(start_up), "build": []}
    data: dict[str, Any] = {
        "config": config,
        "passes": [],
        "pieces": [],
        "ranges": [],
        "cache": {"status": "off"},
        "phases": phases,
        "modules": None,
        "symbols": [],
        "guards": [],
        "kernels_per_step": {},
        "captures": _captures(config, metrics or {}),
        "metrics": metrics,
    }
    texts: dict[str, str] = {}
    if entry is not None:
        folder = entry.folder
        ranges = read_compiled_ranges(folder)
        kernels = {key: kernels_of(_output_code(folder, key)) for v in ranges for key in v.plan.piece_keys()}
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        phases["build"] = record["phases"]
        modules = with_pieces(record["modules"], parameter_uses(ranges))
        data |= {
            "passes": [_pass(report, compiled) for compiled in ranges for report in map(asdict, compiled.passes)],
            "pieces": _pieces(ranges, kernels, record["pieces"], modules_of_pieces(modules)),
            "ranges": [_range(compiled) for compiled in ranges],
            "cache": _cache(entry),
            "modules": modules,
            "symbols": record["symbols"],
            "guards": record["guards"],
            "kernels_per_step": {v.name: _per_step(v, kernels) for v in ranges},
        }
        texts = _texts(folder, ranges)
    data["notes"] = _notes(config, entry, metrics)
    return Report(data, texts)


def piece_file(range_name: str, number: int, suffix: str) -> str:
    """Return the file name of a text about a piece of a range.

    number: the piece's number in the range, from 1. suffix: such as ".py".
    """
    return f"{range_name}/piece_{number}{suffix}"


def _pass(report: dict[str, Any], compiled: CompiledRange) -> dict[str, Any]:
    """Return a pass's report as JSON values, with the range's name added and the diff replaced by its file name.

    report: the report as a dict; its diff is removed. compiled: the range on which the pass ran.
    """
    number = [known.name for known in compiled.passes].index(report["name"])
    diff = f"{compiled.name}/passes/{number:02}_{report['name']}.diff" if report.pop("diff") else None
    lists = {name: list(report[name]) for name in ("near_misses", "notes")}
    return report | lists | {"range": compiled.name, "diff": diff}


def _pieces(
    ranges: Iterable[CompiledRange],
    kernels: Mapping[str, tuple[Kernel, ...]],
    compilations: Iterable[dict[str, Any]],
    modules: Mapping[str, list[str]],
) -> list[dict[str, Any]]:
    pieces: dict[str, dict[str, Any]] = {}
    by_key = {piece["key"]: piece for piece in compilations}
    for compiled in ranges:
        name = compiled.name
        counts = Counter(step.piece for step in compiled.plan.steps if step.piece)
        for number, key in enumerate(compiled.plan.piece_keys(), start=1):
            piece = pieces.setdefault(
                key,
                {
                    "key": key,
                    "name": _letters(len(pieces)),
                    "ranges": [],
                    "uses": {},
                    "modules": modules.get(key, []),
                    "kernels": [{"name": k.name, "kind": k.kind, "launches": k.launches} for k in kernels[key]],
                    "seconds": by_key[key]["seconds"],
                    "worker": by_key[key]["worker"],
                    "graph": piece_file(name, number, ".txt"),
                    "source": piece_file(name, number, ".py"),
                },
            )
            piece["ranges"].append(name)
            piece["uses"][name] = counts[key]
    return list(pieces.values())


def _letters(number: int) -> str:
    """Return the short name of the piece with index `number`: A, B, ... Z, AA, AB, ..."""
    head = _letters(number // 26 - 1) if number >= 26 else ""
    return head + chr(ord("A") + number % 26)


def _range(compiled: CompiledRange) -> dict[str, Any]:
    """Return a compiled range as JSON values: bounds, callable, arguments, results, steps, names of its text files."""
    name = compiled.name
    return asdict(compiled.compile_range) | {
        "name": name,
        "callable": compiled.callable,
        "arguments": list(compiled.plan.arguments),
        "returns": list(compiled.returns),
        "steps": [{"piece": step.piece, "op": step.op} for step in compiled.plan.steps],
        "graph": f"{name}/graph.txt",
        "forward": f"{name}/forward.py",
    }


def _per_step(compiled: CompiledRange, kernels: Mapping[str, tuple[Kernel, ...]]) -> dict[str, Any]:
    """Return the numbers of kernel launches in one call of a range: in total, by kind and by kernel.

    An op between two pieces counts as one launch, however many kernels it launches. kernels: piece key -> its kernels.
    """
    launches: Counter[tuple[str, str]] = Counter()
    for step in compiled.plan.steps:
        if step.piece is None:
            launches[str(step.op), "splitting op"] += 1
        else:
            launches.update({(k.name, k.kind): k.launches for k in kernels[step.piece]})
    by_kind: Counter[str] = Counter()
    for (_, kind), count in launches.items():
        by_kind[kind] += count
    return {
        "total": launches.total(),
        "by_kind": dict(by_kind),
        "kernels": [{"name": name, "kind": kind, "launches": n} for (name, kind), n in launches.most_common()],
    }


def _cache(entry: CompiledEntry) -> dict[str, Any]:
    files = [path for path in entry.folder.rglob("*") if path.is_file()]
    return {
        "key": factors_key(entry.factors),
        "status": entry.status,
        "folder": None if entry.status == "off" else str(entry.folder),
        "size": sum(path.stat().st_size for path in files),
        "files": len(files),
        "factors": entry.factors,
    }


def _captures(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a dict for each CUDA graph: its kind, its size and its memory in bytes (None if not measured)."""
    used = {name: sum(reading.values()) for name, reading in metrics.get("graph_bytes_by_key", {}).items()}
    names = [(key.name, key.name.split()[0], key.num_tokens) for key in _keys(config)]
    return [{"kind": kind, "size": size, "bytes": used.get(name)} for name, kind, size in names]


def _keys(config: Mapping[str, Any]) -> tuple[GraphKey, ...]:
    """Return the keys of the CUDA graphs that an engine with this configuration captures, except those for adapters."""
    scheduler, given, draft = SchedulerConfig(**config["scheduler"]), config.get("speculation", {}), None
    if of_draft := given.get("draft"):
        draft = _graph(of_draft["graph"])
    names = ("num_tokens", "adapts", "reads_hidden")
    speculation = SpeculationConfig(
        aux_layers=tuple(given.get("aux_layers", ())), **{name: given[name] for name in names if name in given}
    )
    dispatcher = Dispatcher(_graph(config["graph"]), scheduler, query_lens=speculation.verified, rare=speculation.rare)
    longest, lengths = scheduler.max_model_len, speculation.lengths
    if draft is None:
        return dispatcher.keys
    if not speculation.has_head:
        return (*dispatcher.keys, *model_keys(Dispatcher(draft, scheduler, query_lens=(FIRST,)), lengths))
    steps = StepKeys.of(dispatcher.keys, longest, draft.decode_sizes if speculation.skips_head else None)
    prefills = dict.fromkeys(prefill_head_keys(steps.read.values(), longest).values())
    return (*steps.captured, *head_keys(Dispatcher(draft, scheduler), lengths), *prefills)


def _graph(config: Mapping[str, Any]) -> GraphConfig:
    short_decodes, short_verified = (
        tuple((size, context) for size, context in config.get(name, ())) for name in ("short_decodes", "short_verified")
    )
    sizes = tuple(config["decode_sizes"]), tuple(config["token_sizes"])
    return GraphConfig(GraphMode(config["mode"]), *sizes, short_decodes, short_verified)


def _output_code(folder: Path, key: str) -> str:
    path = folder / "pieces" / f"{key}.py"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _texts(folder: Path, ranges: Iterable[CompiledRange]) -> dict[str, str]:
    texts = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("trace/*.txt"))
    }
    for compiled in ranges:
        name = compiled.name
        own = folder / name
        for path in [*sorted(own.glob("passes/*.diff")), own / "graph.txt", own / "forward.py"]:
            if path.exists():
                texts[path.relative_to(folder).as_posix()] = path.read_text(encoding="utf-8")
        for number, key in enumerate(compiled.plan.piece_keys(), start=1):
            piece = (folder / "pieces" / f"{key}.json").read_text(encoding="utf-8")
            texts[piece_file(name, number, ".txt")] = "\n".join(piece_text(piece)) + "\n"
            texts[piece_file(name, number, ".py")] = _output_code(folder, key)
    return texts


def _notes(config: Mapping[str, Any], entry: CompiledEntry | None, metrics: Mapping[str, Any] | None) -> dict[str, str]:
    """Return notes that explain why parts of the report are empty or incomplete, by the name of the part."""
    notes = {}
    if entry is None:
        notes["compile"] = (
            "The mode is eager: nothing was traced or compiled, every step runs the model as it is written."
        )
    elif entry.status == "off":
        notes["cache"] = "The compile cache is off: what was compiled is kept until the engine ends."
    if config["graph"]["mode"] == "none" and config["device"] != "cpu":
        notes["captures"] = f"The mode captures no CUDA graphs on {config['device']}."
    if metrics is None:
        notes["run"] = "No engine was started, so what only a run can tell is missing: inspect --run measures it."
    return notes
