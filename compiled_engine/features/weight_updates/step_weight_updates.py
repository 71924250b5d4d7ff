"""The part of weight updates on a rank's device: keeps the tensors of an update, checks them and copies them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.load_model import RankWeights
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.features.weight_updates.extras import NAME
from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.models.checkpoint.loader import CheckedWeights
from compiled_engine.models.checkpoint.safetensors_files import map_tensors
from compiled_engine.process.progress import SilentProgress

SEVERAL = Path("the update")  # names an update that does not come from one folder, in errors


class StepWeightUpdates(StepFeature):
    """Fills a rank's parameters again, at their addresses, by the code that filled them first.

    The tensors of an update have the checkpoint's names, and are the checkpoint's whole, not this rank's part.
    """

    name = NAME
    calls = ("take", "check", "apply", "drop")

    def __init__(self, weights: RankWeights) -> None:
        self.weights = weights
        self._source = SEVERAL
        self._tensors: dict[str, torch.Tensor] = {}
        self._checked: CheckedWeights | None = None

    def take(
        self, path: str | None = None, tensors: Iterable[tuple[str, torch.Tensor]] = (), temporary: bool = False
    ) -> int:
        """Keep tensors of an update; returns the number kept so far.

        path: a folder with safetensors files, which are mapped, so that they may be deleted afterwards. tensors: kept
        by reference. temporary: the folder's name means nothing to the user.

        Raises ControlError, and keeps none of them, if files are missing or damaged, or a name comes twice.
        """
        found: dict[str, torch.Tensor] = {}
        repeated: list[str] = []
        for name, tensor in tensors if path is None else _mapped(path).items():
            if name in found or name in self._tensors:
                repeated.append(name)
            found[name] = tensor.detach()
        if repeated:
            raise ControlError(f"tensors that come twice in one update: {name_some(repeated)}")
        self._source = SEVERAL if path is None or temporary or self._tensors else Path(path)
        self._tensors |= found
        return len(self._tensors)

    def check(self) -> None:
        """Check the update. Raises ControlError if it does not fit, see `check_weights`."""
        try:
            self._checked = self.weights.check(self._tensors, self._source)
        except ValueError as error:
            raise ControlError(str(error)) from error

    @torch.no_grad()
    def apply(self) -> None:
        """Copy the checked update into place, and forget its tensors."""
        assert self._checked is not None
        checked = self._checked
        self.drop()
        checked.copy(SilentProgress())

    def drop(self) -> None:
        """Forget the tensors of an update."""
        self._tensors, self._checked, self._source = {}, None, SEVERAL

    def close(self) -> None:
        self.drop()


def _mapped(path: str) -> dict[str, torch.Tensor]:
    try:
        return map_tensors(Path(path))
    except (ValueError, OSError) as error:
        raise ControlError(str(error)) from error
