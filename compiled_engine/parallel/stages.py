"""Pipeline stages: how a model's layers are divided, and how stages send their results.

A stage ends after the attention of its last layer: the compiled model is split there anyway, so stages consist of the
same compiled pieces as the whole model. The rest of the layer (output projection, MLP) begins the next stage. The
embedding is in the first stage, the last norm and the logits in the last.

Values, a stage's activations, go from device to device: by NCCL between GPUs, otherwise by gloo. A rank sends to the
rank of the next stage that has the same index among the tensor-parallel ranks of its stage. The last stage sends
sampled tokens to the first. Each direction has its own connection: on a shared one, two sending ranks would each wait
for the other to receive.

On GPUs a transfer is a kernel that waits for its peer. If it ran beside other kernels, it would occupy a part of the
GPU, and a kernel sized for the whole GPU would take twice as long. So kernels after a transfer of values, or after the
receipt of tokens, wait for it. Kernels do not wait while tokens are sent, since these are few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_engine.attention.inputs import STEP_TENSORS, arguments_of, attention_inputs_of, padding_of
from compiled_engine.attention.op import ATTENTION_OPS
from compiled_engine.config import ModelConfig
from compiled_engine.parallel.gloo import TIMEOUT
from compiled_engine.parallel.rank_share import LayerShare


def stages_of(stage_layers: tuple[int, ...], num_layers: int) -> tuple[LayerShare, ...]:
    """Return the layers of each stage. stage_layers: number of layers of each stage; empty: a single stage."""
    ends = tuple(accumulate(stage_layers or (num_layers,)))
    starts = (0, *ends)
    return tuple(LayerShare(range(starts[i], end), i, len(ends)) for i, end in enumerate(ends))


@dataclass(frozen=True)
class ParameterPlaces:
    """The point of a model's forward at which each parameter, given by its name, is first used.

    Tied parameters are listed under each name.
    """

    attentions: Mapping[str, int]  # number of attention calls before the first use
    of_logits: frozenset[str]  # parameters used for the logits

    def of_stage(self, stage: LayerShare) -> frozenset[str]:
        """Return the names of the parameters that a stage needs. A tied embedding may be needed by two stages."""
        first, end = stage.layers.start, stage.layers.stop
        least, most = (0 if stage.is_first else first), (end - 1 if not stage.is_last else end)
        own = {name for name, count in self.attentions.items() if least <= count <= most}
        return frozenset(own | self.of_logits if stage.is_last else own)


def parameter_places(model: nn.Module, config: ModelConfig) -> ParameterPlaces:
    """Return where a model uses its parameters. Moves `model` to the meta device and runs its code there once."""
    names = _names_by_parameter(model)
    model.to("meta")  # moves its buffers
    watch = _Watch(names)
    sizes = {"tokens": 4, "requests": 1, "request_borders": 2, "blocks_per_request": 2, "work": 2}
    step = padding_of(STEP_TENSORS, sizes, torch.device("meta"))
    caches = [torch.zeros(shape, dtype=config.dtype, device="meta") for shape in config.kv_shapes(2, 16)]
    with torch.inference_mode(), watch:
        hidden_TD = model(*arguments_of(step, attention_inputs_of(step, "torch"), caches))
    of_logits = _Watch(names)
    with torch.inference_mode(), of_logits:
        model.logits(hidden_TD)  # type: ignore[operator]
    return ParameterPlaces(watch.found, frozenset(of_logits.found))


def divide_layers(places: ParameterPlaces, nbytes: Mapping[str, int], num_layers: int, count: int) -> tuple[int, ...]:
    """Return the number of layers of each of `count` stages, chosen so that the slowest stage is as fast as possible.

    nbytes: bytes per parameter, with tied parameters under one name. A stage's cost is estimated by the bytes of the
    weights that it reads. Weights of the logits count half: a layer also reads its KV cache, which in a large batch is
    about as large as its weights, and a prompt needs few logits. Embeddings do not count, since few rows are read.
    Raises ValueError for more stages than layers.
    """
    if count > num_layers:
        raise ValueError(f"{count} stages of {num_layers} layers")
    read = [0] * (num_layers + 1)  # bytes by number of preceding attentions
    for name, size in nbytes.items():
        if name in places.of_logits:
            read[num_layers] += size // 2
        elif "embed" not in name:
            read[places.attentions[name]] += size
    before = [0, *accumulate(read)]

    def load(first: int, end: int) -> int:
        """Return the cost of the layers `first` to `end` - 1.

        If `end` is num_layers, the cost includes everything after the last attention.
        """
        return before[num_layers + 1 if end == num_layers else end] - before[first]

    # best[end]: (cost of the slowest stage, layers of each), for the stages so far, which hold the first `end` layers.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, count + 1):
        ends = [num_layers] if stage == count else range(stage, num_layers - count + stage + 1)
        best = {
            end: min(
                (max(most, load(first, end)), (*layers, end - first))
                for first, (most, layers) in best.items()
                if first < end
            )
            for end in ends
        }
    return best[num_layers][1]


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


class _Watch(TorchDispatchMode):
    """Records for each parameter, by name, how many attention ops ran before the first op that takes the parameter."""

    def __init__(self, names: Mapping[int, list[str]]):
        super().__init__()
        self._names, self._attentions = names, 0
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            for name in self._names.get(id(argument), ()):
                self.found.setdefault(name, self._attentions)
        if isinstance(func, torch._ops.OpOverload) and func.name() in ATTENTION_OPS:
            self._attentions += 1
            return None
        return func(*args, **(kwargs or {}))


class StageLink:
    """Sends activations and tokens to other stages, and receives them. On a GPU the host does not wait.

    rank: number of this rank. tensor: the tensor-parallel size.
    """

    def __init__(self, stage: LayerShare, rank: int, tensor: int, device: torch.device):
        """Connect to the neighbouring stages, and wait for them. All ranks must create their links together."""
        self.stage, self._device = stage, device
        self._before, self._after = rank - tensor, rank + tensor
        self._first, self._last = rank - stage.index * tensor, rank + (stage.count - 1 - stage.index) * tensor
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._values, self._tokens = (dist.new_group(backend=backend, timeout=TIMEOUT) for _ in range(2))
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._connect()

    def _connect(self) -> None:
        """Exchange a few bytes with each neighbour, so that the ranks are connected before the first step.

        NCCL connects two ranks at their first transfer.
        """
        nothing = torch.zeros(1, dtype=torch.uint8, device=self._device)
        if not self.stage.is_first:
            self.receive(nothing)
        if not self.stage.is_last:
            self.send(nothing)
        if self.stage.is_last:
            self.send_tokens(nothing.int())
        if self.stage.is_first:
            self.receive_tokens(nothing.int())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def send(self, values: torch.Tensor) -> None:
        """Send activations, a contiguous tensor, to the next stage. On a CPU it must not be written to afterwards."""
        work = dist.isend(values, self._after, group=self._values)
        assert work is not None
        if self._device.type == "cuda":
            work.wait()
        else:  # `wait` would block the host
            self._keep(work, values)

    def receive(self, into: torch.Tensor) -> None:
        """Receive the previous stage's activations into the tensor `into`, which must have the sent tensor's size."""
        _received(dist.irecv(into, self._before, group=self._values))

    def send_tokens(self, tokens: torch.Tensor) -> None:
        """Send tokens from the last stage to the first."""
        work = dist.isend(tokens, self._first, group=self._tokens)
        assert work is not None
        self._keep(work, tokens)

    def receive_tokens(self, into: torch.Tensor) -> None:
        """Receive tokens from the last stage, in the order in which they were sent. `into`: the tensor that gets them.

        Called by the ranks of the first stage.
        """
        _received(dist.irecv(into, self._last, group=self._tokens))

    def _keep(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._sent.append((work, tensor))
        while len(self._sent) > self.stage.count + 1:  # most steps in flight
            self._sent.popleft()[0].wait()

    def drain(self) -> None:
        """Wait for all pending transfers."""
        while self._sent:
            self._sent.popleft()[0].wait()


def _received(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()
