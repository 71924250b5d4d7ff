"""Receives a trainer's broadcasts over NCCL into a GPU's memory.

The protocol is that of vLLM's weight transfer, so its clients, such as TRL's, can send: the trainer, rank 0, has a
`torch.distributed.TCPStore`, and puts the id of an NCCL communicator under the key ID_KEY; all ranks join the
communicator and sum one number, and then every message is a broadcast. The functions of NCCL's library are called
directly, since a torch.distributed process group ends the process if a peer goes away.
"""

from __future__ import annotations

import ctypes
import pickletools
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

ID_KEY = "broadcast_from/0/0"
ID_BYTES = 128
# Values of ncclDataType_t and ncclRedOp_t, and the trainer's rank.
UINT8, FLOAT32, SUM, ROOT = 1, 7, 0, 0
POLL_S = 0.0002


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


def unique_id_in(value: bytes) -> bytes:
    """Return the id of a communicator from the value of ID_KEY, 128 bytes.

    value: the id itself, or as vLLM sends it a pickled object that contains the id. Nothing is unpickled: the pickle's
    constants are read. Raises ValueError if there is no id.
    """
    if len(value) == ID_BYTES:
        return value
    found = []
    with suppress(ValueError):  # raised where `value` stops being a pickle
        for _, constant, _ in pickletools.genops(value):
            if isinstance(constant, bytes) and len(constant) == ID_BYTES:
                found.append(constant)
    if len(found) != 1:
        raise ValueError(f"the trainer's store has {len(found)} ids of {ID_BYTES} bytes under {ID_KEY!r}; allowed: 1")
    return found[0]


class NcclCommunicator:
    """A communicator of a trainer, which is rank 0, and the engine's ranks.

    Deleting this object leaves the communicator. Raises RuntimeError if the communicator cannot be made.
    """

    def __init__(
        self,
        unique_id: bytes,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        """Join the communicator. Returns once all ranks have joined."""
        self._library = _load()
        self._device, self._timeout, self._comm = device, timeout, ctypes.c_void_p()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            identifier = _UniqueId.from_buffer_copy(unique_id)
            self._call("ncclCommInitRank", ctypes.byref(self._comm), ctypes.c_int(world_size), identifier, rank)
            self._leave = weakref.finalize(self, self._library.ncclCommAbort, self._comm)
            self._leave.atexit = False
            try:
                one = torch.zeros(1, device=device)
                self._run(
                    lambda stream: self._call(
                        "ncclAllReduce",
                        *(one.data_ptr(), one.data_ptr(), ctypes.c_size_t(1), FLOAT32, SUM, self._comm, stream),
                    )
                )
            except RuntimeError:
                self.abort()
                raise

    def broadcast(self, data: torch.Tensor) -> None:
        """Receive into `data`, uint8 [n] on the device, what rank 0 sends to all ranks. Complete on return.

        Raises RuntimeError if it takes longer than the timeout, or if NCCL fails; the communicator is then aborted and
        of no use.
        """
        count, pointer = ctypes.c_size_t(data.numel()), data.data_ptr()

        def launch(stream: ctypes.c_void_p) -> None:
            self._call("ncclBroadcast", pointer, pointer, count, UINT8, ROOT, self._comm, stream)

        with torch.cuda.device(self._device):
            try:
                self._run(launch)
            except RuntimeError:
                self.abort()
                raise

    def abort(self) -> None:
        """Leave the communicator, and end what it still does on the device."""
        self._leave()

    def _run(self, launch: Callable[[ctypes.c_void_p], None]) -> None:
        """Launch work on the communicator's stream, after the work of the current stream, and wait until it has ended.

        launch: launches the work on a stream. Raises RuntimeError if the work takes longer than the timeout.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        launch(ctypes.c_void_p(self._stream.cuda_stream))
        done = torch.cuda.Event()
        done.record(self._stream)
        end = time.monotonic() + self._timeout.total_seconds()
        while not done.query():
            if time.monotonic() > end:
                raise RuntimeError(f"no answer over NCCL within {self._timeout.total_seconds():.0f} s")
            time.sleep(POLL_S)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            raise RuntimeError(f"{name} failed: {self._library.ncclGetErrorString(error).decode()}")


def _load() -> Any:
    """Return NCCL's library with the types of its functions' arguments. Raises RuntimeError if there is none."""
    torch.cuda.init()  # has loaded the library, which is then found by its name
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(f"this PyTorch has no NCCL library: {error}") from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclCommInitRank.argtypes = (ctypes.POINTER(pointer), number, _UniqueId, number)
    # Source, target, count, type, sum or root, communicator, stream.
    library.ncclAllReduce.argtypes = (pointer, pointer, size, number, number, pointer, pointer)
    library.ncclBroadcast.argtypes = (pointer, pointer, size, number, number, pointer, pointer)
    library.ncclCommAbort.argtypes = (pointer,)
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = (number,), ctypes.c_char_p
    return library
