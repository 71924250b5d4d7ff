"""A device's profile: all that it holds is measured here (tiles of the linears, what each pass gains), and joins what a
file of an earlier run has of other shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.options import EngineOptions
from compiled_engine.passes.linear.small_batch_linear_op import TOKEN_BUCKETS
from compiled_engine.process.progress import Progress
from compiled_engine.resolve.engine import resolve
from compiled_engine.resolve.parallel import check_model
from compiled_engine.tune.hopper_tuning import hopper_cases, tune_hopper_linears
from compiled_engine.tune.linear_tuning import tune_linears
from compiled_engine.tune.linears import TunedLinear, cases_of
from compiled_engine.tune.pass_gains import measure
from compiled_engine.tune.product_tuning import product_cases, tune_products

TOKEN_COUNTS = (1, 8, 64, 512)
REPEATS = 5


@dataclass(frozen=True)
class MeasuredProfile:
    """A device's profile, see passes.profile; a pass's gain is the least of all shapes, the noise their median."""

    device: str
    gains_us: dict[str, dict[int, float]]
    noise_us: float
    linears: tuple[TunedLinear, ...]
    hopper_linears: tuple[TunedLinear, ...] = ()
    hopper_products: tuple[TunedLinear, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return the profile as JSON."""
        gains = {name: {str(tokens): gain for tokens, gain in by.items()} for name, by in self.gains_us.items()}
        lists = {name: [_row(linear) for linear in getattr(self, name)] for name in LISTS}
        return {"device": self.device, "noise_us": self.noise_us, "gains_us": gains, **lists}


def device_name() -> str:
    """Raises ValueError where there is no GPU to tune for."""
    if not torch.cuda.is_available():
        raise ValueError("device is cpu; allowed: a CUDA GPU, since a CPU has no kernels to tune")
    return torch.cuda.get_device_name()


def tune_device(folders: Sequence[Path], progress: Progress, ranks: Sequence[int] = (1,)) -> MeasuredProfile:
    """Measure the profile of this GPU for models with the shapes of these checkpoint folders.

    ranks: the linears of each of this many ranks are tuned; the gains of passes are those of the whole model. Raises
    ValueError for a number that does not divide a shape."""
    configs = [_config(folder, ranks) for folder in folders]
    linears: dict[tuple[Any, ...], TunedLinear] = {}
    hopper_linears: dict[tuple[Any, ...], TunedLinear] = {}
    products: dict[tuple[Any, ...], TunedLinear] = {}
    least: dict[str, dict[int, float]] = {}
    noise: list[float] = []
    for config in configs:
        for number in ranks:
            cases = [case for tokens in TOKEN_BUCKETS for case in cases_of(config.model, tokens, number)]
            linears |= {_key(tuned): tuned for tuned in tune_linears(cases, progress)}
            on_hopper = tune_hopper_linears(hopper_cases(config.model, number), progress)
            hopper_linears |= {_key(tuned): tuned for tuned in on_hopper}
            on_hopper = tune_products(product_cases(config.model, number), progress)
            products |= {_key(tuned): tuned for tuned in on_hopper}
        for name, gains in measure(config, TOKEN_COUNTS, REPEATS, progress).items():
            by_tokens = least.setdefault(name, {})
            for gain in gains:
                noise.append(gain.noise_us)
                microseconds = round(gain.gain_us, 1)
                by_tokens[gain.tokens] = min(microseconds, by_tokens.get(gain.tokens, microseconds))
    tuned = tuple(linears.values()), tuple(hopper_linears.values()), tuple(products.values())
    return MeasuredProfile(device_name(), least, round(median(noise), 1), *tuned)


def _config(folder: Path, ranks: Sequence[int]) -> EngineConfig:
    config = resolve(EngineOptions(model=folder, load_format="dummy", mode="compiled", max_model_len=4096))
    for number in ranks:
        check_model(config.model, number)
    return config


def _key(tuned: TunedLinear) -> tuple[Any, ...]:
    return tuned.case.num_tokens, tuned.case.num_rows, tuned.case.k, tuned.case.silu_mul


def _row(linear: TunedLinear) -> dict[str, Any]:
    case = linear.case
    return {
        "tokens": case.num_tokens,
        "num_rows": case.num_rows,
        "k": case.k,
        "silu_mul": case.silu_mul,
        "tiles": asdict(linear.tiles),
        "us": round(linear.microseconds, 2),
        "cublas_us": round(linear.cublas_microseconds, 2),
        "bound_us": round(linear.bound_microseconds, 2),
    }


LISTS = ("linears", "hopper_linears", "hopper_products")


def profile_text(profile: Mapping[str, Any]) -> str:
    """Write a profile as JSON with a line for each linear."""
    head = json.dumps({name: profile[name] for name in ("device", "noise_us", "gains_us")})
    lines = {name: ",\n  ".join(map(json.dumps, profile.get(name, ()))) for name in LISTS}
    return head[:-1] + "".join(f',\n "{name}": [\n  {rows}\n]' for name, rows in lines.items()) + "}\n"


def merged(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """The new profile, and of an old one of the same device the linears of other shapes. A pass gains the least of
    both: what it gains is of every shape."""
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
    """The shape of a linear's weight; a run measures it for all numbers of tokens."""
    return row["num_rows"], row["k"], row["silu_mul"]
