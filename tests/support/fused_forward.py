"""A model's graphs after their passes, executed op by op: the result of the passes, without Inductor or an engine.

It takes seconds where compiling takes minutes, and computes what a compiled model computes, except for Inductor's
fusions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compiled_engine.attention.inputs import ForwardArguments, arguments_of, attention_inputs_of, step_of
from compiled_engine.config import EngineConfig
from compiled_engine.engine.cache_memory import allocate
from compiled_engine.graphs.compiler.build import apply_passes
from compiled_engine.graphs.compiler.piece import piece_from_json
from compiled_engine.graphs.compiler.plan import Plan
from compiled_engine.graphs.compiler.signature import FORWARD, LOGITS, callables_of, extra_step_tensors
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.stitch import Forward, stitch
from compiled_engine.graphs.compiler.trace import trace, without_storage
from compiled_engine.kv_format import is_coded
from compiled_engine.models.checkpoint.build_model import build_model, build_tensors
from compiled_engine.models.checkpoint.loader import load_weights
from compiled_engine.models.checkpoint.parameters import materialize, states_of
from compiled_engine.passes.framework.graph_pass import CompileRange
from compiled_engine.passes.framework.manager import PassReport
from compiled_engine.process.progress import SilentProgress
from compiled_engine.recurrence.sequences import ROWS

BLOCK_SIZE = 4


@dataclass(frozen=True)
class FusedModel:
    """A model's graphs after their passes, bound to weights, and the reports of the passes."""

    config: EngineConfig
    forwards: tuple[tuple[CompileRange, Forward], ...]  # those for small batches return logits
    logits: Forward
    reports: tuple[PassReport, ...]  # of the first range

    def logprobs(self, sequences: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return log-probabilities [length, V] of each sequence; a step is the number of tokens of each that it
        computes."""
        device = self.config.device
        per_sequence = -(-max(map(len, sequences)) // BLOCK_SIZE)
        kv_caches = allocate(self.config, per_sequence * len(sequences))
        for cache in kv_caches:
            (cache.view(torch.uint8).random_(256) if is_coded(cache.dtype) else cache.normal_())  # as recycled blocks
        computed = [0] * len(sequences)
        found: list[list[torch.Tensor]] = [[] for _ in sequences]
        for step in steps:
            rows = sorted((row for row, count in enumerate(step) if count), key=lambda row: step[row] > 1)
            spans = [range(computed[row], computed[row] + step[row]) for row in rows]
            ids = [sequences[row][position] for row, span in zip(rows, spans, strict=True) for position in span]
            blocks = [range(row * per_sequence, (row + 1) * per_sequence) for row in rows]
            tensors = step_of(ids, spans, blocks, BLOCK_SIZE, device, extra_step_tensors(self.config))
            if self.config.model.recurrences is not None:
                tensors[ROWS.name] = torch.tensor(rows, dtype=ROWS.dtype, device=device)
            inputs = attention_inputs_of(tensors, self.config.attention_backend)
            arguments = arguments_of(tensors, inputs, kv_caches)
            logprobs_TV = self._logits(len(ids), arguments).float().log_softmax(-1)
            for row, part in zip(rows, logprobs_TV.split([len(span) for span in spans]), strict=True):
                found[row].append(part)
                computed[row] += len(part)
        return [torch.cat(parts) for parts in found]

    def _logits(self, num_tokens: int, arguments: ForwardArguments) -> torch.Tensor:
        for compile_range, forward in self.forwards:
            if compile_range.small and num_tokens in compile_range:
                return forward(*arguments)
        return self.logits(self.forwards[-1][1](*arguments))


@torch.no_grad()
def fuse(config: EngineConfig, *, verify: bool = False) -> FusedModel:
    """Trace the callables, run the passes for each compile range, and bind the graphs to the checkpoint's weights.

    config: with blocks of BLOCK_SIZE. verify: execute each rewrite and compare.
    """
    traceable = without_storage(build_model(config.model), config.device)
    plans: list[tuple[str, CompileRange, Plan, dict[str, str]]] = []
    reports: list[tuple[PassReport, ...]] = []
    for name, signature in callables_of(config).items():
        traced = trace(traceable, signature, verify=verify)
        for compile_range in signature.ranges:
            module, found = apply_passes(config, traced, compile_range)
            plan, unique = make_plan(module.graph, split(module.graph), signature.arguments)
            plans.append((name, compile_range, plan, unique))
            reports.append(found)
    model = build_tensors(config.model, None)
    parameters = dict.fromkeys(parameter for _, _, plan, _ in plans for parameter in plan.parameters)
    weights = materialize(model, parameters, config.device)
    load_weights(weights, model, config.model, SilentProgress())
    for name in states_of(model):
        weights.tensors[name].fill_(float("nan"))  # no request may read what another has left
    bound: dict[str, list[tuple[CompileRange, Forward]]] = {}
    for name, compile_range, plan, unique in plans:
        pieces = {key: piece_from_json(text)[0] for key, text in unique.items()}
        bound.setdefault(name, []).append((compile_range, stitch(plan, pieces, weights.tensors)))
    ((_, logits),) = bound[LOGITS]
    return FusedModel(config, tuple(bound[FORWARD]), logits, reports[0])
