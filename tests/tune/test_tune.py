"""Tuning: which tiles are tried, what the ablation says of a pass, and that the engine reads what is written."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from compiled_engine.bench.bounds import Rates
from compiled_engine.cli.app import app
from compiled_engine.config import ModelConfig
from compiled_engine.options import EngineOptions
from compiled_engine.passes.framework.profile import parse_profile, profile_path
from compiled_engine.passes.linear.small_batch_linear_op import TOKEN_BUCKETS, Tiles
from compiled_engine.passes.registry import DEFAULT_PASSES
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve
from compiled_engine.tune import hopper_tuning, linear_tuning
from compiled_engine.tune.device_tuning import MeasuredProfile, merged, profile_text
from compiled_engine.tune.linear_tuning import candidates
from compiled_engine.tune.linears import SHARED_MEMORY, LinearCase, TunedLinear, cases_of
from compiled_engine.tune.pass_gains import Gain, gains, variants


def model(hidden_size: int = 4096) -> ModelConfig:
    config = resolve(EngineOptions(device="cpu")).model
    return replace(
        config, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_heads=32, num_kv_heads=8, head_dim=128
    )


@pytest.mark.parametrize("tokens", TOKEN_BUCKETS)
@pytest.mark.parametrize(("hidden_size", "num_ranks"), [(1024, 1), (4096, 1), (4096, 2)])
def test_every_linear_has_candidates_that_fit(tokens: int, hidden_size: int, num_ranks: int) -> None:
    for case in cases_of(model(hidden_size), tokens, num_ranks):
        tried = candidates(case)
        assert len(tried) > 5
        for tiles in tried:
            assert (tiles.tokens == 1) == (tokens == 1)
            assert tiles.split_k == 1 or not case.silu_mul
            if tokens > 1:
                step = (tiles.rows + tiles.tokens) * tiles.groups * tiles.block_k * 2
                several = tiles.groups * tiles.split_k * tiles.block_k < case.k
                assert step * (tiles.num_stages - 1 if several else 1) <= SHARED_MEMORY


def test_a_rank_has_a_share_of_each_linear() -> None:
    """Its norms and residual adds are part of the sums over the ranks."""
    whole, part = (cases_of(model(), 8, num_ranks) for num_ranks in (1, 2))
    for one, two in zip(whole, part, strict=True):
        assert two.num_rows * two.k * 2 == one.num_rows * one.k
        assert (two.norm, two.residual) == (False, False)


def test_a_profile_is_read_as_it_was_written() -> None:
    case = LinearCase("down", 8, 1024, 3072, False, False, True)
    tiles = Tiles(8, 64, 256, split_k=8, num_stages=5)
    measured = MeasuredProfile(
        "A GPU", {"silu_mul": {1: 2.5, 64: -9.0}}, 1.5, (TunedLinear(case, tiles, 4.0, 6.0, 1.0),)
    )
    read = parse_profile(profile_text(measured.as_record()))
    assert (read.device, read.noise_us, read.gains_us) == ("A GPU", 1.5, {"silu_mul": {1: 2.5, 64: -9.0}})
    assert Tiles(**read.tiles[8, 1024, 3072, False]) == tiles


def a_profile(rows: list[tuple[int, int]], gain: float) -> dict[str, Any]:
    linears = [{"tokens": t, "num_rows": n, "k": 8, "silu_mul": False, "tiles": {"gain": gain}} for t, n in rows]
    return {"device": "A GPU", "noise_us": 1.0, "gains_us": {"silu_mul": {"1": gain}}, "linears": linears}


def test_another_shape_joins_what_was_measured() -> None:
    """Of a shape that is measured again nothing old stays; a pass gains what it gains of every shape."""
    both = merged(a_profile([(1, 16), (1, 32)], 2.0), a_profile([(1, 16), (8, 16), (1, 64)], 5.0))
    read = parse_profile(profile_text(both))
    assert {key[:2]: tiles["gain"] for key, tiles in read.tiles.items()} == {(1, 64): 5.0, (1, 16): 2.0, (1, 32): 2.0}
    assert read.gains_us == {"silu_mul": {1: 2.0}}


@pytest.mark.parametrize("kind", ["a folder", "no profile"])
def test_where_a_profile_cannot_go_is_said_before_it_is_measured(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiled_engine.tune.device_tuning.device_name", lambda: "A GPU")
    monkeypatch.setattr("compiled_engine.tune.device_tuning.tune_device", pytest.fail)
    path = tmp_path if kind == "a folder" else tmp_path / "notes.json"
    if kind == "no profile":
        path.write_text('{"a": 1}')
    result = CliRunner().invoke(app, ["tune", "--shape", "qwen3-0.6b", "-o", str(path)])
    assert result.exit_code == 2
    assert f"output is {str(path)!r}" in result.stderr
    assert kind in result.stderr


def test_the_gain_of_a_pass_is_what_leaving_it_out_costs() -> None:
    samples = {"all": [99.0, 100.0, 102.0], "without silu_mul": [130.0, 131.0, 129.0], "without rms_norm": [98.0] * 3}
    assert gains(samples, 8) == {"silu_mul": Gain(8, 30.0, 3.0), "rms_norm": Gain(8, -2.0, 3.0)}


def test_the_variants_leave_each_pass_out() -> None:
    names = [graph_pass.name for graph_pass in DEFAULT_PASSES]
    by_name = {variant.name: variant.passes for variant in variants(names)}
    assert by_name.pop("all") == tuple(names)
    assert by_name.keys() == {f"without {name}" for name in names}
    for name in names:
        assert set(names) - set(by_name[f"without {name}"]) == {name}


def test_the_profile_that_ships_is_whole() -> None:
    path = profile_path("NVIDIA H200")
    profile = parse_profile(path.read_text())
    assert profile.device == "NVIDIA H200"
    # These find nothing to do in the shapes that are tuned, or are newer; of gated_linear the tiles below decide.
    unmeasured = {"experts", "layer_norm", "all_reduce_residual_rms_norm", "sequence_parallel"}
    unmeasured |= {"rope_attend", "gated_linear", "quantise_activations"}
    assert set(profile.gains_us) == {graph_pass.name for graph_pass in DEFAULT_PASSES} - unmeasured
    assert {tokens for tokens, *_ in profile.tiles} == set(TOKEN_BUCKETS)
    for row in json.loads(path.read_text())["linears"]:
        assert (Tiles(**row["tiles"]).tokens == 1) == (row["tokens"] == 1)


class QuickChain:
    """Whose linears are all right, and each slower than the one before it."""

    times = itertools.count(1.0)

    def __init__(self, cases: list[LinearCase], layers: int | None = None) -> None:
        pass

    def run(self, linears: list[object], layers: int | None = None) -> torch.Tensor:
        return torch.ones(1)

    def microseconds(self, linears: list[object], repeats: int) -> float:
        return next(self.times)


@pytest.mark.parametrize("module", [linear_tuning, hopper_tuning])
def test_bounds_are_those_of_the_device_at_hand(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(module, "device_rates", lambda device, dtype: Rates(2e12, 1e15, "by hand"))
    monkeypatch.setattr(module, "Chain", QuickChain)
    case = LinearCase("down", 8, 4096, 4096, False, False, True)
    if module is linear_tuning:
        (tuned,) = linear_tuning.tune_linears([case], SilentProgress(), workers=0)
    else:
        (tuned,) = hopper_tuning.tune_hopper_linears([case], SilentProgress())
    assert tuned.bound_microseconds == pytest.approx(4096 * 4096 * 2 / 2e6)
