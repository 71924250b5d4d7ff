"""Measure a device's profile: the fastest tiles of linears, and the gains of passes.

The result can be merged with the profile that an earlier run measured for other shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.options import EngineOptions
from compiled_engine.passes.framework.profile import LinearKey, load_profile, profiles_of_others
from compiled_engine.passes.linear.hopper_linear import multiprocessors
from compiled_engine.passes.linear.small_batch_linear_op import TOKEN_BUCKETS
from compiled_engine.process.progress import Progress
from compiled_engine.resolve.engine import resolve
from compiled_engine.resolve.parallel import check_model
from compiled_engine.tune.candidates import Candidates, all_candidates, few_candidates
from compiled_engine.tune.compile_first import Launch, compile_first
from compiled_engine.tune.graph_linears import linears_of
from compiled_engine.tune.hopper_tuning import hopper_cases, hopper_launches, tune_hopper_linears
from compiled_engine.tune.linear_tuning import in_registers, linear_launches, tune_linears
from compiled_engine.tune.linears import LinearCase, Outcome, TunedLinear, at_each, key
from compiled_engine.tune.on_hopper import is_hopper
from compiled_engine.tune.pass_gains import Gain, measure
from compiled_engine.tune.product_tuning import product_cases, product_launches, tune_products

TOKEN_COUNTS = (1, 8, 64, 512)
REPEATS = 5
# Longest context measured.
MOST_TOKENS = 4096
# Lists of tuned linears in a profile: of the small-batch kernels, and of Hopper's two.
LISTS = ("linears", "hopper_linears", "hopper_products")


@dataclass(frozen=True)
class MeasuredProfile:
    """The fastest tiles of linears and the gains of passes on a device, see passes/framework/profile.py."""

    device: str
    gains_us: dict[str, dict[int, float]]  # by pass and number of tokens: the smallest gain over all measured models
    noise_us: float  # median of the noise of all measured gains
    linears: tuple[TunedLinear, ...]
    hopper_linears: tuple[TunedLinear, ...] = ()
    hopper_products: tuple[TunedLinear, ...] = ()
    # (name in LISTS, key) of each measured case. A measured case that is not in its list is faster with another kernel.
    measured: frozenset[tuple[str, LinearKey]] = frozenset()

    def as_record(self) -> dict[str, Any]:
        """Return the profile as a dict that can be written as JSON."""
        gains = {name: {str(tokens): gain for tokens, gain in by.items()} for name, by in self.gains_us.items()}
        lists = {name: [_row(linear) for linear in getattr(self, name)] for name in LISTS}
        return {"device": self.device, "noise_us": self.noise_us, "gains_us": gains, **lists}


def device_name() -> str:
    """Return the GPU's name. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("device is cpu; allowed: a CUDA GPU, since a CPU has no kernels to tune")
    return torch.cuda.get_device_name()


def tune_device(
    folders: Sequence[Path],
    progress: Progress,
    ranks: Sequence[int] = (1,),
    keep: Callable[[MeasuredProfile], None] = lambda profile: None,
    *,
    quick: bool = False,
) -> MeasuredProfile:
    """Measure the profile of this GPU for models with the shapes of these checkpoint folders.

    ranks: tensor-parallel sizes for which one rank's linears are tuned. Gains of passes are measured on whole models.
    keep: called with the profile so far, each time that linears or a model's gains have been measured. quick: measure
    only the tiles that are likely to be fast, see `few_candidates`, and no gains.

    Raises ValueError without a GPU, for a number of ranks that cannot divide a model, and for a model that pools.
    """
    configs = [_config(folder, ranks) for folder in folders]
    found = _Found(device_name())
    candidates = _candidates(found.device, quick=quick)
    cases = [_cases(linears_of(config, number)) for config in configs for number in ranks]
    compile_first([launch for each in cases for launch in each.launches(candidates)], progress)
    for each in cases:
        for _ in found.measure_linears(each, candidates, progress):
            keep(found.profile())
    for config in () if quick else configs:
        found.add_gains(measure(config, TOKEN_COUNTS, REPEATS, progress))
        keep(found.profile())
    return found.profile()


def _candidates(device: str, *, quick: bool) -> Candidates:
    num_sms = multiprocessors(torch.device("cuda"))
    if not quick:
        return all_candidates(num_sms)
    own = load_profile(device)
    return few_candidates([*([own] if own else ()), *profiles_of_others(device)], num_sms)


@dataclass(frozen=True)
class _Cases:
    """Linears to tune for one rank of a model: a list for each kind of kernel."""

    small: Sequence[LinearCase]
    hopper: Sequence[LinearCase]
    products: Sequence[LinearCase]

    def launches(self, candidates: Candidates) -> list[Iterator[Launch]]:
        """Return iterators over launches of all candidates, beginning with the kernels that compile longest."""
        small = linear_launches(self.small, candidates.small)
        if not is_hopper():
            return [small]
        products = product_launches(self.products, candidates.products)
        return [products, hopper_launches(self.hopper, candidates.hopper), small]


def _cases(linears: Sequence[LinearCase]) -> _Cases:
    return _Cases(at_each(linears, TOKEN_BUCKETS), hopper_cases(linears), product_cases(linears))


