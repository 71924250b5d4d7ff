"""Worker processes that decode audio and run the checkpoint's feature extractor.

They import transformers, which the engine's own processes do not need.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compiled_engine.features.images.extras import PlainTensor
from compiled_engine.features.images.frontend.cache import NO_PLACEHOLDER
from compiled_engine.features.images.frontend.worker import bound_memory
from compiled_engine.features.speech.extras import FEATURES, SAMPLES
from compiled_engine.features.speech.frontend.audio import check_length, decoded_audio, resampled
from compiled_engine.process.worker_program import Answer, Messages, Work, run_workers

if TYPE_CHECKING:
    import torch

# A worker that takes longer for a clip ends, and so does its clip.
LONGEST_S = 60
# Bytes that a worker may use after loading the extractor.
MOST_BYTES = 6 << 30  # the features of two hours take half of it
# Names in an answer besides features and samples: the rate of samples; the audio's length.
RATE, SECONDS = "rate", "seconds"
CLIP = "clip"  # an answer with the samples of a clip, at the extractor's rate


def main() -> None:
    """Run the workers, see run_workers. Messages and answers are those of features/images/frontend/worker.py.

    The order is {"folder": the checkpoint's, "dtype": torch's name, "threads": number of threads of each worker}. A
    message's "kind" is "file", or "samples" for float32 samples, whose rate is "mode". By default, the answer has the
    features of a clip. The setting "answer" asks for something else: "clip" for the samples of a clip at the
    extractor's rate, "samples" for all samples and their rate, "input_features" for the features of the whole audio and
    its length. With the setting "most_seconds", the audio may last that many seconds, otherwise as long as a clip. An
    answer replaces no placeholder.
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
    return lambda messages, answer: _extract_all(messages, answer, extractor, order)


def _refuse_all(messages: Messages, answer: Answer, reason: str) -> None:
    for _ in messages:
        answer({"error": reason, "unusable": True})


def _extract_all(messages: Messages, answer: Answer, extractor: Any, order: dict[str, Any]) -> None:
    import torch

    dtype = getattr(torch, order["dtype"])
    torch.set_num_threads(order["threads"])
    bound_memory(MOST_BYTES)
    for message in messages:
        if not message:
            answer({"usable": True})
            continue
        signal.alarm(LONGEST_S)
        try:
            _answer_with(_made(message, extractor, dtype), message, answer)
        except OSError as error:
            answer({"error": f"the answer for a clip cannot be written: {error.strerror}", "internal": True})
        except Exception as error:  # decoders and extractors raise many kinds
            answer({"error": " ".join(str(error).split())[:500] or type(error).__name__})
        signal.alarm(0)


def _answer_with(made: Mapping[str, torch.Tensor], message: Mapping[str, Any], answer: Answer) -> None:
    plain = {name: PlainTensor.of(tensor) for name, tensor in made.items()}
    with open(message["output"], "wb") as output:
        output.writelines(tensor.data for tensor in plain.values())
    tensors = [[name, each.dtype, list(each.shape), len(each.data)] for name, each in plain.items()]
    answer({"token_ids": [], "placeholder": NO_PLACEHOLDER, "tensors": tensors})


def _made(message: dict[str, Any], extractor: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that a message asks for, by name, see `main`. Raises ValueError for audio that is too long."""
    import torch

    data, wanted, settings = Path(message["input"]).read_bytes(), int(extractor.sampling_rate), message["settings"]
    longest, asked = settings.get("most_seconds", extractor.n_samples / wanted), settings.get("answer")
    if message["kind"] == "file":
        samples_N, rate = decoded_audio(data, longest)
    else:
        samples_N, rate = np.frombuffer(data, dtype=np.float32), int(message["mode"])
        check_length(samples_N, rate, longest)
    if asked == SAMPLES:
        return {SAMPLES: torch.from_numpy(samples_N), RATE: torch.tensor([rate])}
    at_rate_N = resampled(samples_N, rate, wanted)
    if asked == CLIP:
        return {SAMPLES: torch.from_numpy(at_rate_N)}
    # Silence is added to audio that is shorter than a clip. Longer audio is not cut.
    found = extractor(at_rate_N, sampling_rate=wanted, return_tensors="pt", truncation=False)
    made = {FEATURES: found[FEATURES][0].to(dtype)}
    if asked == FEATURES:
        made[SECONDS] = torch.tensor([len(samples_N) / rate], dtype=torch.float64)
    return made


if __name__ == "__main__":
    main()
