"""`compiled-engine cache`: inspect, explain and clean up the compile cache."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from compiled_engine.cli.arguments import takes_engine_options
from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.cli.other_words import EngineCommand
from compiled_engine.cli.output import AsJson, console, print_json
from compiled_engine.graphs.cache.diff import Difference, differences, flatten
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.folder import CacheFolder
from compiled_engine.graphs.cache.prune import prune as prune_cache
from compiled_engine.graphs.cache.report import (
    EntryReport,
    Nearest,
    existing_cache,
    find_key,
    nearest,
    report,
    reports,
    short,
)
from compiled_engine.kernels.cache_folder import damaged_kernels
from compiled_engine.process.cache_root import default_root

cache = typer.Typer(help="Inspect the compile cache, and clean it up.", rich_markup_mode="rich", no_args_is_help=True)

CacheDir = Annotated[Path | None, typer.Option(help="The cache. Default: where the engine keeps it.")]
Key = Annotated[str, typer.Argument(help="The key of an entry, or how it begins.", show_default=False)]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@cache.command("ls")
def list_entries(*, cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """List the entries, the most recently used first. Every file is read and compared with its digest for the status.

    Examples:

      compiled-engine cache ls

      compiled-engine cache ls --json | jq '.entries[].key'
    """
    with bad_input_is_reported():
        root = _root(cache_dir)
        folder = existing_cache(root)
        found = sorted(_reports(folder), key=lambda entry: -entry.last_used)
        leftovers = folder.leftovers() if folder else []
    if as_json:
        records = [entry_record(entry) for entry in found]
        print_json({"cache_dir": str(root), "entries": records, "leftovers": [str(path) for path in leftovers]})
        return
    if found:
        console(200).print(entry_table(found))
    typer.echo(f"{counted(found)}, {size(sum(entry.size_bytes for entry in found))}, in {root}")
    if leftovers:
        typer.echo(
            f"set aside as damaged, or left by killed processes: {len(leftovers)}; "
            "`compiled-engine cache prune` deletes that"
        )


@cache.command()
def show(key: Key, *, cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Show one entry: its state, and the factors that its key was made of.

    Examples:

      compiled-engine cache show 3f9a

      compiled-engine cache show 3f9a --json | jq .factors.versions
    """
    with bad_input_is_reported():
        entry = _entry(existing_cache(_root(cache_dir)), key)
    if as_json:
        print_json(entry_record(entry) | {"factors": entry.factors})
    else:
        typer.echo("\n".join(entry_lines(entry)))


