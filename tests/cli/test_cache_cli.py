"""`compiled-engine cache`: entries listed, told apart, explained, checked and deleted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_cases import FACTORS, Builder, build_once, changed
from typer.testing import CliRunner

from compiled_engine.cli.app import app
from compiled_engine.cli.cache import ago, parse_bytes, parse_seconds, size
from compiled_engine.graphs.cache.entry import factors_key
from compiled_engine.graphs.cache.environment import this_environment
from compiled_engine.graphs.cache.folder import open_cache
from compiled_engine.graphs.cache.key import cache_factors
from compiled_engine.graphs.cache.lookup import find_or_build
from compiled_engine.graphs.cache.report import PASSES_OF_RANKS
from compiled_engine.options import EngineOptions
from compiled_engine.passes.registry import passes_of_ranks
from compiled_engine.resolve.engine import resolve

OTHER = changed("config", model__num_layers=8)
KEY, OTHER_KEY = factors_key(FACTORS), factors_key(OTHER)
DAY = 86400


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache with two entries: of two layers, and (used a day before) of eight."""
    root = tmp_path / "cache"
    build_once(root)
    build_once(root, OTHER)
    use_was(root, OTHER_KEY, DAY)
    return root


def use_was(root: Path, key: str, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(root / "compiled" / f"{key}.lock", (then, then))


def run(*arguments: str, root: Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *arguments, "--cache-dir", str(root)])
    assert result.exit_code == code, result.output
    return result.stdout if code < 2 else result.stderr