@dataclass
class _Found:
    """The measurements so far. `profile` returns them as the device's profile."""

    device: str
    # By name of the list in the profile, then by key.
    linears: dict[str, dict[LinearKey, TunedLinear]] = field(default_factory=lambda: {name: {} for name in LISTS})
    measured: set[tuple[str, LinearKey]] = field(default_factory=set)
    least_us: dict[str, dict[int, float]] = field(default_factory=dict)
    noise_us: list[float] = field(default_factory=list)

    def measure_linears(self, cases: _Cases, candidates: Candidates, progress: Progress) -> Iterator[None]:
        """Tune these cases and keep the results. Yields whenever some of them have been measured."""
        small, hopper = self.linears["linears"], self.linears["hopper_linears"]
        for outcomes in tune_linears(cases.small, progress, candidates.small):
            self._add("linears", outcomes)
            yield
        for outcome in tune_hopper_linears(cases.hopper, small.values(), progress, candidates.hopper):
            self._add("hopper_linears", [outcome])
            yield
        for outcome in tune_products(cases.products, hopper.values(), progress, candidates.products):
            self._add("hopper_products", [outcome])
            yield

    def _add(self, name: str, outcomes: Iterable[Outcome]) -> None:
        for case, tuned in outcomes:
            self.measured.add((name, key(case)))
            if tuned is not None:
                self.linears[name][key(case)] = tuned

    def add_gains(self, gains: Mapping[str, Sequence[Gain]]) -> None:
        for name, gain in ((name, gain) for name, of_pass in gains.items() for gain in of_pass):
            by_tokens = self.least_us.setdefault(name, {})
            microseconds = round(gain.gain_us, 1)
            by_tokens[gain.tokens] = min(microseconds, by_tokens.get(gain.tokens, microseconds))
            self.noise_us.append(gain.noise_us)

    def profile(self) -> MeasuredProfile:
        """Return the profile so far.

        Where Hopper's kernel is faster, tiles of the kernel that reads weights into registers are left out: a launch
        would prefer that kernel to Hopper's.
        """
        noise_us = round(median(self.noise_us), 1) if self.noise_us else 0.0
        small, hopper, products = (self.linears[name] for name in LISTS)
        kept = (each for case, each in small.items() if case not in hopper or not in_registers(each.tiles))
        lists = (tuple(kept), tuple(hopper.values()), tuple(products.values()))
        return MeasuredProfile(self.device, self.least_us, noise_us, *lists, frozenset(self.measured))


def _config(folder: Path, ranks: Sequence[int]) -> EngineConfig:
    options = EngineOptions(model=folder, load_format="dummy", mode="compiled")
    config = resolve(options)
    if config.model.pooling is not None:
        raise ValueError(
            f"model is {str(folder)!r}, which pools; allowed: models that generate, whose steps are measured"
        )
    if config.model.max_model_len > MOST_TOKENS:
        config = resolve(replace(options, max_model_len=MOST_TOKENS))
    for number in ranks:
        check_model(config.model, number)
    return config


def _row(linear: TunedLinear) -> dict[str, Any]:
    case, smallest = linear.case, linear.smallest
    row = {
        "tokens": case.num_tokens,
        "num_rows": case.num_rows,
        "k": case.k,
        "silu_mul": case.silu_mul,
        "tiles": asdict(linear.tiles),
        "us": round(linear.microseconds, 2),
        "cublas_us": round(linear.cublas_microseconds, 2),
        "bound_us": round(linear.bound_microseconds, 2),
    }
    if smallest is None:
        return row
    row |= {"from_us": round(smallest.microseconds, 2), "from_cublas_us": round(smallest.cublas_microseconds, 2)}
    return {"from": smallest.num_tokens, **row}


def profile_text(profile: Mapping[str, Any]) -> str:
    """Format a profile as JSON with one line per linear."""
    head = json.dumps({name: profile[name] for name in ("device", "noise_us", "gains_us")})
    lines = {name: ",\n  ".join(map(json.dumps, profile.get(name, ()))) for name in LISTS}
    return head[:-1] + "".join(f',\n "{name}": [\n  {rows}\n]' for name, rows in lines.items()) + "}\n"


def merged(new: MeasuredProfile, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new profile, plus the linears of an old profile of the same device that were not measured again.

    A pass's gain is the smaller of the two profiles' gains, since it applies to every shape.
    """
    record = new.as_record()
    for name in LISTS:
        record[name] += [row for row in old.get(name, ()) if (name, _key(row)) not in new.measured]
    gains = {name: dict(by_tokens) for name, by_tokens in old["gains_us"].items()}
    for name, by_tokens in record["gains_us"].items():
        for tokens, gain in by_tokens.items():
            known = gains.setdefault(name, {})
            known[tokens] = min(gain, known.get(tokens, gain))
    noise_us = record["noise_us"] if record["gains_us"] else old["noise_us"]
    return record | {"gains_us": gains, "noise_us": noise_us}


def _key(row: Mapping[str, Any]) -> LinearKey:
    return row["tokens"], row["num_rows"], row["k"], row["silu_mul"]
