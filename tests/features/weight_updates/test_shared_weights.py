"""Tensors that a trainer shares: every field of their descriptions is checked, and views give the same values.

Storages are opened by their handles' numbers here, as CUDA IPC needs two processes on a GPU.
"""

from __future__ import annotations

import base64
import ctypes
import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from compiled_engine.config import ParallelConfig
from compiled_engine.engine.control import ControlError
from compiled_engine.features.weight_updates import step_weight_updates
from compiled_engine.features.weight_updates.extras import SharedStorage, SharedTensors
from compiled_engine.features.weight_updates.frontend.openrlhf_calls import update_weight_cuda_ipc
from compiled_engine.features.weight_updates.frontend.sharing import (
    described_tensor,
    share_tensors,
    shared_by_reductions,
)
from compiled_engine.features.weight_updates.nccl import unique_id_in
from compiled_engine.features.weight_updates.shared_memory import DTYPES, opened
from compiled_engine.features.weight_updates.step_weight_updates import StepWeightUpdates

GPU = "GPU-1"
PARALLEL = ParallelConfig(1, "in_process", 1)


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def storage_of(number: int, num_bytes: int) -> SharedStorage:
    return SharedStorage(
        handle=in_base64(bytes([number])),
        num_bytes=num_bytes,
        offset_bytes=512,
        ref_counter=in_base64(b"/torch_12_345_0"),
        ref_counter_offset=7,
        event=in_base64(bytes(64)),
        event_sync=True,
    )


def received(shared: SharedTensors, storages: list[torch.UntypedStorage]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the tensors of descriptions that have crossed a process, and the numbers of the opened storages."""
    numbers: list[int] = []

    def open_storage(storage: SharedStorage) -> torch.UntypedStorage:
        (number,) = base64.b64decode(storage.handle)
        numbers.append(number)
        return storages[number]

    given_data = msgspec.msgpack.decode(msgspec.msgpack.encode(shared))
    return dict(opened(given_data, GPU, open_storage)), numbers


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of few buffers, with strides and offsets."""
    buffers = [torch.arange(4096, dtype=torch.float32).add(start).view(torch.uint8) for start in (0, 0.5)]
    found = []
    for _ in range(draw(st.integers(1, 6))):
        data = draw(st.sampled_from(buffers)).view(DTYPES[draw(st.sampled_from([*DTYPES]))])
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        strides = [draw(st.integers(0, 9)) for _ in shape]
        found.append(data.as_strided(shape, strides, draw(st.integers(0, 3000))))
    return found


@settings(max_examples=30)
@given(tensors=views())
def test_views_of_shared_memory_have_the_values_of_the_sender(tensors: list[torch.Tensor]) -> None:
    places: dict[int, int] = {}
    storages: list[torch.UntypedStorage] = []
    shared = SharedTensors(names=[], tensors=[], storages=[])
    for number, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        place = places.setdefault(storage.data_ptr(), len(storages))
        if place == len(storages):
            storages.append(storage)
            shared.storages.append({"GPU-0": storage_of(99, 8), GPU: storage_of(place, storage.nbytes())})
        shared.names.append(str(number))
        shared.tensors.append(described_tensor(tensor, place))
    found, numbers = received(shared, storages)
    assert numbers == list(range(len(storages)))
    assert [*found] == shared.names
    for name, tensor in zip(shared.names, tensors, strict=True):
        assert found[name].dtype == tensor.dtype
        assert found[name].stride() == tensor.stride()
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)


def shared_pair() -> dict[str, Any]:
    tensor = described_tensor(torch.zeros(3, 5), 0)
    return msgspec.to_builtins(SharedTensors(names=["w"], tensors=[tensor], storages=[{GPU: storage_of(0, 60)}]))


STORAGE, TENSOR = ("storages", 0, GPU), ("tensors", 0)
# The place of a field, a wrong value, and the error.
WRONG: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "another GPU": (
        ("storages", 0),
        {"GPU-0": {**shared_pair()["storages"][0][GPU]}},
        "GPU-1, cannot open memory of GPU-0",
    ),
    "handle": ((*STORAGE, "handle"), "a b", "'a b' is not base64"),
    "no handle": ((*STORAGE, "handle"), "", r"the bytes of storages\[0\].handle is 0; allowed: 1 to 65536"),
    "bytes": ((*STORAGE, "num_bytes"), 0, r"storages\[0\].num_bytes is 0; allowed: 1 to"),
    "offset": ((*STORAGE, "offset_bytes"), -1, r"storages\[0\].offset_bytes is -1"),
    "counter": ((*STORAGE, "ref_counter"), in_base64(b"/etc/passwd"), "allowed: a name of PyTorch's"),
    "counter's place": ((*STORAGE, "ref_counter_offset"), 10_000, "ref_counter_offset is 10000; allowed: 0 to 9999"),
    "event": ((*STORAGE, "event"), in_base64(bytes(63)), r"the bytes of storages\[0\].event is 63; allowed: 64 to 64"),
    "type": ((*STORAGE, "event_sync"), "yes", "invalid: Expected `bool`, got `str`"),
    "unknown field": ((*STORAGE, "pickle"), "gASV", "unknown field `pickle`"),
    "dtype": ((*TENSOR, "dtype"), "int64", "dtype of w is 'int64'; allowed: float32, bfloat16, float16"),
    "storage": ((*TENSOR, "storage"), 1, "storage of w is 1; allowed: 0 to 0"),
    "strides": ((*TENSOR, "strides"), [5], r"w has shape \[3, 5\] and strides \[5\]"),
    "negative stride": ((*TENSOR, "strides"), [-5, 1], r"w has shape \[3, 5\] and strides \[-5, 1\]"),
    "end": ((*TENSOR, "offset"), 1, "end of w in its storage is 16; allowed: 0 to 15"),
    "beyond the end": ((*TENSOR, "strides"), [1 << 60, 1], "end of w in its storage is"),
    "names": (("names",), ["w", "v"], "names has 2 items, and tensors 1"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_field_is_refused_before_anything_is_opened(kind: str) -> None:
    place, value, message = WRONG[kind]
    data = target = shared_pair()
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value

    def open_storage(storage: SharedStorage) -> torch.UntypedStorage:
        raise AssertionError("opened")

    with pytest.raises(ControlError, match=message):
        list(opened(data, GPU, open_storage))


class Model:
    """Keeps the origin of the tensors that it is to check."""

    def check(self, tensors: dict[str, torch.Tensor], source: Path) -> None:
        self.source = source


def test_errors_name_no_folder_if_shared_tensors_have_joined_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_weight_updates, "gpu_uuid", lambda device: GPU)
    save_file({"v": torch.zeros(2)}, tmp_path / "model.safetensors")
    model: Any = Model()
    storage = torch.zeros(15).untyped_storage()
    update = StepWeightUpdates(model, torch.device("cpu"), 0, 1, open_storage=lambda shared: storage)
    update.take(str(tmp_path))
    update.check()
    assert model.source == tmp_path
    assert update.take_shared(shared_pair()) == 2
    update.check()
    assert model.source == step_weight_updates.SEVERAL


