"""Requests whose drafts a model or a head makes within graphs, as on a GPU; here the graphs are recorded work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from compiled_engine.config import EngineConfig, GraphConfig, GraphMode
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.frontend.tokenizer import load_tokenizer
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

Text = Callable[[int, int], tuple[int, ...]]

# Few tokens a step, so that prompts come in chunks.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "mode": "eager",
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 40,
    "block_size": 4,
    "num_blocks": 200,
}
SIZES = (1, 2, 4)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.0, "disable_spec_decode": True},
)


def config_of(mode: GraphMode, drafts: dict[str, Any] | None, **options: Any) -> EngineConfig:
    """Return a configuration with graphs of up to four requests; more requests run without graphs.

    drafts: None for an engine without drafts.
    """
    config = resolve(EngineOptions(**OPTIONS | {"speculative_config": drafts} | options))
    decodes = SIZES if mode.captures_decodes else ()
    own = GraphConfig(mode, decodes, (8, 16) if mode.captures_mixed else ())
    speculation = config.speculation
    if speculation.draft is None:
        return replace(config, graph=own)
    speculation = replace(speculation, draft=replace(speculation.draft, graph=GraphConfig(mode, SIZES)))
    return replace(config, graph=own, speculation=speculation)


def requests(text: Text, sampling: tuple[dict[str, Any], ...]) -> list[EngineRequest]:
    """Return requests, of which some share a prefix and some are longer than a step."""
    return [
        EngineRequest(
            str(number),
            text((0, 300)[number % 2] if number % 3 else 50 * number, (1, 7, 20, 50)[number % 4]),
            SamplingParams(
                seed=number, max_tokens=2 + 3 * number, ignore_eos=number % 2 == 0, **sampling[number % len(sampling)]
            ),
        )
        for number in range(10)
    ]


@cache
def held_out(model: Path) -> Text:
    """Return a function (start, count) -> token ids of the bundled model's held-out text."""
    ids = load_tokenizer(model).encode((model / "held_out.txt").read_text()[:4000])
    return cache(lambda start, count: tuple(ids[start : start + count]))


def run(core: EngineCore, asked: list[EngineRequest]) -> dict[str, list[int]]:
    for request in asked:
        core.add(request)
    found: dict[str, list[int]] = {request.request_id: [] for request in asked}
    while core.has_unfinished():
        for output in core.step():
            found[output.request_id] += output.new_token_ids
    core.check_integrity()
    return found


@cache
def without_drafts(text: Text) -> dict[str, list[int]]:
    """Return the tokens of all requests, generated one per step."""
    core = start_core(resolve(EngineOptions(**OPTIONS)), SilentProgress())
    found = run(core, requests(text, SAMPLING))
    core.close()
    return found
