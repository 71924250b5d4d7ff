"""Blocks that the KV cache evicts come back from host memory, and only with the contents that their hashes stand for.

The fake runner makes the copies and checks every read, so a block that was saved too early, lost in a failure or
overwritten in its slot cannot go unnoticed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lagging_copies import NUM_RANKS, LaggingCopies
from simulated_engine import SimulatedEngine

from compiled_engine.engine.block_pool import hash_blocks
from compiled_engine.features.kv_offload.block_files import BlockFiles
from compiled_engine.features.kv_offload.break_even import FIRST_GUESS, NEVER
from compiled_engine.features.kv_offload.extras import BLOCKS
from compiled_engine.features.kv_offload.file_index import FileIndex
from compiled_engine.features.kv_offload.plan import HostBlocks
from compiled_engine.features.recurrence.snapshots import StateSnapshots
from compiled_engine.sampling.params import SamplingParams

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def engine_with(num_slots: int, least_tokens: int = 1, num_blocks: int = 8) -> tuple[SimulatedEngine, HostBlocks]:
    copies = LaggingCopies(random.Random(0))
    blocks = HostBlocks(num_slots, copies.call, least_tokens=least_tokens)
    engine = SimulatedEngine(block_size=4, num_blocks=num_blocks, max_num_seqs=2, further=[blocks], copies=copies)
    return engine, blocks


def cached_tokens(engine: SimulatedEngine, request_id: str, prompt: list[int]) -> int:
    """Run a request alone; return how many of its tokens were cached."""
    record = engine.add(request_id, prompt, params=ONE)
    engine.run()
    assert record.num_cached_tokens is not None
    return record.num_cached_tokens


def test_an_evicted_prefix_is_loaded() -> None:
    engine, blocks = engine_with(16)
    first, second = [1] * 25, [2] * 25
    assert cached_tokens(engine, "a", first) == 0
    assert cached_tokens(engine, "b", second) == 0  # evicts the end of the first
    assert cached_tokens(engine, "c", first) == 24
    metrics = blocks.metrics()
    assert metrics["kv_offload_hits"] == 4 * metrics["kv_offload_loaded"] > 0
    assert metrics["kv_offload_queries"] == 25 + 25 + 1 + metrics["kv_offload_hits"]
    assert metrics["kv_offload_saved"] == metrics["kv_offload_blocks"] == 12


def test_few_tokens_are_computed_again() -> None:
    first, second = [1] * 25, [2] * 25
    found = []
    for least in (1, 16, 17, 24, 25):
        engine, blocks = engine_with(16, least)
        cached_tokens(engine, "a", first)
        cached_tokens(engine, "b", second)
        found.append((cached_tokens(engine, "c", first), blocks.metrics()["kv_offload_loaded"]))
    num_loaded = found[0][1]
    assert found[0][0] == 24
    for least, (cached, loaded) in zip((1, 16, 17, 24, 25), found, strict=True):
        assert (cached, loaded) == ((24, num_loaded) if least <= 4 * num_loaded else (24 - 4 * num_loaded, 0))


def test_the_least_tokens_of_a_load_follow_measured_times() -> None:
    """Copies take so long that no load pays once steps were timed."""
    copies = LaggingCopies(random.Random(0), copy_seconds={BLOCKS: 1e6})
    blocks = HostBlocks(500, copies.call)
    engine = SimulatedEngine(
        block_size=4, num_blocks=80, budget=400, max_num_seqs=2, max_model_len=400, further=[blocks], copies=copies
    )
    found = []
    for name in (0, 1, 0, 2, 3, 4, 0):
        record = engine.add(f"r{len(found)}", [name] * 301, params=SamplingParams(max_tokens=3, ignore_eos=True))
        engine.run()
        metrics = blocks.metrics()
        found.append((record.num_cached_tokens, metrics["kv_offload_hits"], metrics["kv_offload_least_tokens"]))
    (cached, hits, _), (cached_at_last, hits_at_last, _) = found[2], found[-1]
    assert cached == 300 > cached_at_last
    assert hits == hits_at_last > FIRST_GUESS
    assert [least for _, _, least in found[:3]] == [FIRST_GUESS] * 3
    assert found[-1][2] == NEVER


def engine_with_states(num_snapshots: int, num_state_slots: int) -> tuple[SimulatedEngine, HostBlocks]:
    copies, snapshots = LaggingCopies(random.Random(0)), StateSnapshots(num_snapshots, 4, least_gain=1)
    blocks = HostBlocks(64, copies.call, snapshots=snapshots, num_state_slots=num_state_slots, least_tokens=1)
    engine = SimulatedEngine(
        block_size=4, num_blocks=8, max_num_seqs=2, snapshots=snapshots, further=[blocks], copies=copies
    )
    return engine, blocks


def test_an_evicted_snapshot_is_loaded_with_its_blocks() -> None:
    engine, blocks = engine_with_states(1, 4)
    for name in range(3):
        assert cached_tokens(engine, f"r{name}", [name] * 27) == 0
    assert cached_tokens(engine, "again", [0] * 27) == 24
    assert cached_tokens(engine, "longer", [0] * 29) == 24
    metrics = blocks.metrics()
    assert metrics["kv_offload_saved_states"] == metrics["kv_offload_states"] == 4
    assert metrics["kv_offload_loaded_states"] == 1
    assert metrics["kv_offload_hits"] == 24


def test_a_snapshot_that_its_slot_lost_is_not_found() -> None:
    engine, blocks = engine_with_states(1, 1)
    for name in range(3):
        cached_tokens(engine, f"r{name}", [name] * 27)
    assert cached_tokens(engine, "again", [0] * 27) == 0
    assert blocks.metrics()["kv_offload_loaded"] == 0, "blocks without a snapshot were loaded"


def test_blocks_behind_the_last_snapshot_are_not_loaded() -> None:
    engine, blocks = engine_with_states(4, 8)
    cached_tokens(engine, "short", [0] * 11)
    cached_tokens(engine, "long", [0] * 27)
    for name in range(1, 4):
        cached_tokens(engine, f"r{name}", [name] * 27)
    assert cached_tokens(engine, "between", [0] * 19) == 8
    assert blocks.metrics()["kv_offload_loaded"] == 2


def test_the_least_recently_used_slot_is_given_away() -> None:
    engine, blocks = engine_with(6)
    for name in range(6):
        cached_tokens(engine, f"r{name}", [name] * 25)
        blocks.check_integrity()
        assert blocks.metrics()["kv_offload_blocks"] <= 6
    assert cached_tokens(engine, "first", [0] * 25) == 0
    assert cached_tokens(engine, "again", [5] * 25) > 0


def test_a_reset_forgets_host_memory_too() -> None:
    engine, blocks = engine_with(16)
    cached_tokens(engine, "a", [1] * 25)
    cached_tokens(engine, "b", [2] * 25)
    engine.scheduler.reset_prefix_cache()
    assert blocks.metrics()["kv_offload_blocks"] == 0
    assert cached_tokens(engine, "c", [1] * 25) == 0


def test_others_run_while_a_request_awaits_its_copies() -> None:
    copies = LaggingCopies(random.Random(0), lag=0.0)
    blocks = HostBlocks(64, copies.call, least_tokens=1)
    engine = SimulatedEngine(block_size=4, num_blocks=16, max_num_seqs=4, further=[blocks], copies=copies)
    for name in range(4):
        cached_tokens(engine, f"r{name}", [name] * 25)
    other = engine.add("other", [9] * 5, params=SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    copies.lag = 1.0  # no copy is made
    waiting = engine.add("waiting", [0] * 25, params=ONE)
    late = engine.add("late", [8] * 5, params=ONE)
    for _ in range(5):
        engine.step()
    assert len(other.token_ids) == 6
    assert late.finish_reason == "length"
    assert waiting.num_cached_tokens is None
    assert engine.scheduler.metrics()["waiting_by_reason"]["feature"] == 1
    copies.lag = 0.0
    engine.run()
    assert waiting.num_cached_tokens == 24


def test_there_is_a_slot() -> None:
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 0"):
        engine_with(0)


def random_snapshots(rng: random.Random, block_size: int) -> StateSnapshots | None:
    """Return none, or so few that most prefixes find theirs in host memory."""
    count = rng.choice([0, 0, 1, 3])
    return StateSnapshots(count, block_size, least_gain=1) if count else None


def some_prompt(rng: random.Random, roots: Sequence[list[int]]) -> list[int]:
    """Return the start of a root and other tokens. Some starts are frequent, so that prompts part at snapshots."""
    return rng.choice(roots)[: rng.choice([12, 24, rng.randrange(1, 31)])] + [rng.randrange(11) for _ in range(3)]


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(("steps_in_flight", "several"), [(1, 1), (2, 1), (2, 4)])
def test_every_token_is_right_under_random_operations(steps_in_flight: int, several: int) -> None:
    """Tiny pools with preemption, aborts, failures and resets, and fewer slots than blocks or more."""
    num_loaded, num_states, num_failures, num_waits = 0, 0, 0, 0
    for seed in range(25):
        rng = random.Random(1000 * several + seed)
        block_size = rng.choice([1, 2, 4])
        num_blocks = rng.choice([44, 60, 120]) // block_size
        copies = LaggingCopies(rng, rng.choice([0.2, 0.6, 0.9]))
        snapshots = random_snapshots(rng, block_size)
        blocks = HostBlocks(
            rng.choice([1, 5, num_blocks // 2, 4 * num_blocks]),
            copies.call,
            snapshots=snapshots,
            num_state_slots=rng.choice([1, 3, 20]),
            least_tokens=rng.choice([1, 8]),
            together=rng.choice([1, 4]),
        )
        engine = SimulatedEngine(
            block_size=block_size,
            num_blocks=num_blocks,
            budget=rng.choice([7, 30, 100]),
            max_num_seqs=6,
            max_model_len=40,
            steps_in_flight=steps_in_flight,
            max_new_tokens_per_step=several,
            yields=lambda most: rng.randrange(most + 1),  # noqa: B023
            snapshots=snapshots,
            further=[blocks],
            copies=copies,
        )
        roots = [[rng.randrange(11) for _ in range(30)] for _ in range(5)]
        for number in range(120):
            choice = rng.random()
            if choice < 0.3:
                prompt = some_prompt(rng, roots)
                params = SamplingParams(max_tokens=rng.choice([1, 5, 30]), ignore_eos=True)
                engine.add(f"r{number}", prompt, params=params)
            elif choice < 0.35 and engine.live:
                engine.abort(rng.choice([*engine.live]))
            elif choice < 0.37 and engine.in_flight:
                engine.fail_step(launching=rng.random() < 0.5)
                num_failures += 1
            elif choice < 0.375:
                engine.scheduler.reset_prefix_cache(of_running=rng.random() < 0.5 and not engine.live)
            elif choice < 0.6 and len(engine.in_flight) < steps_in_flight:
                engine.try_step()
            else:
                engine.step()
            engine.scheduler.check_integrity()
            blocks.check_integrity()
        engine.run()
        num_loaded += blocks.metrics()["kv_offload_loaded"]
        num_states += blocks.metrics().get("kv_offload_loaded_states", 0)
        num_waits += copies.num_waits
    assert num_loaded > 100
    assert num_states > 5
    assert num_failures > 5
    assert num_waits > 10


def restarted_index(folder: Path, names: Iterable[str], limit: int) -> FileIndex:
    """Return the index of a start that finds files with these names."""
    for rank in range(NUM_RANKS):
        for name in names:
            path = BlockFiles(folder / "model" / "0" / str(rank)).path_of(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return FileIndex(folder / "model", limit, NUM_RANKS, most_bytes=1 << 30)


@pytest.mark.product(one_in=1000, each=("steps_in_flight",))
@pytest.mark.parametrize("faults", [0.0, 0.3])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_every_token_is_right_with_files_under_random_operations(
    steps_in_flight: int, faults: float, tmp_path: Path
) -> None:
    """Fewer files than blocks or more, and several starts, which find the files of those before."""
    totals: Counter[str] = Counter()
    for seed in range(8):
        rng = random.Random(seed)
        block_size = rng.choice([2, 4])
        roots = [[rng.randrange(11) for _ in range(30)] for _ in range(4)]
        files: dict[str, list[int | None]] = {}
        limit, has_states = rng.choice([5, 200]), seed % 2 == 1
        for start in range(3):
            copies = LaggingCopies(rng, rng.choice([0.2, 0.6]), faults)
            copies.files = files
            index = restarted_index(tmp_path / f"{seed}.{start}", files, limit)
            num_found = len(index)
            assert num_found == min(len(files), limit)
            snapshots = StateSnapshots(rng.choice([1, 3]), block_size, least_gain=1) if has_states else None
            slots: dict[str, Any] = {"snapshots": snapshots, "num_state_slots": rng.choice([1, 2, 8])}
            blocks = HostBlocks(rng.choice([3, 8, 20]), copies.call, index, **slots, least_tokens=1, together=1)
            engine = SimulatedEngine(
                block_size=block_size,
                num_blocks=60 // block_size,
                max_num_seqs=6,
                max_model_len=40,
                steps_in_flight=steps_in_flight,
                snapshots=snapshots,
                further=[blocks],
                copies=copies,
            )
            for number in range(60):
                choice = rng.random()
                if choice < 0.4:
                    prompt = some_prompt(rng, roots)
                    engine.add(f"r{number}", prompt, params=SamplingParams(max_tokens=3, ignore_eos=True))
                elif choice < 0.45 and engine.live:
                    engine.abort(rng.choice([*engine.live]))
                elif choice < 0.47 and engine.in_flight:
                    engine.fail_step()
                else:
                    engine.step()
                engine.scheduler.check_integrity()
                blocks.check_integrity()
                assert blocks.metrics()["kv_offload_files"] <= limit
            engine.run()
            totals += Counter(blocks.metrics())
            totals["found again"] += num_found > 0 and blocks.metrics()["kv_offload_read"] > 0
            blocks.close()
    assert totals["kv_offload_written"] > 100
    assert totals["kv_offload_read"] > 10
    assert totals["kv_offload_read_states"] > 2
    assert totals["found again"] > 3
    assert totals["kv_offload_file_errors"] > 0 or not faults


def test_files_of_a_prefix_that_the_kv_cache_has_stay(tmp_path: Path) -> None:
    """The prefix is used all the time and never read, so its files were written long ago."""
    copies, index = LaggingCopies(random.Random(0), lag=0.0), restarted_index(tmp_path, (), 14)
    blocks = HostBlocks(64, copies.call, index, least_tokens=1, together=1)
    engine = SimulatedEngine(block_size=4, num_blocks=16, max_num_seqs=2, further=[blocks], copies=copies)
    for name in range(1, 6):
        cached_tokens(engine, f"used.{name}", [0] * 25)
        cached_tokens(engine, f"r{name}", [name] * 25)
    used = engine.add("last", [0] * 25, params=ONE)
    hashes: list[bytes] = []
    hash_blocks(hashes, used.request.prefix_root, used.request.prompt_token_ids, 4)
    assert len(index) == 14
    assert all(each.hex() in index for each in hashes)
    engine.run()
    blocks.close()


def test_a_reset_ends_the_use_of_files(tmp_path: Path) -> None:
    """Blocks that are computed afterwards may be of other weights."""
    copies = LaggingCopies(random.Random(0), lag=0.0)
    index = restarted_index(tmp_path, (), 100)
    blocks = HostBlocks(3, copies.call, index, least_tokens=1)
    engine = SimulatedEngine(block_size=4, num_blocks=8, max_num_seqs=2, further=[blocks], copies=copies)
    first, second = [1] * 25, [2] * 25
    cached_tokens(engine, "a", first)
    cached_tokens(engine, "b", second)
    assert cached_tokens(engine, "c", first) > 0
    copies.do_some()  # without lag: all
    known = {*copies.files}
    engine.scheduler.reset_prefix_cache()
    assert cached_tokens(engine, "d", first) == 0
    cached_tokens(engine, "e", [3] * 25)
    copies.do_some()
    assert {*copies.files} == known
    blocks.close()
