"""Tensors on a GPU that is not there: they have shapes, strides, dtypes and addresses, and no values."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
META = torch.device("meta")
# The address of each tensor's storage, aligned as CUDA aligns allocations.
ADDRESS = 1 << 40


class CardTensor(torch.Tensor):
    """A tensor without values. `meta`: the same on torch's meta device, which computes shapes and strides."""

    meta: torch.Tensor
    on: torch.device
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> CardTensor:
        # Without a device of its own for torch's dispatcher, which has none for GPUs in builds for CPUs.
        made = torch.Tensor._make_subclass(cls, meta, False)
        made.meta, made.on = meta, device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.on

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.on.type == "cuda"

    is_meta = False  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Serve calls outside of the mode, such as those of other threads."""
        device = next(each.device for each in tree_flatten((args, kwargs))[0] if isinstance(each, CardTensor))
        with CardTensors(device):
            return func(*args, **(kwargs or {}))

    def data_ptr(self) -> int:
        return ADDRESS + self.storage_offset() * self.element_size()

    def is_pinned(self) -> bool:
        return False

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CardTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return torch.zeros(self.shape, dtype=self.dtype, device="cpu").tolist()


class CardTensors(TorchDispatchMode):
    """Give tensors on `device` that an operation creates neither memory nor values; operations on these do nothing.

    Copies to the CPU are zeros. Ops of the engine run as on a GPU, up to the launches of their kernels.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def enter_thread(self) -> None:
        """Enter the mode in the calling thread for good."""
        CardTensors(self.device).__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in _PINNED:
            return args[0]
        flat, _ = tree_flatten((args, kwargs))
        device = next((each for each in flat if isinstance(each, torch.device)), None)
        ours = {id(each.meta): each for each in flat if isinstance(each, CardTensor)}
        if not ours and (device is None or device.type != "cuda"):
            return func(*args, **kwargs)
        if func.namespace == "compiled_engine":
            with self:
                return func.py_kernels.get(torch._C.DispatchKey.CUDA, func)(*args, **kwargs)
        if func is aten.copy_.default:
            return args[0]
        if func is aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        meta_args, meta_kwargs = tree_map(_on_meta, (args, kwargs))
        made = func(*meta_args, **meta_kwargs)
        if device is not None and device.type == "cpu":
            return tree_map(_zeros_like, made)

        def on_card(value: Any) -> Any:
            """Return an argument that the operation returns itself, or a new tensor on the card."""
            is_new = isinstance(value, torch.Tensor) and id(value) not in ours
            return CardTensor(value, self.device) if is_new else ours.get(id(value), value)

        return tree_map(on_card, made)


_PINNED = (aten.pin_memory.default, aten._pin_memory.default)


def _on_meta(value: Any) -> Any:
    """Return an operand on the meta device; other arguments unchanged."""
    if isinstance(value, CardTensor):
        return value.meta
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    return META if isinstance(value, torch.device) else value


def _zeros_like(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu") if is_tensor else value
