"""Measure a device's profile: the fastest tiles of linears, and the gains of passes.

The result can be merged with the profile that an earlier run measured for other shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.options import EngineOptions
from compiled_engine.passes.framework.profile import LinearKey
from compiled_engine.passes.linear.small_batch_linear_op import TOKEN_BUCKETS
from compiled_engine.process.progress import Progress
from compiled_engine.resolve.engine import resolve
from compiled_engine.resolve.parallel import check_model
from compiled_engine.tune.compile_first import Launch, compile_first
from compiled_engine.tune.graph_linears import linears_of
from compiled_engine.tune.hopper_tuning import hopper_cases, hopper_launches, tune_hopper_linears
from compiled_engine.tune.linear_tuning import in_registers, linear_launches, tune_linears
from compiled_engine.tune.linears import LinearCase, TunedLinear, at_each, key
from compiled_engine.tune.on_hopper import is_hopper
from compiled_engine.tune.pass_gains import Gain, measure
from compiled_engine.tune.product_tuning import product_cases, product_launches, tune_products

TOKEN_COUNTS = (1, 8, 64, 512)
REPEATS = 5
# Longest context measured.
MOST_TOKENS = 4096


@dataclass(frozen=True)
class MeasuredProfile:
    """Profile of a device, see passes/framework/profile.py.

    gains_us: by pass and number of tokens; each is the smallest gain over all measured models. noise_us: median of the
    noise of all measured gains.
    """

    device: str
    gains_us: dict[str, dict[int, float]]
    noise_us: float
    linears: tuple[TunedLinear, ...]
    hopper_linears: tuple[TunedLinear, ...] = ()
    hopper_products: tuple[TunedLinear, ...] = ()

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
) -> MeasuredProfile:
    """Measure the profile of this GPU for models with the shapes of these checkpoint folders.

    ranks: tensor-parallel sizes for which one rank's linears are tuned. Gains of passes are measured on whole models.
    keep: called with the profile so far, each time that a model's linears or gains have been measured.

    Raises ValueError without a GPU, for a number of ranks that cannot divide a model, and for a model that pools.
    """
    configs = [_config(folder, ranks) for folder in folders]
    found = _Found(device_name())
    cases = [_cases(linears_of(config, number)) for config in configs for number in ranks]
    compile_first([launch for each in cases for launch in each.launches()], progress)
    for each in cases:
        found.add_linears(each, progress)
        keep(found.profile())
    for config in configs:
        found.add_gains(measure(config, TOKEN_COUNTS, REPEATS, progress))
        keep(found.profile())
    return found.profile()


@dataclass(frozen=True)
class _Cases:
    """Linears to tune for one rank of a model, by the kernel that computes them."""

    small: Sequence[LinearCase]
    hopper: Sequence[LinearCase]
    products: Sequence[LinearCase]

    def launches(self) -> list[Iterator[Launch]]:
        """Return iterators over launches of all candidates, beginning with the kernels that compile longest."""
        on_hopper = [product_launches(self.products), hopper_launches(self.hopper)] if is_hopper() else []
        return [*on_hopper, linear_launches(self.small)]


def _cases(linears: Sequence[LinearCase]) -> _Cases:
    return _Cases(at_each(linears, TOKEN_BUCKETS), hopper_cases(linears), product_cases(linears))


@dataclass
class _Found:
    device: str
    linears: dict[LinearKey, TunedLinear] = field(default_factory=dict)
    hopper_linears: dict[LinearKey, TunedLinear] = field(default_factory=dict)
    products: dict[LinearKey, TunedLinear] = field(default_factory=dict)
    least_us: dict[str, dict[int, float]] = field(default_factory=dict)
    noise_us: list[float] = field(default_factory=list)

    def add_linears(self, cases: _Cases, progress: Progress) -> None:
        """Tune these cases and keep the results.

        Where Hopper's kernel is faster, tiles that read weights into registers are dropped: a launch would prefer these
        tiles to Hopper's.
        """
        small = tune_linears(cases.small, progress)
        hopper = tune_hopper_linears(cases.hopper, small, progress)
        products = tune_products(cases.products, hopper, progress)
        beaten = {key(each.case) for each in hopper}
        small = [each for each in small if key(each.case) not in beaten or not in_registers(each.tiles)]
        for known, tuned in ((self.linears, small), (self.hopper_linears, hopper), (self.products, products)):
            known |= {key(each.case): each for each in tuned}

    def add_gains(self, gains: Mapping[str, Sequence[Gain]]) -> None:
        for name, gain in ((name, gain) for name, of_pass in gains.items() for gain in of_pass):
            by_tokens = self.least_us.setdefault(name, {})
            microseconds = round(gain.gain_us, 1)
            by_tokens[gain.tokens] = min(microseconds, by_tokens.get(gain.tokens, microseconds))
            self.noise_us.append(gain.noise_us)

    def profile(self) -> MeasuredProfile:
        noise_us = round(median(self.noise_us), 1) if self.noise_us else 0.0
        lists = (tuple(tuned.values()) for tuned in (self.linears, self.hopper_linears, self.products))
        return MeasuredProfile(self.device, self.least_us, noise_us, *lists)


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


LISTS = ("linears", "hopper_linears", "hopper_products")


def profile_text(profile: Mapping[str, Any]) -> str:
    """Format a profile as JSON with one line per linear."""
    head = json.dumps({name: profile[name] for name in ("device", "noise_us", "gains_us")})
    lines = {name: ",\n  ".join(map(json.dumps, profile.get(name, ()))) for name in LISTS}
    return head[:-1] + "".join(f',\n "{name}": [\n  {rows}\n]' for name, rows in lines.items()) + "}\n"


def merged(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new profile, plus linears of other shapes from an old profile of the same device.

    A pass's gain is the smaller of the two profiles' gains, since it applies to every shape.
    """
    measured = {_shape(row) for name in LISTS for row in new.get(name, ())}
    lists = {
        name: [*(row for row in old.get(name, ()) if _shape(row) not in measured), *new.get(name, ())] for name in LISTS
    }
    gains = {name: dict(by_tokens) for name, by_tokens in old["gains_us"].items()}
    for name, by_tokens in new["gains_us"].items():
        for tokens, gain in by_tokens.items():
            known = gains.setdefault(name, {})
            known[str(tokens)] = min(gain, known.get(str(tokens), gain))
    return {**new, "gains_us": gains, **lists}


def _shape(row: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Return (rows, columns, whether it is gated) of the linear in a row of a profile.

    A run measures a shape at all token counts.
    """
    return row["num_rows"], row["k"], row["silu_mul"]
