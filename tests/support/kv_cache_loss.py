"""Measure the quality of a KV cache of 8 bits: the bundled model's held-out text, compared with a cache in fp32.

`python tests/support/kv_cache_loss.py FILE` writes the figures as JSON. It runs on a CPU, in minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fused_forward import BLOCK_SIZE, FusedModel, fuse

from compiled_engine.bench.results import provenance
from compiled_engine.frontend.tokenizer import load_tokenizer
from compiled_engine.kv_format import AUTO, CODED
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve

# Positions of a long text, early and late, over which the distance to the exact distribution is averaged.
EARLY, LATE = range(80, 121), range(1500, 2000)
LONG_TEXTS = 8
# Tokens of the other texts, each of which is a sequence of its own, as for the loss of the bundled model.
WINDOW = 512


def held_out_model(kv_dtype: str) -> FusedModel:
    """Return the bundled model with a cache of this format, in fp32, executed op by op."""
    options = EngineOptions(
        device="cpu",
        mode="compiled",
        kv_cache_dtype=kv_dtype,
        block_size=BLOCK_SIZE,
        attention_backend="torch",
        max_model_len=2048,
        compile_ranges=(),
    )
    return fuse(resolve(options))


def compare(
    exact: Sequence[torch.Tensor], coded: Sequence[torch.Tensor], windows: Sequence[Sequence[int]], num_long: int
) -> dict[str, float]:
    """Return the loss of `coded` less that of `exact`, in nats a token; the mean KL divergence, over all tokens and
    early and late in long texts; and the share of positions at which both have the same most likely token, each given
    the held-out text before it.

    exact, coded: log-probabilities [T, V] of the windows, then of num_long long texts.
    """
    nats, distances, same = [], [], []
    for theirs, ours, window in zip(exact, coded, windows, strict=False):
        targets = torch.tensor(window[1:]).unsqueeze(1)
        nats.append((theirs - ours)[:-1].gather(1, targets))
        distances.append(_distance(theirs, ours)[:-1])
        same.append(ours.argmax(-1) == theirs.argmax(-1))
    long = torch.stack([_distance(*pair) for pair in zip(exact[-num_long:], coded[-num_long:], strict=True)])
    return {
        "loss_added": float(torch.cat(nats).double().mean()),
        "kl": float(torch.cat(distances).double().mean()),
        "greedy_same": float(torch.cat(same).double().mean()),
        "kl_early": float(long[:, EARLY.start : EARLY.stop].double().mean()),
        "kl_late": float(long[:, LATE.start : LATE.stop].double().mean()),
    }


def _logprobs(kv_dtype: str, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    model = held_out_model(kv_dtype)
    return [model.logprobs([tokens], [[len(tokens)]])[0] for tokens in texts]


def _distance(exact_TV: torch.Tensor, other_TV: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence of each token's distribution, in nats."""
    return (exact_TV.exp() * (exact_TV - other_TV)).sum(-1)


def measure(most_windows: int | None = None, long_texts: int = LONG_TEXTS) -> dict[str, Any]:
    """Return the figures of all formats, by name. most_windows: of the held-out text; None for all."""
    tokenizer = load_tokenizer(BUNDLED_MODEL_PATH)
    text = (BUNDLED_MODEL_PATH / "held_out.txt").read_bytes().decode()
    ids = tokenizer.hf.encode(text, add_special_tokens=False, verbose=False)
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW)][:most_windows]
    texts = [ids[start : start + LATE.stop] for start in range(0, long_texts * LATE.stop, LATE.stop)]
    exact = _logprobs(AUTO, [*windows, *texts])
    formats = {
        each.name: compare(exact, _logprobs(each.name, [*windows, *texts]), windows, long_texts) for each in CODED
    }
    return provenance(torch.device("cpu")) | {"tokens": sum(len(window) - 1 for window in windows), "formats": formats}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON that is written")
    parser.add_argument("--windows", type=int, help="windows of the held-out text, of 512 tokens (default: all)")
    parser.add_argument("--long-texts", type=int, default=LONG_TEXTS, help="texts of 2,000 tokens (default: 8)")
    arguments = parser.parse_args()
    arguments.file.write_text(json.dumps(measure(arguments.windows, arguments.long_texts), indent=1) + "\n")
