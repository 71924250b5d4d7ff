"""The cost of a step, in counts that are equal on every machine: launches, kernels, host calls, bytes read."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from encoder_folders import make_encoder
from scripted_drafts import AtRest
from small_engines import SMALL

import compiled_engine
from compiled_engine.bench.bounds import model_sizes
from compiled_engine.bench.engine_steps import decodes
from compiled_engine.engine.cache_memory import block_bytes
from compiled_engine.features import registry
from compiled_engine.graphs.compiler.build import apply_passes
from compiled_engine.graphs.compiler.signature import compile_ranges, forward_signature
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.trace import trace, without_storage
from compiled_engine.llm import LLM
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.options import EngineOptions
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.resolve.engine import resolve

# The packages that work for each step, whatever the model is.
ROOT = Path(compiled_engine.__file__).parent
PACKAGES = tuple(str(ROOT / name) for name in ("engine", "features", "rows", "sampling"))
# The engine's functions, and those that dataclasses and named tuples are made with.
ENGINE = (f"{ROOT}/", "<string>")
FEATURES = tuple(f"{ROOT / name}/" for name in ("features", "recurrence"))
NUM_STEPS = 100
# In which each request fills three blocks.
COUNTED_STEPS = 48
# Of these packages' functions, in a steady step of one request; and for each request more, whose blocks fill up.
MOST_CALLS = 65
MOST_CALLS_MORE = 2
# More than without a head, for any number of requests: the plan of drafts, and hooks that find nothing to do. Eight of
# them read the layers' inputs of a model that is not compiled.
MOST_CALLS_AT_REST = 31
# Of ENGINE, for each text more that is embedded, from its check to its result.
MOST_CALLS_A_TEXT = 70


def steady(llm: LLM, num_requests: int, measure: Callable[[Callable[[], Any]], Any]) -> Any:
    with decodes(llm, random.Random(0), num_requests, 8, 3 * NUM_STEPS) as core:
        for _ in range(20):
            core.step()
        return measure(core.step)


@pytest.fixture(scope="module")
def small_engine(one_thread: None) -> Any:
    with LLM(**SMALL | {"max_model_len": 512, "num_blocks": 256}) as llm:
        yield llm


def blocks_kept(step: Callable[[], Any]) -> int:
    """Blocks of memory that Python holds more after NUM_STEPS steps; the less of two times, as caches grow at first."""

    def once() -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(NUM_STEPS):
            step()
        gc.collect()
        return sys.getallocatedblocks() - before

    return min(once(), once())


def calls(step: Callable[[], Any], files: tuple[str, ...] = PACKAGES, num_steps: int = COUNTED_STEPS) -> float:
    """Python functions of files, by how their names begin, that a step calls: the mean of num_steps."""
    count = 0

    def profiled(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(files)

    before = sys.getprofile()
    sys.setprofile(profiled)
    try:
        for _ in range(num_steps):
            step()
    finally:
        sys.setprofile(before)
    return count / num_steps


@pytest.mark.parametrize("num_requests", [1, 6])
def test_a_steady_step_keeps_no_memory_but_its_tokens(small_engine: LLM, num_requests: int) -> None:
    """A token is an object, and the lists that hold tokens grow now and then."""
    assert steady(small_engine, num_requests, blocks_kept) <= NUM_STEPS * (num_requests + 1)


def test_a_request_more_costs_the_host_hardly_a_call(small_engine: LLM) -> None:
    """The work for each request is done for all of them at once."""
    alone, six = (steady(small_engine, num_requests, calls) for num_requests in (1, 6))
    assert six - alone <= 5 * MOST_CALLS_MORE
    assert alone <= MOST_CALLS


@pytest.mark.parametrize("num_requests", [1, 6])
def test_features_that_no_request_asks_for_cost_a_step_no_call(small_engine: LLM, num_requests: int) -> None:
    """Also a step in which a block of a request fills up."""
    assert steady(small_engine, num_requests, partial(calls, files=FEATURES)) == 0


@pytest.mark.parametrize("num_requests", [1, 6])
def test_a_step_at_which_a_head_rests_costs_the_host_little_more(
    num_requests: int, small_engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is the choice of the number of drafts, and nothing for each request."""
    monkeypatch.setattr(registry, "DraftLength", AtRest)
    head = {"method": "eagle3", "model": str(BUNDLED_MODEL_PATH / "head"), "num_speculative_tokens": 2}
    options = SMALL | {"max_model_len": 512, "num_blocks": 256}
    with LLM(**options, speculative_config=head | {"enable_adaptive_verification": True}) as llm:
        at_rest = steady(llm, num_requests, calls)
    assert at_rest - steady(small_engine, num_requests, calls) <= MOST_CALLS_AT_REST


def test_a_text_more_that_is_embedded_costs_the_host_few_calls(tmp_path: Path, one_thread: None) -> None:
    """The work for each text is done for all texts of a call at once, as far as possible."""
    make_encoder(tmp_path)
    counts = []
    with LLM(tmp_path, device="cpu", mode="eager", max_num_batched_tokens=640, max_num_seqs=40, progress=False) as llm:
        for num_texts in (8, 40):
            texts = [{"prompt_token_ids": [number] * 16} for number in range(num_texts)]
            llm.embed(texts)  # the next call frees as many rows as it takes
            counts.append(calls(partial(llm.embed, texts), ENGINE, 1))
    assert (counts[1] - counts[0]) / 32 <= MOST_CALLS_A_TEXT


def test_a_compiled_step_reads_what_its_bound_counts() -> None:
    """Each weight and each layer's cache is read by one piece or op. The dynamic range leaves the head to others."""
    config = resolve(EngineOptions(device="cpu", mode="compiled", compile_ranges=(8,)))
    model = without_storage(build_model(config.model), config.device)
    weights = dict(model.named_parameters(remove_duplicate=False))
    sizes, num_layers = model_sizes(config.model), config.model.num_layers
    graph = trace(model, forward_signature(config))
    for compile_range in compile_ranges(config):
        module, _ = apply_passes(config, graph, compile_range)
        plan, _ = make_plan(module.graph, split(module.graph))
        reads = Counter(argument["value"] for step in plan.steps for argument in step.arguments if "value" in argument)
        read = [source for index, source in enumerate(plan.inputs) for _ in range(reads[index])]
        names = [leaf.name for source in read if isinstance(source, Parameter) for leaf in source.leaves()]
        read_bytes = sum(weights[name].nbytes for name in names if name in weights and "embed_tokens" not in name)
        assert read_bytes == sizes.weight_bytes - (0 if compile_range.small else model.lm_head.weight.nbytes)
        caches = [source.name for source in read if source.kind == "argument" and "kv_caches" in source.name]
        assert sorted(caches) == sorted(f"kv_caches.{layer}" for layer in range(num_layers))
    assert block_bytes(config) == config.cache.block_size * sum(layer.kv_bytes for layer in sizes.attention)
