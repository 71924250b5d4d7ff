"""The kernels that a start on a described card would launch, as the engine itself collects them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from cards import Card, on_card
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.engine import load_model, runner
from compiled_engine.engine.runner import Runner
from compiled_engine.engine.warm_up import compile_kernels
from compiled_engine.features.images import tower
from compiled_engine.features.registry import make_features
from compiled_engine.features.speculation import draft_head, draft_model
from compiled_engine.graphs.compiled_model import CompileCounts, CompiledModel
from compiled_engine.graphs.compiler.build import apply_passes, trace_rank
from compiled_engine.graphs.compiler.compiled_range import CompiledRange
from compiled_engine.graphs.compiler.direct_piece import direct_source, is_direct, load_direct
from compiled_engine.graphs.compiler.piece import piece_from_json
from compiled_engine.graphs.compiler.signature import callables_of
from compiled_engine.graphs.compiler.split import make_plan, split
from compiled_engine.graphs.compiler.trace import without_storage
from compiled_engine.kernels.compile_ahead import PACKAGE, KernelWorkers
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.group import Group
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.process.profiling import StepClock
from compiled_engine.process.progress import Progress, SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.resolve.engine import resolve

CPU = torch.device("cpu")


class Launch(NamedTuple):
    """A kernel as the engine would compile it: the module and name of its function, and Triton's specialisation."""

    module: str
    name: str
    specialization: str


class Collected(KernelWorkers):
    """Workers that record the kernels to compile, and compile nothing."""

    def __init__(self) -> None:
        super().__init__(0, None)
        self.launches: set[Launch] = set()

    def compile(self, module: str, name: str, specialization: str) -> bool:
        self.launches.add(Launch(module, name, specialization))
        return True

    def launched(self, *, fn: Any, compile: dict[str, Any], **about: Any) -> bool:
        """Record a kernel that is launched, as the hook that Triton calls; returns that it need not be compiled."""
        return not fn.module.startswith(PACKAGE) or self.compile(fn.module, fn.name, compile["specialization_data"])


class CollectingRunner(Runner):
    """A runner whose start ends after its kernels have been collected."""

    def _start(self, progress: Progress, workers: KernelWorkers) -> None:
        reports = [report for each in self._compiled.ranges for report in each.passes] if self._compiled else []
        notes = [note for report in reports if report.name == "quantise" for note in report.notes]
        self.notes = tuple(dict.fromkeys(note.rpartition(" bytes; ")[2] for note in notes if " bytes; " in note))
        compile_kernels(self._config, self.step, workers, progress, self._hooks.features)
        for feature in self._hooks.features:
            feature.start_up(progress)


class Collection(NamedTuple):
    """The kernels that a start would compile on a card, or why the engine refuses the start there."""

    launches: tuple[Launch, ...] = ()
    refused: str = ""
    notes: tuple[str, ...] = ()  # of the passes, on the kernels of quantised linears


def collect(options: EngineOptions, card: Card) -> Collection:
    """Return the kernels that a start with these options would compile on a card.

    Traces the model on the CPU, and moves the graphs to the card before the passes run. For a process that does
    nothing else, see `on_card`.
    """
    with on_card(card), pytest.MonkeyPatch.context() as patch:
        try:
            config = resolve(options)
        except ValueError as error:
            return Collection(refused=str(error))
        for module in (runner, tower, draft_model, draft_head):
            patch.setattr(module, "compile_in_turn", compiled_for_card)
        patch.setattr(runner, "CudaCapture", lambda device: SimpleNamespace(on_attention=None))
        patch.setattr(load_model, "load_weights", lambda *arguments: None)  # tensors of a card have no values
        kernels = Collected()
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", kernels.launched)
        patch.setattr(runner, "KernelWorkers", lambda *arguments: kernels)
        started = CollectingRunner(config, SilentProgress(), Timeline(), StepClock(CPU), make_features())
        return Collection(tuple(sorted(kernels.launches)), "", started.notes)


def compiled_for_card(
    config: EngineConfig,
    group: Group,
    model_to_trace: Callable[[ModelConfig], nn.Module],
    progress: Progress,
    timeline: Timeline,
) -> CompiledModel | None:
    """Return the model that `compile_in_turn` returns, without a cache and without Inductor."""
    if not config.compile.enabled:
        return None
    ranges, texts = [], {}
    with _disable_current_modes():
        model = without_storage(model_to_trace(local_model(config)), CPU)
        for name, signature in callables_of(config).items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "is_available", lambda: False)  # Dynamo would ask the GPU for its state
                traced = trace_rank(config, model, signature)
            move(traced.module, config.device)
            for compile_range in signature.ranges:
                module, reports = apply_passes(config, traced, compile_range)
                plan, unique = make_plan(module.graph, split(module.graph), signature.called_with)
                returns = signature.returned(compile_range)
                ranges.append(CompiledRange(name, compile_range, plan, tuple(returns), reports))
                texts |= unique
        direct = frozenset(key for key, text in texts.items() if is_direct(text))
        pieces = {key: _piece(text) for key, text in texts.items()}
    off = SimpleNamespace(status="off", key="", folder=Path(), why="")
    return CompiledModel(tuple(ranges), pieces, direct, off, CompileCounts(1, 0))


def _piece(text: str) -> Callable[..., Any]:
    """Return the function of a piece; Inductor's are interpreted, for the kernels of the engine that they call."""
    return load_direct(direct_source(text), "cuda") if is_direct(text) else piece_from_json(text)[0]


def move(module: fx.GraphModule, device: torch.device) -> None:
    """Give the values of a traced graph, and the devices in its arguments, another device."""

    def moved(value: Any) -> Any:
        if isinstance(value, FakeTensor) and value.fake_device == CPU:
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return FakeTensor(value.fake_mode, like, device)
        return device if isinstance(value, torch.device) and value == CPU else value

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))
    module.recompile()
