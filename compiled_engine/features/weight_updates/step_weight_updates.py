"""Stores the tensors of weight updates on a rank, checks them and copies them into place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.load_model import RankWeights
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.features.weight_updates.broadcast import (
    BACKENDS,
    NCCL,
    Broadcasts,
    kept_copy,
    over_gloo,
    over_nccl,
)
from compiled_engine.features.weight_updates.extras import NAME
from compiled_engine.features.weight_updates.shared_memory import OpenStorage, gpu_uuid, open_on, opened
from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.models.checkpoint.loader import CheckedWeights
from compiled_engine.models.checkpoint.safetensors_files import STORED_DTYPES, map_tensors
from compiled_engine.process.progress import SilentProgress

# A function that checks tensors against a model. The path names their origin in errors. Returns None if none of them
# belongs to the model.
CheckTensors = Callable[[dict[str, torch.Tensor], Path], CheckedWeights | None]
SEVERAL = Path("the update")  # names an update that does not come from one folder, in errors


class StepWeightUpdates(StepFeature):
    """Replaces the values of a rank's parameters, at the same addresses, with the code that loads checkpoints.

    The tensors of an update have the names and shapes of the checkpoint's: they are whole, not this rank's part.
    """

    name = NAME
    calls = ("take", "connect", "take_broadcast", "take_shared", "check", "apply", "drop")

    def __init__(
        self,
        weights: RankWeights,
        device: torch.device,
        rank: int,
        num_ranks: int,
        others: Sequence[CheckTensors] = (),
        open_storage: OpenStorage | None = None,
    ) -> None:
        """Make the feature of a rank. rank, num_ranks: index and number among the ranks of all stages.

        others: checks of further models, such as a vision tower, whose tensors an update may lack. open_storage: opens
        memory that a trainer shares; None: by CUDA IPC.
        """
        self.weights, self._device = weights, device
        self._open_storage = open_storage or open_on(device)
        self._others = tuple(others)
        self._rank, self._num_ranks = rank, num_ranks
        self._broadcasts: Broadcasts | None = None
        self._source = SEVERAL
        self._tensors: dict[str, torch.Tensor] = {}
        self._checked: list[CheckedWeights] | None = None

    def take(
        self, path: str | None = None, tensors: Iterable[tuple[str, torch.Tensor]] = (), temporary: bool = False
    ) -> int:
        """Store tensors of an update. Return the number stored so far.

        path: a folder with safetensors files, which are mapped, so that they may be deleted afterwards. tensors: stored
        by reference, if there is no path. temporary: errors do not name the folder.

        Raises ControlError, and stores none of these tensors, if files are missing or damaged, or a name comes twice.
        """
        if path is None:
            return self.take_tensors(tensors)
        return self._keep(_mapped(path).items(), SEVERAL if temporary else Path(path))

    def take_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Store tensors of an update by reference. Return the number stored so far.

        Raises ControlError, and stores none of these tensors, if a name comes twice.
        """
        return self._keep(tensors)

    @property
    def num_received(self) -> int:
        """The number of tensors stored so far."""
        return len(self._tensors)

    def connect(
        self, address: str, port: int, rank_offset: int, world_size: int, packed: bool = False, backend: str = "gloo"
    ) -> None:
        """Join the group of a trainer, see Broadcasts, and leave an earlier one.

        rank_offset: the first rank of the engine in the group. backend: gloo or nccl. Raises ControlError for another
        backend, if the group has fewer ranks than trainer and engine together, or if the trainer does not answer.
        """
        if backend not in BACKENDS:
            raise ControlError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
        if not 1 <= rank_offset <= world_size - self._num_ranks:
            ranks = f"with world_size {world_size} and {self._num_ranks} ranks of the engine"
            raise ControlError(f"rank_offset is {rank_offset}, {ranks}; allowed: 1 to world_size - {self._num_ranks}")
        self._broadcasts = None
        try:
            group = address, port, rank_offset + self._rank, world_size
            receive = over_nccl(*group, self._device) if backend == NCCL else over_gloo(*group)
            self._broadcasts = Broadcasts(receive, packed=packed)
        except ControlError:
            raise
        except (RuntimeError, ValueError) as error:
            raise ControlError(f"no trainer at {address}, port {port}: {error}") from error

    def take_broadcast(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], packed: bool | None = None
    ) -> int:
        """Store tensors that the trainer broadcasts. Return the number stored so far. packed: see Broadcasts.receive.

        Raises ControlError, and stores none of these tensors, if there is no group, a dtype or shape is not allowed,
        the trainer ends meanwhile, or a name comes twice.
        """
        if self._broadcasts is None:
            raise ControlError("no trainer is connected; initialise the weight transfer first")
        allowed = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES}
        if wrong := sorted(set(dtypes) - allowed.keys()):
            raise ControlError(f"dtype is {wrong[0]!r}; allowed: {', '.join(allowed)}")
        for name, shape in zip(names, shapes, strict=True):
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ControlError(f"shape of {name} is {shape}; allowed: integers from 0")
        announced = [(name, allowed[dtype], shape) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)]
        try:
            received = [*self._broadcasts.receive(announced, packed)]
        except RuntimeError as error:
            self._broadcasts = None
            raise ControlError(f"a transfer has failed, so the trainer is disconnected: {error}") from error
        return self._keep(received)

    def take_shared(self, shared: dict[str, Any]) -> int:
        """Store tensors in memory that the trainer shares by CUDA IPC. Return the number stored so far.

        shared: SharedTensors as plain data. The tensors are stored by reference, or copied if its `copy` is set. Raises
        ControlError, and stores none of these tensors, if the description is invalid, its memory cannot be opened, or a
        name comes twice.
        """
        found: Iterable[tuple[str, torch.Tensor]] = opened(shared, gpu_uuid(self._device), self._open_storage)
        if shared.get("copy"):
            found = [(name, kept_copy(tensor)) for name, tensor in found]
            torch.cuda.synchronize(self._device)
        return self._keep(found)

    def _keep(self, tensors: Iterable[tuple[str, torch.Tensor]], source: Path = SEVERAL) -> int:
        found: dict[str, torch.Tensor] = {}
        repeated: list[str] = []
        for name, tensor in tensors:
            if name in found or name in self._tensors:
                repeated.append(name)
            found[name] = tensor.detach()
        if repeated:
            raise ControlError(f"tensors that come twice in one update: {name_some(repeated)}")
        self._source = SEVERAL if self._tensors else source
        self._tensors |= found
        return len(self._tensors)

    def check(self) -> None:
        """Check the update. Raises ControlError if its tensors do not fit the parameters, see RankWeights.check."""
        try:
            found = [check(self._tensors, self._source) for check in (self.weights.check, *self._others)]
        except ValueError as error:
            raise ControlError(str(error)) from error
        self._checked = [checked for checked in found if checked is not None]

    @torch.no_grad()
    def apply(self) -> None:
        """Copy the checked update into place, and forget its tensors."""
        assert self._checked is not None
        checked = self._checked
        self.drop()
        for each in checked:
            each.copy(SilentProgress())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the sender may change shared tensors now

    def drop(self) -> None:
        """Forget the tensors of an update."""
        self._tensors, self._checked, self._source = {}, None, SEVERAL

    def close(self) -> None:
        self._broadcasts = None
        self.drop()
        del self.weights, self._others, self._open_storage


def _mapped(path: str) -> dict[str, torch.Tensor]:
    try:
        return map_tensors(Path(path))
    except (ValueError, OSError) as error:
        raise ControlError(str(error)) from error
