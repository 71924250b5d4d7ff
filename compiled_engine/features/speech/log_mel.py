"""Computes the log-mel features of clips from their samples, on any device, as transformers' extractor of Whisper does.

A clip's spectrum has a frame for each `hop` samples. The power of its frequencies is summed under triangles that are
spaced on the mel scale (Slaney, "Auditory Toolbox", 1998). Logarithms are cut at 8 below the clip's largest one, then
scaled; see `WhisperFeatureExtractor._torch_extract_fbank_features` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from compiled_engine.features.speech.extras import FEATURES, SAMPLES, ClipInputs
from compiled_engine.speech import MelSettings

HIGHEST = 8000.0  # Hz, of the last triangle, at any rate
# The mel scale is linear up to 1,000 Hz, with 15 mels there, and logarithmic above: 27 mels for a factor of 6.4.
LINEAR_HERTZ, LINEAR_MELS, MELS_OF_FACTOR = 1000.0, 15.0, 27.0 / math.log(6.4)
LEAST_POWER, CUT = 1e-10, 8.0


def mel_filters(mel: MelSettings, num_bins: int) -> torch.Tensor:
    """Return the weights of frequencies in each mel bin, [num_bins, window // 2 + 1] in float64."""
    highest = LINEAR_MELS + MELS_OF_FACTOR * math.log(HIGHEST / LINEAR_HERTZ)
    edges_B = _hertz(torch.linspace(0, highest, num_bins + 2, dtype=torch.float64))
    frequency_F = torch.linspace(0, mel.rate // 2, mel.window // 2 + 1, dtype=torch.float64)
    widths_B = edges_B.diff()
    offset_BF = frequency_F - edges_B.unsqueeze(1)
    rising_BF, falling_BF = offset_BF[:-2] / widths_B[:-1, None], -offset_BF[2:] / widths_B[1:, None]
    area_B = (edges_B[2:] - edges_B[:-2]) / 2
    return torch.minimum(rising_BF, falling_BF).clamp(min=0) / area_B.unsqueeze(1)


def _hertz(mels: torch.Tensor) -> torch.Tensor:
    above = LINEAR_HERTZ * ((mels - LINEAR_MELS) / MELS_OF_FACTOR).exp()
    return torch.where(mels < LINEAR_MELS, mels * (LINEAR_HERTZ / LINEAR_MELS), above)


class LogMel:
    """Computes the features of clips for one model on one device. mel, num_bins: see MelSettings, SpeechDescription."""

    def __init__(self, mel: MelSettings, num_bins: int, device: torch.device) -> None:
        self._mel = mel
        self._window_W = torch.hann_window(mel.window, device=device)
        # The extractor has them in float32.
        self._filters_BF = mel_filters(mel, num_bins).float().double().to(device)

    def __call__(self, samples_CN: torch.Tensor) -> torch.Tensor:
        """Return the features of C clips, float32 [C, num_bins, num_samples // hop].

        samples_CN: float32 on the device, with N at most num_samples; shorter clips are extended by silence. Mel bins
        are summed in float64, which TF32 settings do not affect.
        """
        mel = self._mel
        padded_CN = torch.nn.functional.pad(samples_CN, (0, mel.num_samples - samples_CN.shape[1]))
        spectrum_CFT = torch.stft(padded_CN, mel.window, mel.hop, window=self._window_W, return_complex=True)
        power_CFT = spectrum_CFT[..., :-1].abs() ** 2
        sums_CBT = (self._filters_BF @ power_CFT.double()).float()
        logs_CBT = sums_CBT.clamp(min=LEAST_POWER).log10()
        logs_CBT = torch.maximum(logs_CBT, logs_CBT.amax((1, 2), keepdim=True) - CUT)
        return (logs_CBT + 4.0) / 4.0


class ClipFeatures:
    """Makes the encoder's input features of clips, on the device.

    log_mel: None if all clips come with features. dtype: the encoder's.
    """

    def __init__(self, log_mel: LogMel | None, dtype: torch.dtype, device: torch.device) -> None:
        self._log_mel, self._dtype, self._device = log_mel, dtype, device

    def of(self, clips: Sequence[ClipInputs]) -> torch.Tensor:
        """Return the features of C clips in their order, [C, num_mel_bins, num_frames]."""
        sampled = [clip for clip in clips if SAMPLES in clip]
        others = [clip for clip in clips if FEATURES in clip]
        if not others:
            return self._computed(sampled)
        if not sampled:
            return self._given(others)
        computed, given = iter(self._computed(sampled)), iter(self._given(others))
        return torch.stack([next(computed if SAMPLES in clip else given) for clip in clips])

    def _computed(self, clips: Sequence[ClipInputs]) -> torch.Tensor:
        assert self._log_mel is not None
        samples = [np.frombuffer(clip[SAMPLES].data, np.float32) for clip in clips]
        host_CN = self._on_host((len(clips), max(map(len, samples))), torch.float32)
        for row_N, own_N in zip(host_CN.numpy(), samples, strict=True):  # in numpy, as PyTorch would wake its threads
            row_N[: len(own_N)], row_N[len(own_N) :] = own_N, 0.0
        return self._log_mel(host_CN.to(self._device, non_blocking=True)).to(self._dtype)

    def _given(self, clips: Sequence[ClipInputs]) -> torch.Tensor:
        host_CBT = self._on_host((len(clips), *clips[0][FEATURES].shape), self._dtype)
        for own_BT, clip in zip(host_CBT, clips, strict=True):
            own_BT.copy_(clip[FEATURES].tensor())
        return host_CBT.to(self._device, non_blocking=True)

    def _on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")
