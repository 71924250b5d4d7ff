"""A core that another process has started."""

from __future__ import annotations

import os
import socket


class ForeignCore:
    """See RunningCore. Raises OSError if nobody listens at `address`, or this user may not connect."""

    def __init__(self, address: str | os.PathLike[str]) -> None:
        self.address = os.fspath(address)
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(self.address)
        except BaseException:
            self.socket.close()
            raise

    def how_it_ended(self, timeout_s: float) -> str:
        return "it has ended, or the process that started it has"

    def close(self, timeout_s: float) -> None:
        self.socket.close()
