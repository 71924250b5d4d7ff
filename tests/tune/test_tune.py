"""Tuning: which tiles are tried, what the ablation says of a pass, and that the engine reads what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tuned_linears import PLAIN, QuickChain, layer
from typer.testing import CliRunner

from compiled_engine.bench.bounds import Rates
from compiled_engine.cli.app import app
from compiled_engine.passes.framework.profile import parse_profile, profile_path
from compiled_engine.passes.linear.hopper_linear import HopperTiles
from compiled_engine.passes.linear.small_batch_linear_op import TOKEN_BUCKETS, Tiles, choose_tiles
from compiled_engine.passes.registry import DEFAULT_PASSES
from compiled_engine.process.progress import SilentProgress
from compiled_engine.tune import hopper_tuning, linear_tuning, product_tuning
from compiled_engine.tune.device_tuning import MeasuredProfile, merged, profile_text
from compiled_engine.tune.hopper_tuning import hopper_candidates
from compiled_engine.tune.linear_tuning import MOST_REGISTERS, candidates
from compiled_engine.tune.linears import SHARED_MEMORY, LinearCase, TunedLinear, at_each
from compiled_engine.tune.on_hopper import worthwhile
from compiled_engine.tune.pass_gains import Gain, differing, gains, variants


@pytest.mark.parametrize("tokens", TOKEN_BUCKETS)
@pytest.mark.parametrize(("shape", "num_ranks"), PLAIN)
def test_every_linear_has_candidates_that_fit(tokens: int, shape: str, num_ranks: int) -> None:
    for case in at_each(PLAIN[shape, num_ranks], [tokens]):
        tried = candidates(case)
        assert len(tried) > 3
        for tiles in tried:
            assert (tiles.tokens == 1) == (tokens == 1)
            assert tiles.split_k == 1 or not case.silu_mul
            if tiles.ahead:
                assert case.k % (tiles.groups * tiles.block_k) == 0
                assert tiles.ahead * tiles.rows * tiles.block_k // 64 <= MOST_REGISTERS
            elif tokens > 1:
                step = (tiles.rows + tiles.tokens) * tiles.groups * tiles.block_k * 2
                several = tiles.groups * tiles.split_k * tiles.block_k < case.k
                assert step * (tiles.num_stages - 1 if several else 1) <= SHARED_MEMORY


def test_a_profile_is_read_as_it_was_written() -> None:
    case = LinearCase("down", 8, 1024, 3072, False, False, True)
    tiles = Tiles(8, 64, 256, split_k=8, num_stages=5)
    measured = MeasuredProfile(
        "A GPU", {"silu_mul": {1: 2.5, 64: -9.0}}, 1.5, (TunedLinear(case, tiles, 4.0, 6.0, 1.0),)
    )
    read = parse_profile(profile_text(measured.as_record()))
    assert (read.device, read.noise_us, read.gains_us) == ("A GPU", 1.5, {"silu_mul": {1: 2.5, 64: -9.0}})
    assert Tiles(**read.tiles[8, 1024, 3072, False]) == tiles


def tuned(name: str, tokens: int, num_rows: int, microseconds: float) -> TunedLinear:
    case = LinearCase(name, tokens, num_rows, 4096, False, False, True)
    return TunedLinear(case, Tiles(tokens, 4, 1024), microseconds, 6.0, 1.0)


def test_what_was_not_measured_again_is_kept() -> None:
    """A case that was measured again and is now faster with another kernel is left out."""
    old = [tuned("down", tokens, rows, 4.0) for tokens, rows in ((1, 16), (8, 16), (1, 32), (8, 32))]
    gains = {"silu_mul": {1: 5.0, 8: -1.0}}
    known = MeasuredProfile("A GPU", gains, 2.0, tuple(old), tuple(old[:2])).as_record()
    measured = {("linears", (1, 16, 4096, False)), ("hopper_linears", (1, 16, 4096, False))}
    new = MeasuredProfile("A GPU", {}, 0.0, (tuned("down", 1, 16, 3.0),), measured=frozenset(measured))
    both = merged(new, known)
    times = {(row["tokens"], row["num_rows"]): row["us"] for row in both["linears"]}
    assert times == {(1, 16): 3.0, (8, 16): 4.0, (1, 32): 4.0, (8, 32): 4.0}
    assert [(row["tokens"], row["num_rows"]) for row in both["hopper_linears"]] == [(8, 16)]
    read = parse_profile(json.dumps(both))
    assert (read.gains_us, read.noise_us) == (gains, 2.0)
    again = merged(replace(new, gains_us={"silu_mul": {1: 2.0, 8: 2.0}, "rope": {1: 1.0}}, noise_us=1.0), both)
    read = parse_profile(json.dumps(again))
    assert (read.gains_us, read.noise_us) == ({"silu_mul": {1: 2.0, 8: -1.0}, "rope": {1: 1.0}}, 1.0)


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
    unmeasured |= {"rope_attend", "gated_convolution", "gated_linear", "quantise_activations", "reorder_codes", "top_k"}
    assert set(profile.gains_us) == {graph_pass.name for graph_pass in DEFAULT_PASSES} - unmeasured
    assert {tokens for tokens, *_ in profile.tiles} == set(TOKEN_BUCKETS)
    for row in json.loads(path.read_text())["linears"]:
        assert (Tiles(**row["tiles"]).tokens == 1) == (row["tokens"] == 1)


@pytest.mark.parametrize("module", [linear_tuning, hopper_tuning])
def test_bounds_are_those_of_the_device_at_hand(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(module, "device_rates", lambda device, dtype: Rates(2e12, 1e15, "by hand"))
    monkeypatch.setattr(module, "Chain", QuickChain)
    case = LinearCase("down", 8, 4096, 4096, False, False, True)
    if module is linear_tuning:
        ((outcome,),) = linear_tuning.tune_linears([case], SilentProgress(), candidates)
    else:
        (outcome,) = hopper_tuning.tune_hopper_linears([case], (), SilentProgress(), hopper_candidates)
    assert outcome.case == case
    tuned = outcome.tuned
    assert tuned is not None
    assert tuned.bound_microseconds == pytest.approx(4096 * 4096 * 2 / 2e6)


def test_a_weight_without_candidates_keeps_the_tiles_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a router's weight, with too few rows for several tokens."""
    monkeypatch.setattr(linear_tuning, "device_rates", lambda device, dtype: Rates(2e12, 1e15, "by hand"))
    monkeypatch.setattr(linear_tuning, "Chain", QuickChain)
    router, down = layer(128, 2048, norm=True), layer(2048, 8192, residual=True)
    cases = at_each([router, down], [1, 8])
    outcomes = [each for some in linear_tuning.tune_linears(cases, SilentProgress(), candidates) for each in some]
    assert [each.case for each in outcomes] == cases
    assert [each.case for each in outcomes if each.tuned is None] == at_each([router], [8])
    assert list(linear_tuning.tune_linears([], SilentProgress(), candidates)) == []