def test_only_tensors_of_a_gpu_are_shared() -> None:
    with pytest.raises(ValueError, match="w is on 'cpu'; allowed: a GPU"):
        share_tensors({"w": torch.zeros(2)})


def reduction(tensor: torch.Tensor, number: int, **changed: Any) -> tuple[Any, tuple[Any, ...]]:
    """The result of PyTorch's `reduce_tensor` for a tensor on a GPU. number: of its memory."""
    fields = {
        "tensor_cls": torch.Tensor,
        "tensor_size": tensor.size(),
        "tensor_stride": tensor.stride(),
        "tensor_offset": tensor.storage_offset(),
        "storage_cls": torch.TypedStorage,
        "dtype": tensor.dtype,
        "storage_device": 0,
        "storage_handle": bytes([number]),
        "storage_size_bytes": tensor.untyped_storage().nbytes(),
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"/torch_12_345_0",
        "ref_counter_offset": 7,
        "event_handle": bytes(64),
        "event_sync_required": True,
    }
    assert [*fields] == [*inspect.signature(rebuild_cuda_tensor).parameters]
    return rebuild_cuda_tensor, (*(fields | changed).values(),)


def test_what_pytorch_shares_is_described_without_being_called() -> None:
    """As OpenRLHF sends it: by GPU, a function and its arguments."""
    tensor = torch.arange(60, dtype=torch.bfloat16)[4:40].view(6, 6).t()
    handles = {"GPU-0": reduction(tensor, 1), GPU: reduction(tensor, 0)}
    shared = shared_by_reductions("w", handles)
    assert shared.copy
    assert set(shared.storages[0]) == {"GPU-0", GPU}
    found, numbers = received(shared, [tensor.untyped_storage()])
    assert numbers == [0]
    torch.testing.assert_close(found["w"], tensor, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"w is shared with .*; allowed: a tensor on a GPU"):
        shared_by_reductions("w", {GPU: (os._exit, (1,))})
    with pytest.raises(ValueError, match=r"w is shared with .*; allowed: a tensor on a GPU"):
        shared_by_reductions("w", {GPU: (rebuild_cuda_tensor, (1,))})
    with pytest.raises(ValueError, match="allowed: one for each GPU, all alike"):
        shared_by_reductions("w", handles | {"GPU-0": reduction(tensor, 1, tensor_offset=3)})
    with pytest.raises(ValueError, match="allowed: one for each GPU, all alike"):
        shared_by_reductions("w", {})


def test_openrlhfs_tensors_have_the_shape_that_it_announces() -> None:
    handles = {GPU: reduction(torch.zeros(3, 5), 0)}
    calls = update_weight_cuda_ipc(PARALLEL, "w", torch.float32, torch.Size([3, 5]), handles, True)
    assert next(calls).name == "weight_update_state"
    assert calls.send({"received": None}).name == "start_weight_update"
    added = calls.send(None)
    assert (added.name, added.arguments["shared"]["names"]) == ("receive_shared_weights", ["w"])
    assert calls.send(1).name == "finish_weight_update"
    assert calls.throw(ControlError("it does not fit")).name == "cancel_weight_update"
    with pytest.raises(ControlError, match="it does not fit"):
        calls.send(None)
    calls = update_weight_cuda_ipc(PARALLEL, "w", "float32", [5, 3], handles)
    assert next(calls).name == "cancel_weight_update"
    with pytest.raises(ValueError, match=r"w is announced as \('float32', \[5, 3\]\), and shared as"):
        next(calls)


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Harmful:
    """An object that would end the process when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_the_id_of_a_communicator_is_read_without_unpickling() -> None:
    identifier = UniqueId()
    identifier.internal[:] = [number - 64 for number in range(128)]
    for protocol in (3, 4, 5):
        assert unique_id_in(pickle.dumps(identifier, protocol)) == bytes(identifier)
    assert unique_id_in(bytes(identifier)) == bytes(identifier)
    assert unique_id_in(pickle.dumps((bytes(identifier), Harmful()))) == bytes(identifier)
    with pytest.raises(ValueError, match="has 0 ids of 128 bytes under 'broadcast_from/0/0'; allowed: 1"):
        unique_id_in(pickle.dumps([b"1", 2]))
    with pytest.raises(ValueError, match="store"):
        unique_id_in(b"")
