"""Find the linears that a model calls for small batches, in its graph after all passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from compiled_engine.config import EngineConfig, ParallelConfig
from compiled_engine.graphs.compiler.build import fuse, trace_rank
from compiled_engine.graphs.compiler.signature import forward_signature
from compiled_engine.graphs.compiler.trace import without_storage
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.matching import is_call, named
from compiled_engine.passes.framework.profile import LinearKey
from compiled_engine.passes.linear.linears import linear_of
from compiled_engine.passes.linear.quantised_linear_op import quantised_linear
from compiled_engine.passes.linear.small_batch_linear_op import TOKEN_BUCKETS, small_batch_linear
from compiled_engine.resolve.compile import default_passes
from compiled_engine.tune.linears import HEAD, LAYER, LinearCase, key

SMALL_BATCH = CompileRange(1, TOKEN_BUCKETS[-1], small=True)


def linears_of(config: EngineConfig, num_ranks: int = 1) -> list[LinearCase]:
    """Return a one-token case for each shape of weight that one of `num_ranks` ranks has, in call order.

    The case of the linear that computes logits is named HEAD. If calls with the same shape are fused differently, the
    case is the most frequent one. Quantised linears and experts are skipped, since other kernels compute them. The
    model is traced on the CPU with all default passes, whatever an earlier profile decided about them: cases depend on
    the model alone.
    """
    graph = _graph(_of_ranks(config, num_ranks))
    calls = [node for node in graph.nodes if is_call(node, small_batch_linear, quantised_linear) or linear_of(node)]
    cases: dict[LinearKey, Counter[LinearCase]] = {}
    for node in calls:
        if is_call(node, small_batch_linear):
            case = _case(HEAD if node is calls[-1] else LAYER, named(node))
            cases.setdefault(key(case), Counter())[case] += 1
    return [counts.most_common(1)[0][0] for counts in cases.values()]


def _of_ranks(config: EngineConfig, num_ranks: int) -> EngineConfig:
    """Return the configuration for `num_ranks` ranks on CPUs. The ranks need not run: the model is only traced."""
    parallel = ParallelConfig(num_ranks, "in_process" if num_ranks == 1 else "multiprocess")
    passes = default_passes(config.model, num_ranks)
    compile_ = replace(config.compile, passes=passes, verify=False)
    return replace(config, device=torch.device("cpu"), parallel=parallel, compile=compile_)


def _graph(config: EngineConfig) -> fx.Graph:
    model = without_storage(build_model(local_model(config)), config.device)
    traced = trace_rank(config, model, forward_signature(config))
    return fuse(config, traced, SMALL_BATCH)[0].graph


def _case(name: str, arguments: dict[str, Any]) -> LinearCase:
    num_rows, k = arguments["weight_NK"].meta["val"].shape
    return LinearCase(
        name,
        num_tokens=1,
        num_rows=num_rows,
        k=k,
        norm=arguments["norm_weight_K"] is not None,
        silu_mul=arguments["silu_mul"],
        residual=arguments["residual_TM"] is not None,
    )
