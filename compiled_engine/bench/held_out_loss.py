"""Measure the loss of engine variants on a text, and how far their distributions diverge from float32's.

The text is tokenised as a whole, without special tokens, and cut into windows. Each window is a sequence of its own,
whose first token is context only and has no loss. The loss stated for the bundled model is defined in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from compiled_engine.bench.results import conditions
from compiled_engine.frontend.logprob_list import LogprobList
from compiled_engine.llm import LLM
from compiled_engine.process.progress import Progress
from compiled_engine.quantisation_names import ONLINE
from compiled_engine.sampling.params import SamplingParams

WINDOW = 512
BASE = "float32"
# Engine options of BASE and of the variants that are compared with it.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    BASE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    **{name: {"quantization": name} for name in ONLINE},
}


def with_folder(folder: str) -> dict[str, Mapping[str, Any]]:
    """Return the variants that compare the quantised checkpoint in `folder` with the checkpoint that it was made of."""
    return {BASE: VARIANTS[BASE], "bfloat16": VARIANTS["bfloat16"], folder: {"model": folder}}


class HeldOutLoss(NamedTuple):
    """A model's loss on a text."""

    nats: float  # mean negative log-probability of a scored token
    num_tokens: int


def held_out_loss(llm: LLM, text: str) -> HeldOutLoss:
    """Return the loss of a running engine on a text.

    Raises ValueError for a text of fewer than two tokens, and the errors of `generate`.
    """
    windows = windows_of(llm, text)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in windows], params)
    total, count = 0.0, 0
    for window, output in zip(windows, outputs, strict=True):
        for token, row in zip(window[1:], (output.prompt_logprobs or [])[1:], strict=True):
            assert row is not None
            total -= row[token].logprob
            count += 1
    return HeldOutLoss(total / count, count)


def compare_losses(
    model: str | None,
    text: str,
    options: Mapping[str, Any],
    progress: Progress,
    variants: Mapping[str, Mapping[str, Any]] = VARIANTS,
) -> dict[str, Any]:
    """Compare the losses of engine variants on a text, and return the result as JSON.

    options: engine options of all variants. variants: further engine options by name of the variant. An option `model`
    of a variant takes the place of the argument `model`. Variants are measured in this order; the first must be the
    base, "float32" (BASE).

    The keys are benchmark ("loss"), num_tokens, rows, and those of `results.conditions`. A row has name and loss in
    nats. All rows but the base's have, relative to the base, difference, divergence (Kullback-Leibler in nats: mean,
    p99) and same_best, the share of positions with the same most likely token. The base's distributions are kept in
    memory, 4 bytes for each position and vocabulary entry.

    Raises ValueError for a text of fewer than two tokens, or if the variants' models divide the text into different
    tokens, and the errors of LLM.
    """
    base: list[np.ndarray] = []
    base_windows: list[list[int]] = []
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for name, own in variants.items():
        with LLM(**{"model": model, "mode": "compiled", "enable_prefix_caching": False, **options, **own}) as llm:
            windows = windows_of(llm, text)
            base_windows = base_windows or windows
            if windows != base_windows or (base and llm.config.model.vocab_size != base[0].shape[1]):
                raise ValueError(f"{name} has other tokens than the model; allowed: a checkpoint made of the model")
            about = about or conditions(llm.config, {**options, **own}, None)
            with progress.stage(name, total=len(windows)) as advance:
                row, distributions = score(llm, windows, None if name == BASE else base, advance)
        base = base or distributions
        if name != BASE:
            row["difference"] = row["loss"] - rows[0]["loss"]
        rows.append({"name": name, **row})
    return {"benchmark": "loss", "num_tokens": sum(map(len, base)), "rows": rows, **about}


def score(
    llm: LLM,
    windows: Sequence[Sequence[int]],
    base: Sequence[np.ndarray] | None,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return (record, distributions) of a running engine on these windows. advance: called with 1 after each window.

    The record has the mean loss in nats. With `base`, the distributions to compare with, it also has divergence (mean,
    p99) and same_best, and no distributions are returned. Without `base`, the engine's distributions are returned: for
    each window, log-probabilities [T - 1, V] of the token that follows each token but the last.
    """
    nats, same, kept = 0.0, 0, []
    divergences: list[np.ndarray] = []
    for index, (window, found_TV) in enumerate(zip(windows, _distributions(llm, windows), strict=True)):
        nats -= float(found_TV[np.arange(len(window) - 1), window[1:]].sum(dtype=np.float64))
        if base is None:
            kept.append(found_TV)
        else:
            base_TV = base[index].astype(np.float64)
            divergences.append((np.exp(base_TV) * (base_TV - found_TV)).sum(1))
            same += int((base_TV.argmax(1) == found_TV.argmax(1)).sum())
        advance(1)
    count = sum(len(window) - 1 for window in windows)
    row: dict[str, Any] = {"loss": nats / count}
    if base is not None:
        of_all = np.concatenate(divergences)
        row["divergence"] = {"mean": float(of_all.mean()), "p99": float(np.quantile(of_all, 0.99))}
        row["same_best"] = same / count
    return row, kept


def windows_of(llm: LLM, text: str) -> list[list[int]]:
    """Return the token ids of each window. Raises ValueError for a text of fewer than two tokens."""
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False, verbose=False)
    if len(ids) < 2:
        raise ValueError(f"text must have at least two tokens, got {len(ids)}")
    size = min(WINDOW, llm.config.model.max_model_len - 1)
    return [ids[start : start + size] for start in range(0, len(ids) - 1, size)]


def _distributions(llm: LLM, windows: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
    """Yield each window's log-probabilities, fp32 [T - 1, V], of the token that follows each token but the last."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    for window in windows:
        (output,) = llm.generate([{"prompt_token_ids": list(window)}], params, use_tqdm=False)
        assert isinstance(output.prompt_logprobs, LogprobList)
        ids_TK, logprobs_TK = output.prompt_logprobs.arrays()
        found_TV = np.empty((len(window) - 1, llm.config.model.vocab_size), np.float32)
        np.put_along_axis(found_TV, ids_TK.astype(np.int64), logprobs_TK, axis=1)
        yield found_TV
