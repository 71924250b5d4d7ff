"""How the stages of a pipeline hand on what they computed, from device to device: by NCCL between GPUs, by gloo else.

What a stage sends goes to the rank of the next one that has the same share of the layers. The last stage sends sampled
tokens to the first. Both directions have connections of their own: on one, a rank that sends would wait for its peer to
receive, while that one waits to send.

On GPUs a transfer is a kernel that waits for its peer. Beside others it would keep a part of the GPU from them, and a
kernel that is made for all of it would take twice as long. So what comes after a transfer of values, or after the
receipt of tokens, runs after it. A few tokens are sent without waiting for anybody.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from compiled_engine.collectives.gloo import TIMEOUT
from compiled_engine.parallel.stages import Stage


class StageLink:
    """On a GPU everything is launched, and the host waits for nothing. rank, tensor: this rank's number, and how many
    share each layer."""

    def __init__(self, stage: Stage, rank: int, tensor: int, device: torch.device):
        """Every rank makes one at the same time; waits for the neighbours."""
        self.stage, self._device = stage, device
        self._before, self._after = rank - tensor, rank + tensor
        self._first, self._last = rank - stage.index * tensor, rank + (stage.count - 1 - stage.index) * tensor
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._values, self._tokens = (dist.new_group(backend=backend, timeout=TIMEOUT) for _ in range(2))
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._connect()

    def _connect(self) -> None:
        """NCCL connects two ranks when the first is sent something: that is not to be in a step."""
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
        """To the next stage: a contiguous tensor, which nobody may write to again on a CPU."""
        work = dist.isend(values, self._after, group=self._values)
        assert work is not None
        if self._device.type == "cuda":
            work.wait()
        else:  # this would wait on the host
            self._keep(work, values)

    def receive(self, into: torch.Tensor) -> None:
        """From the stage before: what was sent as a tensor of the same size."""
        _received(dist.irecv(into, self._before, group=self._values))

    def send_tokens(self, tokens: torch.Tensor) -> None:
        """From the last stage to the first."""
        work = dist.isend(tokens, self._first, group=self._tokens)
        assert work is not None
        self._keep(work, tokens)

    def receive_tokens(self, into: torch.Tensor) -> None:
        """In the first stage, in the order in which they were sent."""
        _received(dist.irecv(into, self._last, group=self._tokens))

    def _keep(self, work: dist.Work, tensor: torch.Tensor) -> None:
        """The tensor has to be there until it has arrived."""
        self._sent.append((work, tensor))
        while len(self._sent) > self.stage.count + 1:  # more steps than that are never in flight
            self._sent.popleft()[0].wait()

    def drain(self) -> None:
        """Wait for what is on its way."""
        while self._sent:
            self._sent.popleft()[0].wait()


def _received(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()
