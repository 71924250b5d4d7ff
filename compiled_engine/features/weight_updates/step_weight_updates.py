"""The part of weight updates on a rank's device: keeps the tensors of an update, checks them and copies them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.load_model import RankWeights
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.features.weight_updates.broadcast import Broadcasts
from compiled_engine.features.weight_updates.extras import NAME
from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.models.checkpoint.loader import CheckedWeights
from compiled_engine.models.checkpoint.safetensors_files import STORED_DTYPES, map_tensors
from compiled_engine.process.progress import SilentProgress

# Check tensors, with the name of their origin, against a model; None if none of them belongs to the model.
CheckTensors = Callable[[dict[str, torch.Tensor], Path], CheckedWeights | None]
SEVERAL = Path("the update")  # names an update that does not come from one folder, in errors


class StepWeightUpdates(StepFeature):
    """Fills a rank's parameters again, at the same addresses, with the code that loads checkpoints.

    The tensors of an update have the names and shapes of the checkpoint's: they are whole, not this rank's part.
    """

    name = NAME
    calls = ("take", "connect", "take_broadcast", "check", "apply", "drop")

    def __init__(self, weights: RankWeights, rank: int, num_ranks: int, others: Sequence[CheckTensors] = ()) -> None:
        """Make the feature of a rank. rank, num_ranks: among the ranks of all stages.

        others: checks of further models, such as a vision tower, whose tensors an update may lack.
        """
        self.weights = weights
        self._others = tuple(others)
        self._rank, self._num_ranks = rank, num_ranks
        self._broadcasts: Broadcasts | None = None
        self._source = SEVERAL
        self._tensors: dict[str, torch.Tensor] = {}
        self._checked: list[CheckedWeights] | None = None

    def take(
        self, path: str | None = None, tensors: Iterable[tuple[str, torch.Tensor]] = (), temporary: bool = False
    ) -> int:
        """Store tensors of an update; return the number stored so far.

        path: a folder with safetensors files, which are mapped, so that they may be deleted afterwards. tensors: stored
        by reference, if there is no path. temporary: errors do not name the folder.

        Raises ControlError, and stores none of them, if files are missing or damaged, or a name comes twice.
        """
        found = tensors if path is None else _mapped(path).items()
        self._source = SEVERAL if path is None or temporary or self._tensors else Path(path)
        return self._keep(found)

    def connect(self, address: str, port: int, rank_offset: int, world_size: int, packed: bool = False) -> None:
        """Join the process group of a trainer, see Broadcasts, and leave an earlier group.

        rank_offset: the first rank of the engine in the group. Raises ControlError if the group has another size than
        trainer and engine together, or if the trainer does not answer.
        """
        if world_size != rank_offset + self._num_ranks:
            raise ControlError(f"world_size must be rank_offset + {self._num_ranks}, got {world_size}")
        self._broadcasts = None
        try:
            self._broadcasts = Broadcasts(address, port, rank_offset + self._rank, world_size, packed=packed)
        except RuntimeError as error:
            raise ControlError(f"no trainer at {address}, port {port}: {error}") from error

    def take_broadcast(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> int:
        """Store tensors that the trainer broadcasts; return the number stored so far.

        Raises ControlError, and stores none of them, if there is no group, a dtype is not allowed, the trainer ends
        meanwhile, or a name comes twice.
        """
        if self._broadcasts is None:
            raise ControlError("no trainer is connected; initialise the weight transfer first")
        allowed = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES}
        if wrong := sorted(set(dtypes) - allowed.keys()):
            raise ControlError(f"dtype is {wrong[0]!r}; allowed: {', '.join(allowed)}")
        announced = [(name, allowed[dtype], shape) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)]
        try:
            received = [*self._broadcasts.receive(announced)]
        except RuntimeError as error:
            self._broadcasts = None
            raise ControlError(f"the trainer has ended in the middle of a transfer: {error}") from error
        self._source = SEVERAL
        return self._keep(received)

    def _keep(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        found: dict[str, torch.Tensor] = {}
        repeated: list[str] = []
        for name, tensor in tensors:
            if name in found or name in self._tensors:
                repeated.append(name)
            found[name] = tensor.detach()
        if repeated:
            raise ControlError(f"tensors that come twice in one update: {name_some(repeated)}")
        self._tensors |= found
        return len(self._tensors)

    def check(self) -> None:
        """Check the update. Raises ControlError if it does not fit, see `check_weights`."""
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

    def drop(self) -> None:
        """Forget the tensors of an update."""
        self._tensors, self._checked, self._source = {}, None, SEVERAL

    def close(self) -> None:
        self._broadcasts = None
        self.drop()
        del self.weights, self._others


def _mapped(path: str) -> dict[str, torch.Tensor]:
    try:
        return map_tensors(Path(path))
    except (ValueError, OSError) as error:
        raise ControlError(str(error)) from error