@cache.command()
def diff(a: Key, b: Key, *, cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Say which factors two entries differ in.

    Examples:

      compiled-engine cache diff 3f9a 81c0
    """
    with bad_input_is_reported():
        folder = existing_cache(_root(cache_dir))
        first, second = _entry(folder, a), _entry(folder, b)
        found = differences(first.factors, second.factors)
    here, there = f"in {short(first.key)}", f"in {short(second.key)}"
    if as_json:
        print_json({"a": first.key, "b": second.key, "differences": difference_records(found, here, there)})
    else:
        typer.echo("\n".join(difference_lines(found, here, there)))


@cache.command(cls=EngineCommand)
@takes_engine_options
def explain(*, engine: dict[str, Any], as_json: AsJson = False) -> None:
    """Say whether an engine with these options would find its compiled model; if not, which factors differ.

    Nothing is loaded or compiled.

    Examples:

      compiled-engine cache explain

      compiled-engine cache explain --max-num-batched-tokens 4096 --disable-pass silu_mul
    """
    with bad_input_is_reported():
        from compiled_engine.graphs.cache.key import cache_factors
        from compiled_engine.other_engines.translate import make_options
        from compiled_engine.resolve.engine import resolve

        config = resolve(make_options(engine))
        if not config.compile.enabled:
            raise ValueError("mode is eager: nothing is compiled, so nothing is looked up; allowed: compiled, graphed")
        if config.compile.cache_dir is None:
            raise ValueError("compile_cache is False: nothing is looked up")
        factors = cache_factors(config)
        entries = _reports(existing_cache(config.compile.cache_dir))
    key = factors_key(factors)
    own = next((entry for entry in entries if entry.key == key), None)
    near = None if own else nearest(entries, json.loads(json.dumps(factors)))
    if as_json:
        there = f"in entry {short(near.entry.key)}" if near else ""
        print_json(
            {
                "key": key,
                "cache_dir": str(config.compile.cache_dir),
                "status": "miss" if own is None else "damaged" if own.damage else "hit",
                "damage": own.damage if own else None,
                "nearest": near.entry.key if near else None,
                "differences": difference_records(near.differences, "here", there) if near else [],
                "factors": factors,
            }
        )
    else:
        typer.echo("\n".join(explanation(key, own, near)))


@cache.command()
def verify(
    key: Annotated[str | None, typer.Argument(help="Only this entry.", show_default=False)] = None,
    *,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every file of every entry and compare it with its digest. Exit code 1 if something is damaged.

    An entry is damaged if a file was changed, is missing, was added, is a link or belongs to another user, or if its
    factors are not those of its key. Without a key, kernels that entries share are read too; the next start builds
    damaged ones again. `ls`, `show`, `explain` and `prune` check entries in the same way.

    Examples:

      compiled-engine cache verify

      compiled-engine cache verify 3f9a
    """
    with bad_input_is_reported():
        folder = existing_cache(_root(cache_dir))
        found = _reports(folder) if key is None else [_entry(folder, key)]
        kernels = damaged_kernels(_root(cache_dir)) if key is None else []
    if as_json:
        print_json({"entries": [entry_record(entry) for entry in found], "damaged_kernels": kernels})
    else:
        for entry in found:
            typer.echo(f"{short(entry.key)} {f'damaged: {entry.damage}' if entry.damage else 'ok'}")
        for name in kernels:
            typer.echo(f"kernel {name} damaged: it is not what its digest says")
        typer.echo(f"{counted(found)} read, {sum(entry.damage is not None for entry in found)} damaged")
    if kernels or any(entry.damage for entry in found):
        raise typer.Exit(1)


@cache.command()
def prune(
    *,
    older_than: Annotated[str | None, typer.Option(help="Entries not used for so long: 12h, 30d, 8w.")] = None,
    max_size: Annotated[str | None, typer.Option(help="The longest unused, until no more is left: 500MB, 5GB.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Delete damaged, old or excess entries, and leftovers of killed processes.

    Every file is read to find damage. Engines that run with an entry are not disturbed.

    Examples:

      compiled-engine cache prune

      compiled-engine cache prune --older-than 30d --max-size 5GB --dry-run
    """
    with bad_input_is_reported():
        limits = {
            "older_than_s": None if older_than is None else parse_seconds(older_than),
            "max_bytes": None if max_size is None else parse_bytes(max_size),
        }
        folder = existing_cache(_root(cache_dir))
        done = prune_cache(folder, now=time.time(), dry_run=dry_run, **limits) if folder else []
    if as_json:
        records = [asdict(item) | {"path": str(item.path)} for item in done]
        print_json({"dry_run": dry_run, "pruned": records})
        return
    for item in done:
        verb = "kept, in use by another process" if not item.removed else "would delete" if dry_run else "deleted"
        typer.echo(f"{verb}: {item.path.name} ({size(item.size_bytes)}): {item.reason}")
    freed = sum(item.size_bytes for item in done if item.removed)
    typer.echo(f"{size(freed)} {'would be freed' if dry_run else 'freed'}")


def parse_seconds(text: str) -> int:
    """Return the seconds of a duration such as 90s, 10m, 12h, 30d or 8w. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+)([smhdw])", text)
    if not found:
        raise ValueError(f"older_than is {text!r}; allowed: a whole number with one of s, m, h, d, w, such as 30d")
    return int(found[1]) * _SECONDS[found[2]]


def parse_bytes(text: str) -> int:
    """Return the bytes of a size: 800, 500MB, 1.5GB (powers of ten) or 2GiB (powers of two). Raises ValueError for
    anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", text.lower())
    if not found:
        raise ValueError(f"max_size is {text!r}; allowed: a number with B, KB, MB, GB, TB or KiB to TiB, such as 5GB")
    return int(float(found[1]) * _BYTES[found[2]])


def _root(cache_dir: Path | None) -> Path:
    if cache_dir is None:
        return default_root()
    if not cache_dir.expanduser().is_dir():
        raise ValueError(f"cache_dir is {str(cache_dir)!r}; allowed: a folder")
    return cache_dir.expanduser()


def _reports(folder: CacheFolder | None) -> list[EntryReport]:
    return reports(folder) if folder else []


def _entry(folder: CacheFolder | None, wanted: str) -> EntryReport:
    key = find_key(folder.entry_keys() if folder else [], wanted)
    assert folder is not None
    return report(folder, key)


def entry_record(entry: EntryReport) -> dict[str, Any]:
    """Return an entry of the compile cache as a JSON object, with times in ISO 8601, UTC."""
    config, device = entry.factors.get("config", {}), entry.factors.get("device", {})
    return {
        "key": entry.key,
        "path": str(entry.path),
        "status": "damaged" if entry.damage else "ok",
        "damage": entry.damage,
        "architecture": config.get("model.architecture"),
        "num_layers": config.get("model.num_layers"),
        "hidden_size": config.get("model.hidden_size"),
        "dtype": str(config.get("model.dtype")).removeprefix("torch."),
        "max_num_batched_tokens": config.get("scheduler.max_num_batched_tokens"),
        "device": device.get("name") or device.get("type"),
        "passes": config.get("compile.passes"),
        "passes_off": entry.passes_off,
        "size_bytes": entry.size_bytes,
        "created": datetime.fromtimestamp(entry.created, UTC).isoformat(timespec="seconds"),
        "last_used": datetime.fromtimestamp(entry.last_used, UTC).isoformat(timespec="seconds"),
    }


def difference_records(found: Sequence[Difference], here: str, there: str) -> list[dict[str, Any]]:
    return [
        {"factor": one.factor, "here": one.ours, "there": one.theirs, "words": one.in_words(here, there)}
        for one in found
    ]


def difference_lines(found: Sequence[Difference], here: str, there: str) -> list[str]:
    return [one.in_words(here, there) for one in found] or ["no factor differs"]


def entry_table(entries: Sequence[EntryReport]) -> Table:
    """Return a table with a row for each entry of the compile cache."""
    headings = ("key", "model", "tokens", "device", "passes off", "size", "created", "last used", "status")
    table = Table(*headings, box=None, pad_edge=False)
    for entry in entries:
        record = entry_record(entry)
        model = f"{record['architecture']}, {record['num_layers']} x {record['hidden_size']}, {record['dtype']}"
        cells = (
            short(entry.key),
            model if entry.factors else "?",
            str(record["max_num_batched_tokens"] or "?"),
            str(record["device"] or "?"),
            ", ".join(entry.passes_off) or "none",
            size(entry.size_bytes),
            ago(entry.created),
            ago(entry.last_used),
            f"damaged: {entry.damage}" if entry.damage else "ok",
        )
        table.add_row(*cells)
    return table


def entry_lines(entry: EntryReport) -> list[str]:
    """Return lines with the state of a compile cache entry and the factors of its key."""
    lines = [
        f"key        {entry.key}",
        f"folder     {entry.path}",
        f"status     {f'damaged: {entry.damage}' if entry.damage else 'ok'}",
        f"size       {size(entry.size_bytes)}",
        f"created    {ago(entry.created)}",
        f"last used  {ago(entry.last_used)}",
        f"passes off {', '.join(entry.passes_off) or 'none'}",
    ]
    for section, values in entry.factors.items():
        if section == "source":
            lines.append(f"source: digests of {len(values)} files, with --json")
        elif values:
            lines += [section, *(f"  {name}: {_shown(value)}" for name, value in flatten(values).items())]
    return lines


def explanation(key: str, own: EntryReport | None, near: Nearest | None) -> list[str]:
    """Return lines that say whether the cache has a whole entry `own` for `key`, or how the nearest entry differs."""
    if own is not None and own.damage is None:
        return [f"hit: entry {short(key)}, created {ago(own.created)}, last used {ago(own.last_used)}"]
    if own is not None:
        return [f"miss: entry {short(key)} is damaged ({own.damage}); it will be set aside and built again"]
    if near is None:
        return [f"miss: entry {short(key)} would be built; the cache has no entries to compare with"]
    there = f"in entry {short(near.entry.key)}"
    head = f"miss: entry {short(key)} would be built. The nearest is {short(near.entry.key)}; what differs:"
    return [head, *(f"  {line}" for line in difference_lines(near.differences, "here", there))]


def counted(entries: Sequence[EntryReport]) -> str:
    return "1 entry" if len(entries) == 1 else f"{len(entries)} entries"


def size(num_bytes: float) -> str:
    """Format bytes with powers of ten, such as 2.1 MB."""
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def ago(timestamp: float) -> str:
    """Format an age, such as `3 h ago`."""
    seconds = max(0.0, time.time() - timestamp)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds / length)} {unit} ago"
    return "just now"


def _shown(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