LIBRARY, OURS = "library", "ours"


def times_of(times: dict[tuple[int, str], float]) -> type[QuickChain]:
    """Return chains that take these microseconds, by tokens and kernel; at other numbers all take the same."""

    class TimedChain(QuickChain):
        def microseconds(self, linears: Any, repeats: int, sustained_ms: float = 0.0) -> float:
            assert repeats > 1
            (linear,) = linears
            kind = LIBRARY if linear is product_tuning._library else OURS
            return times.get((self.cases[0].num_tokens, kind), 100.0)

    return TimedChain


def products_of(cases: list[LinearCase], *linears: TunedLinear) -> list[TunedLinear]:
    listed = partial(product_tuning.product_candidates, num_sms=132)
    outcomes = list(product_tuning.tune_products(cases, linears, SilentProgress(), listed))
    assert [each.case for each in outcomes] == cases
    return [each.tuned for each in outcomes if each.tuned is not None]


@pytest.mark.parametrize(
    ("smallest", "largest", "taken"),
    [(97.9, 97.9, True), (98.1, 80.0, False), (80.0, 98.1, False), (60.0, 120.0, False)],
)
def test_a_product_must_gain_at_both_ends_of_its_bucket(
    smallest: float, largest: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library takes 100 microseconds at either end, of 193 and of 256 tokens."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(product_tuning, "device_rates", lambda device, dtype: Rates(2e12, 1e15, "by hand"))
    monkeypatch.setattr(product_tuning, "Chain", times_of({(193, OURS): smallest, (256, OURS): largest}))
    cases = product_tuning.product_cases(PLAIN["qwen3-8b", 1])
    tuned = products_of(cases)
    assert [each.case.num_tokens for each in tuned] == ([256] if taken else [])
    if taken:
        assert tuned[0].smallest == (193, smallest, 100.0)
        read = parse_profile(profile_text(MeasuredProfile("A GPU", {}, 0.0, (), (), tuple(tuned)).as_record()))
        found = {tokens: read.product(tokens, 24576, 4096, True) for tokens in (192, 193, 256, 257)}
        assert [tokens for tokens, tiles in found.items() if tiles is not None] == [193, 256]
        assert product_tuning.ProductTiles(**found[256] | {"parts": tuple(found[256]["parts"])}) == tuned[0].tiles  # type: ignore[index, operator]


def test_up_to_128_tokens_a_product_must_be_faster_than_hoppers_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 100 microseconds, as any kernel but the library, which takes 200."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(product_tuning, "device_rates", lambda device, dtype: Rates(2e12, 1e15, "by hand"))
    monkeypatch.setattr(product_tuning, "Chain", times_of({(tokens, LIBRARY): 200.0 for tokens in (65, 96, 97, 128)}))
    cases = [case for case in product_tuning.product_cases(PLAIN["qwen3-8b", 1]) if case.num_tokens <= 128]
    assert len(products_of(cases)) == 2
    linear = TunedLinear(cases[1], HopperTiles(3, 128, 5), 100.0, 200.0, 50.0)
    assert products_of(cases, linear) == []


def test_the_tiles_that_gain_at_their_worst_end_are_the_best() -> None:
    times = {"uneven": (50.0, 97.0), "even": (95.0, 95.0), "slow": (99.0, 99.0)}
    assert worthwhile(times, (100.0, 100.0), 0.98) == "even"  # type: ignore[type-var]
    assert worthwhile(times, (90.0, 100.0), 0.98) == "uneven"  # type: ignore[type-var]
    assert worthwhile(times, (100.0, 90.0), 0.98) is None  # type: ignore[type-var]
    assert worthwhile({}, (100.0, 100.0), 0.98) is None


def test_hoppers_linear_is_compared_with_the_tiles_just_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule's tiles are for devices without a profile."""
    compared: list[Any] = []

    class Chain(QuickChain):
        def run(self, linears: Any, layers: int | None = None) -> torch.Tensor:
            compared.append(linears[0].args[0])
            return torch.ones(1)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(hopper_tuning, "device_rates", lambda device, dtype: Rates(2e12, 1e15, "by hand"))
    monkeypatch.setattr(hopper_tuning, "Chain", Chain)
    case, tiles = LinearCase("down", 32, 4096, 4096, False, False, True), Tiles(32, 64, 64, num_stages=5)
    small = [TunedLinear(case, tiles, 4.0, 6.0, 1.0)]
    list(hopper_tuning.tune_hopper_linears([replace(case, num_tokens=16)], small, SilentProgress(), hopper_candidates))
    assert compared[0] == tiles
    compared.clear()
    list(hopper_tuning.tune_hopper_linears([replace(case, num_tokens=16)], (), SilentProgress(), hopper_candidates))
    assert compared[0] == choose_tiles(16, 4096, 4096, False, torch.bfloat16)


def test_a_pass_that_changes_nothing_is_not_measured() -> None:
    whole, *others = variants(["silu_mul", "layer_norm"])
    plans: dict[Any, Any] = {whole: "a plan", others[0]: "another", others[1]: "a plan"}
    assert differing([whole, *others], plans) == [whole, others[0]]


def test_what_was_measured_is_kept_if_the_rest_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = LinearCase("down", 8, 1024, 3072, False, False, True)
    linears = (TunedLinear(case, Tiles(8, 64, 256), 4.0, 6.0, 1.0),)

    def interrupted(folders: Any, progress: Any, ranks: Any, keep: Any, quick: bool) -> MeasuredProfile:
        keep(MeasuredProfile("A GPU", {}, 0.0, linears))
        raise ValueError("enough")

    monkeypatch.setattr("compiled_engine.tune.device_tuning.device_name", lambda: "A GPU")
    monkeypatch.setattr("compiled_engine.tune.device_tuning.tune_device", interrupted)
    path = tmp_path / "profile.json"
    assert CliRunner().invoke(app, ["tune", "--shape", "qwen3-0.6b", "-o", str(path)]).exit_code == 2
    assert parse_profile(path.read_text()).tiles.keys() == {(8, 1024, 3072, False)}