def run_json(*arguments: str, root: Path, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", root=root, code=code))


def entries(root: Path) -> list[str]:
    return open_cache(root).entry_keys()


def test_ls_has_a_row_an_entry_the_last_used_first(root: Path) -> None:
    head, first, second, total = run("ls", root=root).splitlines()
    assert head.split()[:2] == ["key", "model"]
    for text in (KEY[:12], "Qwen3ForCausalLM, 2 x 64, float32", "2048", "cpu", "silu_mul", "just now", "ok"):
        assert text in first
    for text in (OTHER_KEY[:12], "8 x 64", "1 d ago"):
        assert text in second
    assert total.startswith("2 entries, ")
    assert total.endswith(f", in {root}")


def test_ls_as_json(root: Path) -> None:
    listed = run_json("ls", root=root)
    assert listed["cache_dir"] == str(root)
    assert listed["leftovers"] == []
    first = listed["entries"][0]
    assert [entry["key"] for entry in listed["entries"]] == [KEY, OTHER_KEY]
    assert (first["architecture"], first["num_layers"], first["hidden_size"]) == ("Qwen3ForCausalLM", 2, 64)
    assert (first["dtype"], first["device"], first["status"], first["damage"]) == ("float32", "cpu", "ok", None)
    # With one rank nobody misses a pass of ranks.
    assert (first["passes"], first["passes_off"]) == (["merge_linears", "silu_mul"], ["silu_mul"])
    files = [path for path in (root / "compiled" / KEY).rglob("*") if path.is_file()]
    assert first["size_bytes"] == sum(path.stat().st_size for path in files)
    assert first["created"][:4] == first["last_used"][:4] == time.strftime("%Y", time.gmtime())


def test_a_pass_of_ranks_is_off_where_there_are_some(tmp_path: Path) -> None:
    build_once(tmp_path, changed("config", parallel__tensor_parallel_size=2))
    (entry,) = run_json("ls", root=tmp_path)["entries"]
    assert entry["passes_off"] == ["silu_mul", "sequence_parallel"]
    assert passes_of_ranks() == PASSES_OF_RANKS


def test_ls_shows_damage_and_what_is_left_over(root: Path) -> None:
    (root / "compiled" / KEY / "extra").write_text("")
    (root / "compiled" / f"damaged_{OTHER_KEY}_x").mkdir()
    (root / "compiled" / f"work_{'0' * 32}_x").mkdir()
    shown = run("ls", root=root)
    assert "damaged: extra is not in its manifest" in shown
    assert "set aside as damaged, or left by killed processes: 2; `compiled-engine cache prune`" in shown
    assert len(run_json("ls", root=root)["leftovers"]) == 2


def test_a_folder_in_use_is_not_listed_as_left_over(root: Path) -> None:
    running = find_or_build(root, FACTORS, Builder())
    assert run_json("ls", root=root)["leftovers"] == []
    run("prune", root=root)
    assert running.work.path.exists()


def test_an_empty_cache_is_no_error(tmp_path: Path) -> None:
    assert run("ls", root=tmp_path) == f"0 entries, 0 B, in {tmp_path}\n"
    assert run_json("verify", root=tmp_path) == {"entries": [], "damaged_kernels": []}
    assert run_json("prune", root=tmp_path)["pruned"] == []
    assert list(tmp_path.iterdir()) == []


def test_looking_needs_no_torch(root: Path) -> None:
    code = (
        "import sys; from compiled_engine.cli.app import app\n"
        f"for words in ['ls'], ['show', {KEY!r}], ['diff', {KEY!r}, {OTHER_KEY!r}], ['verify'], ['prune']:\n"
        f"    try: app(['cache', *words, '--cache-dir', {str(root)!r}])\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_show_takes_the_beginning_of_a_key(root: Path) -> None:
    shown = run("show", KEY[:6], root=root)
    assert f"folder     {root / 'compiled' / KEY}" in shown
    assert "  model.num_layers: 2" in shown
    assert "  compile.passes: merge_linears, silu_mul" in shown
    assert "source: digests of 1 files, with --json" in shown
    assert run_json("show", KEY, root=root)["factors"] == FACTORS


def test_a_key_that_is_not_there_is_an_error_with_the_nearest(root: Path) -> None:
    wrong = KEY[:5] + ("0" if KEY[5] != "0" else "1")
    for arguments in (["show", wrong], ["diff", KEY, wrong], ["verify", wrong]):
        message = run(*arguments, root=root, code=2)
        assert message.startswith(
            f"compiled-engine: error: KEY is '{wrong}', but no entry begins with it; the nearest:"
        )
        assert KEY[:12] in message
    assert "but 2 entries begin with it" in run("show", "", root=root, code=2)
    assert "is 'nowhere'; allowed: a folder" in run("ls", root=Path("nowhere"), code=2)


def test_show_in_a_cache_without_entries(tmp_path: Path) -> None:
    assert "but the cache has no entries" in run("show", "ab", root=tmp_path, code=2)


def test_diff_says_what_differs(root: Path) -> None:
    assert run("diff", KEY, OTHER_KEY, root=root) == (f"model.num_layers: 2 in {KEY[:12]}, 8 in {OTHER_KEY[:12]}\n")
    found = run_json("diff", KEY, OTHER_KEY, root=root)
    assert (found["a"], found["b"]) == (KEY, OTHER_KEY)
    (difference,) = found["differences"]
    assert (difference["factor"], difference["here"], difference["there"]) == ("config.model.num_layers", 2, 8)
    assert run("diff", KEY, KEY, root=root) == "no factor differs\n"


OPTIONS = ("--device", "cpu", "--mode", "compiled", "--max-num-batched-tokens", "256", "--max-num-seqs", "2")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A cache with the entry of an engine with OPTIONS, of one with 128 tokens, and of one with other source."""
    root = tmp_path / "own"
    for tokens in (256, 128):
        options = EngineOptions(device="cpu", mode="compiled", max_num_batched_tokens=tokens, max_num_seqs=2)
        build_once(root, cache_factors(resolve(options)))
    config = resolve(EngineOptions(device="cpu", mode="compiled", max_num_batched_tokens=256, max_num_seqs=2))
    environment = this_environment(config.device)
    source = {name: "other" for name in environment.source if name.startswith("passes/")}
    build_once(root, cache_factors(config, replace(environment, source=environment.source | source)))
    return root


def test_explain_a_hit(own: Path) -> None:
    explained = run_json("explain", *OPTIONS, root=own)
    assert (explained["status"], explained["nearest"], explained["differences"]) == ("hit", None, [])
    assert factors_key(explained["factors"]) == explained["key"]
    assert run("explain", *OPTIONS, root=own).startswith(f"hit: entry {explained['key'][:12]}, created just now")


def test_explain_a_miss_by_the_nearest_entry(own: Path) -> None:
    options = [*OPTIONS[:4], "--max-num-batched-tokens", "192", "--max-num-seqs", "2"]
    explained = run_json("explain", *options, root=own)
    assert explained["status"] == "miss"
    (difference,) = explained["differences"]
    there = f"in entry {explained['nearest'][:12]}"
    # Both entries of this source differ in the same one field; the last used is the one with 128.
    assert difference["words"] == f"scheduler.max_num_batched_tokens: 192 here, 128 {there}"
    shown = run("explain", *options, root=own).splitlines()
    assert shown[0].startswith(f"miss: entry {explained['key'][:12]} would be built. The nearest is ")
    assert shown[1:] == [f"  {difference['words']}"]


def test_explain_names_each_source_file_that_changed(own: Path) -> None:
    """Together they count as one difference, as other tokens do; of equally near entries the last used is taken."""
    key = run_json("explain", *OPTIONS, root=own)["key"]
    (own / "compiled" / key).rename(own / "away")
    (of_128,) = (key for key in entries(own) if '"other"' not in (own / "compiled" / key / "factors.json").read_text())
    use_was(own, of_128, DAY)
    explained = run_json("explain", *OPTIONS, root=own)
    assert (explained["key"], explained["status"]) == (key, "miss")
    words = [difference["words"] for difference in explained["differences"]]
    assert "source code: compiled_engine/passes/linear/silu_mul.py was changed" in words
    assert all(text.startswith("source code: compiled_engine/passes/") for text in words)


def test_explain_without_entries_and_with_a_damaged_one(own: Path, tmp_path: Path) -> None:
    assert "the cache has no entries to compare with" in run("explain", *OPTIONS, root=tmp_path)
    key = run_json("explain", *OPTIONS, root=own)["key"]
    (own / "compiled" / key / "extra").write_text("")
    explained = run_json("explain", *OPTIONS, root=own)
    assert (explained["status"], explained["damage"]) == ("damaged", "extra is not in its manifest")
    assert "will be set aside and built again" in run("explain", *OPTIONS, root=own)


def test_explain_before_there_is_a_cache(tmp_path: Path) -> None:
    assert run_json("explain", *OPTIONS, root=tmp_path / "new")["status"] == "miss"
    assert not (tmp_path / "new").exists()


def test_explain_where_nothing_is_looked_up(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cache", "explain", "--device", "cpu", "--mode", "eager"])
    assert (result.exit_code, "mode is eager" in result.stderr) == (2, True)
    result = CliRunner().invoke(app, ["cache", "explain", "--device", "cpu", "--mode", "compiled", "--no-cache"])
    assert (result.exit_code, "compile_cache is False" in result.stderr) == (2, True)


def test_verify_reads_every_byte(root: Path) -> None:
    assert run("verify", root=root).splitlines() == [
        *sorted(f"{key[:12]} ok" for key in (KEY, OTHER_KEY)),
        "2 entries read, 0 damaged",
    ]
    (root / "compiled" / KEY / "pieces" / "a.bin").write_bytes(b"artifacT")
    assert "damaged: pieces/a.bin was changed" in run("ls", root=root)
    assert run_json("show", KEY, root=root)["damage"] == "pieces/a.bin was changed"
    shown = run("verify", root=root, code=1)
    assert f"{KEY[:12]} damaged: pieces/a.bin was changed" in shown
    assert "2 entries read, 1 damaged" in shown
    assert run_json("verify", KEY[:8], root=root, code=1)["entries"][0]["status"] == "damaged"
    run("verify", OTHER_KEY[:8], root=root)


def test_verify_finds_an_entry_under_another_key(root: Path) -> None:
    (root / "compiled" / KEY).rename(root / "compiled" / ("0" * 32))
    assert "its factors are not those of its key" in run("verify", root=root, code=1)


def test_prune_deletes_what_was_not_used_for_long(root: Path) -> None:
    would = run("prune", "--older-than", "12h", "--dry-run", root=root)
    assert f"would delete: {OTHER_KEY} " in would
    assert len(entries(root)) == 2
    assert f"deleted: {OTHER_KEY} " in run("prune", "--older-than", "12h", root=root)
    assert entries(root) == [KEY]
    assert not (root / "compiled" / f"{OTHER_KEY}.lock").exists()
    assert find_or_build(root, FACTORS, Builder()).status == "hit"
    assert run("prune", "--older-than", "12h", root=root) == "0 B freed\n"


def test_prune_leaves_an_entry_alone_that_is_being_built(root: Path) -> None:
    with open_cache(root).locked(OTHER_KEY):
        (item,) = run_json("prune", "--older-than", "1h", root=root)["pruned"]
        assert (item["key"], item["removed"]) == (OTHER_KEY, False)
        assert "kept, in use by another process" in run("prune", "--older-than", "1h", root=root)
    assert len(entries(root)) == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("12h", 43200), ("30d", 30 * DAY), ("2w", 14 * DAY)]
)
def test_ages(text: str, seconds: int) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("800", 800), ("7B", 7), ("500MB", 500 * 10**6), ("1.5 gb", 15 * 10**8), ("2GiB", 2 << 30), ("0", 0)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("option", "text"),
    [("--older-than", "30"), ("--older-than", "d"), ("--older-than", "-1d"), ("--max-size", "5XB"), ("--max-size", "")],
)
def test_a_limit_that_is_none_is_an_error(option: str, text: str, root: Path) -> None:
    message = run("prune", option, text, root=root, code=2)
    assert f"{option[2:].replace('-', '_')} is '{text}'; allowed:" in message
    assert len(entries(root)) == 2


def test_sizes_and_ages_in_words() -> None:
    assert [size(n) for n in (0, 999, 2_050_000, 12_345_678_901)] == ["0 B", "999 B", "2.05 MB", "12.3 GB"]
    now = time.time()
    assert [ago(now - s) for s in (5, 61, 7200, 3 * DAY)] == ["just now", "1 min ago", "2 h ago", "3 d ago"]
