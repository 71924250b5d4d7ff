"""Measure how far the engine is from the model that a checkpoint's codes stand for, on held-out text.

The text and the model are the bundled ones. The model that is compared with is transformers' in fp32 with decoded
weights and rounded inputs, so the distance is that of the arithmetic alone, whatever the format loses.
`python tests/support/quantised_distance.py` prints all formats. It runs on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fused_forward import BLOCK_SIZE, FusedModel, fuse
from nvfp4_checkpoints import FORMATS, write_nvfp4
from packed_checkpoints import PACKINGS, write_packed
from quantised_checkpoints import LAYOUTS, write_quantised

from compiled_engine.frontend.tokenizer import load_tokenizer
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve

# Mean KL divergence of the unquantised model in bfloat16 from the same in fp32, in nats.
OF_BFLOAT16 = 1.5e-4
WINDOW = 512
IGNORED = ["lm_head"]
# Writes the bundled model in a format into a folder, and returns the model to compare with.
Write = Callable[[Path], Any]


def _write(write: Callable[..., Any], form: Any, folder: Path) -> Any:
    return write(BUNDLED_MODEL_PATH, folder, form, IGNORED)


FORMATS_BY_NAME: dict[str, Write] = {
    **{name: partial(_write, write_packed, packing) for name, packing in PACKINGS.items()},
    **{name: partial(_write, write_quantised, layout) for name, layout in LAYOUTS.items() if "int8" in name},
    **{f"NVFP4, {form}": partial(_write, write_nvfp4, form) for form in FORMATS},
}


class Distance(NamedTuple):
    kl: float  # mean over tokens, in nats
    tokens: int
    greedy_same: int  # tokens after which both models' most likely next tokens are the same


def held_out(windows: int) -> list[list[int]]:
    """Return the first tokens of the held-out text, in windows."""
    ids = load_tokenizer(BUNDLED_MODEL_PATH).hf.encode(
        (BUNDLED_MODEL_PATH / "held_out.txt").read_bytes().decode(), add_special_tokens=False, verbose=False
    )
    return [ids[start : start + WINDOW] for start in range(0, windows * WINDOW, WINDOW)]


def fused(folder: Path, dtype: str) -> FusedModel:
    options: dict[str, Any] = {"device": "cpu", "mode": "compiled", "dtype": dtype, "block_size": BLOCK_SIZE}
    options |= {"attention_backend": "torch", "max_model_len": 2048, "compile_ranges": ()}
    return fuse(resolve(EngineOptions(model=folder, **options)))


@torch.no_grad()
def logprobs_of(model: Any, text: list[int]) -> torch.Tensor:
    """Return log-probabilities [length, V] by a model of transformers."""
    found: torch.Tensor = model(torch.tensor([text])).logits[0].float().log_softmax(-1)
    return found


@torch.no_grad()
def distance(write: Write, dtype: str, windows: int) -> Distance:
    """Compare the log-probabilities of the passes' graphs, executed op by op, with those of the oracle."""
    texts = held_out(windows)
    with tempfile.TemporaryDirectory() as folder:
        oracle = write(Path(folder))
        model = fused(Path(folder), dtype)
    distances, same = [], 0
    for text in texts:
        exact = logprobs_of(oracle, text)
        found = model.logprobs([text], [[len(text)]])[0]
        distances.append((exact.exp() * (exact - found)).sum(-1))
        same += int((exact.argmax(-1) == found.argmax(-1)).sum())
    return Distance(float(torch.cat(distances).double().mean()), sum(map(len, texts)), same)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4, help="windows of the held-out text, of 512 tokens")
    arguments = parser.parse_args()
    for name, write in FORMATS_BY_NAME.items():
        for dtype in ("float32", "bfloat16"):
            found = distance(write, dtype, arguments.windows)
            print(f"{name}; {dtype}: KL {found.kl:.2g}, the same next token {found.greedy_same} of {found.tokens}")
