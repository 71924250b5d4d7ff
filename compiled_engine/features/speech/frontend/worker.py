"""Worker processes that decode audio and run the checkpoint's feature extractor.

They import transformers, which the engine's own processes need not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compiled_engine.features.images.extras import PlainTensor
from compiled_engine.features.images.frontend.worker import bound_memory
from compiled_engine.features.speech.frontend.audio import decoded_audio, resampled
from compiled_engine.process.worker_program import Answer, Messages, Work, run_workers

if TYPE_CHECKING:
    import torch

# A worker that takes longer for a clip ends, and so does its clip.
LONGEST_S = 60
# Bytes that a worker may use after loading the extractor.
MOST_BYTES = 4 << 30
# Names of a file's samples and of their rate in an answer.
SAMPLES, RATE = "samples", "rate"


def main() -> None:
    """Run the workers, see run_workers. Messages and answers are those of features/images/frontend/worker.py.

    The order is {"folder": the checkpoint's, "dtype": torch's name}. A message's kind is "file" or "samples"; these are
    float32, and "mode" is their rate. With the setting "most_seconds", the answer has the samples of a file that is no
    longer, and their rate; otherwise features. It replaces no placeholder.
    """
    run_workers(_prepare, uses_cuda=False)


def _prepare(order: dict[str, Any]) -> Work:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # extractors take no GPU memory
    try:
        from transformers import AutoFeatureExtractor

        extractor = AutoFeatureExtractor.from_pretrained(
            order["folder"], local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        reason = f"the feature extractor of {order['folder']} cannot be loaded: {' '.join(str(error).split())}"
        return lambda messages, answer: _refuse_all(messages, answer, reason)
    return lambda messages, answer: _extract_all(messages, answer, extractor, order["dtype"])


def _refuse_all(messages: Messages, answer: Answer, reason: str) -> None:
    for _ in messages:
        answer({"error": reason, "unusable": True})


def _extract_all(messages: Messages, answer: Answer, extractor: Any, dtype: str) -> None:
    import torch

    torch.set_num_threads(1)
    bound_memory(MOST_BYTES)
    for message in messages:
        if not message:
            answer({"usable": True})
            continue
        signal.alarm(LONGEST_S)
        try:
            if "most_seconds" in message["settings"]:
                made = _samples(message)
            else:
                made = {"input_features": _features(message, extractor).to(getattr(torch, dtype))}
            _answer_with(made, message, answer)
        except OSError as error:
            answer({"error": f"the features of a clip cannot be written: {error.strerror}", "internal": True})
        except Exception as error:  # decoders and extractors raise many kinds
            answer({"error": " ".join(str(error).split())[:500] or type(error).__name__})
        signal.alarm(0)


def _answer_with(made: Mapping[str, torch.Tensor], message: Mapping[str, Any], answer: Answer) -> None:
    plain = {name: PlainTensor.of(tensor) for name, tensor in made.items()}
    with open(message["output"], "wb") as output:
        output.writelines(tensor.data for tensor in plain.values())
    tensors = [[name, each.dtype, list(each.shape), len(each.data)] for name, each in plain.items()]
    answer({"token_ids": [], "placeholder": -1, "tensors": tensors})


def _samples(message: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the samples of a file, and their rate."""
    import torch

    samples_N, rate = decoded_audio(Path(message["input"]).read_bytes(), message["settings"]["most_seconds"])
    return {SAMPLES: torch.from_numpy(samples_N), RATE: torch.tensor([rate])}


def _features(message: dict[str, Any], extractor: Any) -> Any:
    """Return the features of a clip, [mel bins, frames]. Raises ValueError for one that is longer than the model's."""
    data, wanted = Path(message["input"]).read_bytes(), int(extractor.sampling_rate)
    longest = extractor.n_samples / wanted
    if message["kind"] == "file":
        samples_N, rate = decoded_audio(data, longest)
    else:
        samples_N, rate = np.frombuffer(data, dtype=np.float32), int(message["mode"])
        if len(samples_N) > longest * rate:
            raise ValueError(f"the audio has {len(samples_N) / rate:.1f} s; allowed: at most {longest:g}")
    found = extractor(resampled(samples_N, rate, wanted), sampling_rate=wanted, return_tensors="pt")
    return found["input_features"][0]


if __name__ == "__main__":
    main()
