"""Tuning a whole device, with a timer that the test scripts: what is measured, kept and written, quick or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tuned_linears import PLAIN, QuickChain
from typer.testing import CliRunner

from compiled_engine.bench.bounds import Rates
from compiled_engine.bench.shapes import write_shape
from compiled_engine.cli.app import app
from compiled_engine.config import EngineConfig
from compiled_engine.passes.framework.profile import FOLDER_VARIABLE, load_profile, parse_profile, profiles_of_others
from compiled_engine.passes.linear.hopper_linear import HopperTiles
from compiled_engine.passes.linear.hopper_product import ProductTiles
from compiled_engine.passes.linear.small_batch_linear_op import Tiles, choose_tiles
from compiled_engine.process.progress import SilentProgress
from compiled_engine.tune import device_tuning, hopper_tuning, linear_tuning, product_tuning
from compiled_engine.tune.candidates import FEW, Fastest, all_candidates, few_candidates, likely
from compiled_engine.tune.device_tuning import MeasuredProfile
from compiled_engine.tune.linears import LinearCase, Outcome, TunedLinear, at_each, key
from compiled_engine.tune.pass_gains import Gain

NUM_SMS = 132


@dataclass
class Timer:
    """Microseconds of a layer: the least for tiles with large numbers, and 1000 for the library.

    measured: how often each tiles of a case were timed. interrupted_after: timings before Ctrl-C; None: all.
    """

    measured: Counter[tuple[LinearCase, Any]]
    interrupted_after: int | None = None

    def microseconds(self, cases: Sequence[LinearCase], linears: Sequence[Any]) -> float:
        if self.interrupted_after is not None and self.measured.total() >= self.interrupted_after:
            raise KeyboardInterrupt
        found = [tiles_of(linear) for linear in linears]
        self.measured.update(zip(cases, found, strict=True))
        return sum(time_of(tiles) for tiles in found)


def tiles_of(linear: Any) -> Any:
    """Return the tiles with which a linear was bound; None for the library."""
    bound = (*getattr(linear, "args", ()), *getattr(linear, "keywords", {}).values())
    return next((each for each in bound if isinstance(each, Tiles | HopperTiles | ProductTiles)), None)


def time_of(tiles: Any) -> float:
    if tiles is None:
        return 1000.0
    numbers = [each for part in astuple(tiles) for each in (part if isinstance(part, tuple) else (part,))]
    kernel = 10.0 if isinstance(tiles, Tiles) else 1.0
    return kernel + 1000.0 / (1 + sum(numbers)) / 1000


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    """A described GPU, whose linears are timed by the script."""
    scripted = Timer(Counter())

    class Chain(QuickChain):
        def microseconds(self, linears: list[object], repeats: int, sustained_ms: float = 0.0) -> float:
            return scripted.microseconds(self.cases, linears)

    def linears_by_hand(config: EngineConfig, num_ranks: int) -> list[LinearCase]:
        return PLAIN["qwen3-8b" if config.model.hidden_size == 4096 else "qwen3-0.6b", num_ranks]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device_tuning, "multiprocessors", lambda device: NUM_SMS)
    monkeypatch.setattr(device_tuning, "device_name", lambda: "A GPU")
    monkeypatch.setattr(device_tuning, "linears_of", linears_by_hand)
    monkeypatch.setattr(device_tuning, "compile_first", lambda launches, progress: None)
    monkeypatch.setattr(device_tuning, "measure", lambda *others: {"silu_mul": [Gain(1, 30.0, 3.0)], "layer_norm": []})
    for module in (linear_tuning, hopper_tuning, product_tuning):
        monkeypatch.setattr(module, "device_rates", lambda device, dtype: Rates(2e12, 1e15, "by hand"))
        monkeypatch.setattr(module, "Chain", Chain)
    return scripted


def kinds(profile: MeasuredProfile) -> Counter[str]:
    return Counter(name for name, _ in profile.measured)


def test_a_profile_is_kept_whenever_something_was_measured(timer: Timer, tmp_path: Path) -> None:
    folders = [write_shape(tmp_path / name, name) for name in ("qwen3-0.6b", "qwen3-8b")]
    kept: list[MeasuredProfile] = []
    last = device_tuning.tune_device(folders, SilentProgress(), (1, 2), kept.append)
    assert kept[-1] == last
    counts = [len(profile.measured) + len(profile.gains_us) for profile in kept]
    assert counts == sorted(counts)
    # Of a token count the layer's linears are measured together, then the head; Hopper's kernels one by one.
    assert [len(profile.measured) for profile in kept[:9]] == [4, 5, 9, 10, 14, 15, 19, 20, 21]
    assert kinds(last) == {"linears": 4 * 20, "hopper_linears": 4 * 25, "hopper_products": 4 * 17}
    assert [profile.noise_us for profile in kept[-3:]] == [0.0, 3.0, 3.0]
    assert last.gains_us == {"silu_mul": {1: 30.0}}


def test_a_quick_search_measures_few_tiles_and_no_gains(
    timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tuning, "measure", pytest.fail)
    folder = write_shape(tmp_path / "shape", "qwen3-8b")
    quick = device_tuning.tune_device([folder], SilentProgress(), quick=True)
    tried = Counter((case.num_tokens, key(case), type(tiles)) for case, tiles in timer.measured if tiles is not None)
    assert max(tried.values()) <= FEW + 1
    assert kinds(quick) == {"linears": 20, "hopper_linears": 25, "hopper_products": 17}
    assert quick.gains_us == {}
    fast = few_candidates(profiles_of_others("A GPU"), NUM_SMS)
    for tuned in quick.hopper_linears:
        listed = fast.hopper(tuned.case)
        assert time_of(tuned.tiles) == min(map(time_of, listed))


def test_a_quick_search_writes_what_the_engine_reads(
    timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    result = CliRunner().invoke(app, ["tune", "--quick", "--shape", "qwen3-8b"])
    assert result.exit_code == 0, result.stderr
    assert "left" not in result.stderr  # every stage has ended
    profile = load_profile("A GPU")
    assert profile is not None
    assert len(profile.hopper_tiles) == 25
    tiles = choose_tiles(64, 4096, 12288, False, torch.bfloat16, "A GPU")
    case = replace(PLAIN["qwen3-8b", 1][3], num_tokens=64)
    assert time_of(tiles) == min(map(time_of, few_candidates(profiles_of_others("A GPU"), NUM_SMS).small(case)))
    assert [path.name for path in tmp_path.iterdir()] == ["a_gpu.json"]


def test_an_interrupted_search_keeps_what_it_has_measured(
    timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    timer.interrupted_after = 400
    path = tmp_path / "profile.json"
    result = CliRunner().invoke(app, ["tune", "--quick", "--shape", "qwen3-8b", "-o", str(path)])
    assert result.exit_code == 130
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]
    first = parse_profile(path.read_text()).tiles
    assert 0 < len(first) < 20
    assert str(path) in result.stderr
    timer.interrupted_after = None
    assert CliRunner().invoke(app, ["tune", "--quick", "--shape", "qwen3-0.6b", "-o", str(path)]).exit_code == 0
    assert parse_profile(path.read_text()).tiles.items() >= first.items()


@pytest.mark.parametrize(("shape", "num_ranks"), PLAIN)
def test_few_candidates_are_some_of_all(shape: str, num_ranks: int) -> None:
    others = profiles_of_others("A GPU")
    few, every = few_candidates(others, NUM_SMS), all_candidates(NUM_SMS)
    cases = at_each(PLAIN[shape, num_ranks], (1, 8, 32, 64))
    for case in cases:
        untuned = choose_tiles(case.num_tokens, case.num_rows, case.k, case.silu_mul, torch.bfloat16)
        first, *rest = few.small(case)
        assert first == untuned
        assert set(rest) <= set(every.small(case))
        assert len(rest) <= FEW
        assert set(few.hopper(case)) <= set(every.hopper(case))
    for case in product_tuning.product_cases(PLAIN[shape, num_ranks]):
        assert set(few.products(case)) <= set(every.products(case))


def test_tiles_of_near_shapes_come_first() -> None:
    """Tiles of a weight twice as large are as far as tiles that differ in one field."""
    case = LinearCase("down", 8, 4096, 4096, False, False, True)
    near, far = Fastest(4096, 4096, HopperTiles(1, 8, 8, 64)), Fastest(16384, 16384, HopperTiles(3, 8, 4))
    tiles = [HopperTiles(2, 8, 6, 64), HopperTiles(3, 8, 4), HopperTiles(1, 8, 6, 64), HopperTiles(1, 8, 8, 64)]
    assert likely(case, tiles, iter([far, near])) == [tiles[3], tiles[2], tiles[0], tiles[1]]
    many = [HopperTiles(1, 8, stages) for stages in range(2, 20)]
    assert likely(case, many, iter(())) == many[:FEW]


def test_the_tiles_of_the_own_card_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a quick search of a tuned card finds nothing slower."""
    shipped = load_profile("NVIDIA H200")
    assert shipped is not None
    every, few = all_candidates(NUM_SMS), few_candidates([shipped], NUM_SMS)
    checked = 0
    for tokens, rows, k, gated in shipped.hopper_tiles:
        case = LinearCase("layer", tokens, rows, k, False, gated, False)
        own = HopperTiles(**shipped.hopper_tiles[tokens, rows, k, gated])
        if own in every.hopper(case):
            assert own in few.hopper(case)
            checked += 1
    assert checked > 40
    assert {each.device for each in profiles_of_others("NVIDIA H200")} == {"NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize("beaten", [False, True])
def test_tiles_in_registers_are_kept_unless_hoppers_kernel_beats_them(
    beaten: bool, timer: Timer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch prefers them to it; others stay, since a launch prefers it to these."""
    here, there = PLAIN["qwen3-0.6b", 1][:2]
    small = [
        TunedLinear(replace(here, num_tokens=8), Tiles(8, 8, 256, 4, ahead=1), 4.0, 6.0, 1.0),
        TunedLinear(replace(there, num_tokens=8), Tiles(8, 16, 128), 4.0, 6.0, 1.0),
    ]
    hopper = [TunedLinear(each.case, HopperTiles(1, 8, 3), 3.0, 6.0, 1.0) for each in small[1 - beaten :]]
    found: dict[str, list[Any]] = {
        "tune_linears": [[Outcome(each.case, each) for each in small]],
        "tune_hopper_linears": [Outcome(each.case, each) for each in hopper],
        "tune_products": [],
    }
    for name, outcomes in found.items():
        monkeypatch.setattr(device_tuning, name, lambda *others, outcomes=outcomes: iter(outcomes))
    profile = device_tuning.tune_device([write_shape(tmp_path / "shape", "qwen3-0.6b")], SilentProgress())
    assert list(profile.linears) == small[beaten:]
    assert list(profile.hopper_linears) == hopper
