"""The seconds of a tower's runs: of those that the device has completed."""

from __future__ import annotations

import pytest
import torch

from compiled_engine.features.images.tower_clock import TowerClock


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_seconds_grow_with_each_run(device: str) -> None:
    clock = TowerClock(torch.device(device))
    assert clock.seconds() == 0
    seconds = [0.0]
    for _ in range(3):
        with clock.run():
            torch.rand(256, 256, device=device).exp()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock.seconds())
        assert clock.seconds() == seconds[-1]
    assert seconds == sorted(set(seconds))
