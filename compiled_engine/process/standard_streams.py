"""A daemon may have closed its standard streams: their numbers are then given to whatever is opened next."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Give those that are closed to the null device, so that no descriptor that a process inherits has their number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def replace_missing_streams() -> None:
    """The same, and where Python has None since a stream was closed before it started, one of the null device."""
    open_standard_streams()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - until the process ends
