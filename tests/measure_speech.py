"""Measures speech models on a GPU: the seconds of one clip and of many, beside transformers with the same weights.

    python tests/measure_speech.py -o speech.json
    python tests/measure_speech.py --tiny --clips 2 --repeats 1
    python tests/measure_speech.py --audio-features workers --encoder-tokens 24000

The model has the shape of Whisper large-v3-turbo, with random weights; with --tiny it is one that a CPU computes. Every
repeat has new clips of noise of 30 seconds, and each is followed by the same number of tokens, greedily. Features are
computed within the time: where `audio_features` says, and by transformers' extractor on the device. transformers runs
with its default cache, and with a static cache and torch.compile; the faster of the two is the one to compare with.

JSON: rows (what, seconds, values, rate: seconds of audio a second; of the engine also counts: what some of its metrics
have gained in a call), ratios (transformers' fastest over the engine), device, model, tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from compiled_engine import LLM, SamplingParams

RATE, SECONDS = 16_000, 30
PROMPT = [50258, 50259, 50360, 50364]  # <|startoftranscript|><|en|><|transcribe|><|notimestamps|>
LARGE_V3_TURBO = {
    "vocab_size": 51866,
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 4,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "num_mel_bins": 128,
}
TINY = LARGE_V3_TURBO | {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
Clips = Sequence[np.ndarray]
COUNTED = ("steps", "clips_encoded", "encoder_runs", "mm_cache_queries", "graph_replays", "graph_fallbacks")


def save_model(folder: Path, sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
    with torch.device(device):
        model = WhisperForConditionalGeneration(WhisperConfig(**sizes)).to(dtype)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=sizes["num_mel_bins"]).save_pretrained(folder)


def new_clips(random: np.random.Generator, count: int) -> Clips:
    return [random.standard_normal(RATE * SECONDS, dtype=np.float32) / 8 for _ in range(count)]


def timed(work: Callable[[Clips], int], clips: Clips, tokens: int) -> float:
    """Return the seconds of a call. Raises RuntimeError if the number of tokens is another one."""
    start = time.perf_counter()
    found = work(clips)
    passed = time.perf_counter() - start
    if found != len(clips) * tokens:
        raise RuntimeError(f"{len(clips) * tokens} tokens were asked for, {found} came")
    return passed


def engine_run(llm: LLM, tokens: int) -> Callable[[Clips], int]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def run(clips: Clips) -> int:
        prompts = [{"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": (clip, RATE)}} for clip in clips]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    return run


def transformers_run(model: Any, extractor: Any, tokens: int, *, compiled: bool) -> Callable[[Clips], int]:
    settings = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0, decoder_start_token_id=PROMPT[0]
    )
    if compiled:
        settings.cache_implementation = "static"
        settings.compile_config = CompileConfig(
            mode="reduce-overhead" if model.device.type == "cuda" else "default", fullgraph=True
        )

    def run(clips: Clips) -> int:
        given = extractor(list(clips), sampling_rate=RATE, return_tensors="pt", device=model.device.type)
        features = given["input_features"].to(model.device, model.dtype)
        prompt = torch.tensor([PROMPT] * len(clips), device=model.device)
        with torch.inference_mode():
            # Whisper's own generate adds searches for languages and timestamps to this one.
            found = GenerationMixin.generate(
                model, input_features=features, decoder_input_ids=prompt, generation_config=settings
            )
        return int(found[:, len(PROMPT) :].cpu().numel())  # the copy waits for the device

    return run


def repeated(
    work: Callable[[Clips], int], count: int, tokens: int, repeats: int, random: np.random.Generator
) -> list[float]:
    """Return the seconds of each repeat, after one that is not counted."""
    return [timed(work, new_clips(random, count), tokens) for _ in range(repeats + 1)][1:]


def row(what: str, clips: int, values: list[float]) -> dict[str, Any]:
    seconds = median(values)
    return {"what": what, "seconds": seconds, "rate": clips * SECONDS / seconds, "values": values}


def engine_row(llm: LLM, count: int, tokens: int, repeats: int, random: np.random.Generator) -> dict[str, Any]:
    run = engine_run(llm, tokens)
    before = llm.metrics()
    values = repeated(run, count, tokens, repeats, random)
    gained = {name: (llm.metrics().get(name, 0) - before.get(name, 0)) / (repeats + 1) for name in COUNTED}
    return row(f"engine, {count} at once", count, values) | {"counts": gained}


def measure(
    folder: Path, counts: Sequence[int], tokens: int, repeats: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    random = np.random.default_rng(0)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    rows: list[dict[str, Any]] = []
    engine: dict[int, float] = {}
    with LLM(
        folder,
        dtype=dtype,
        max_num_seqs=max(counts),
        gpu_memory_utilization=0.5,
        skip_tokenizer_init=True,
        progress=False,
        **options,
    ) as llm:
        run = engine_run(llm, tokens)
        for count in counts:
            rows.append(engine_row(llm, count, tokens, repeats, random))
            engine[count] = rows[-1]["seconds"]
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        again = new_clips(random, 1)
        run(again)
        rows.append(row("engine, the same clip again", 1, [timed(run, again, tokens) for _ in range(repeats)]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model = model.to(device).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    fastest: dict[int, float] = {}
    for way, compiled in (("default cache", False), ("static cache, torch.compile", True)):
        run = transformers_run(model, extractor, tokens, compiled=compiled)
        for count in counts:
            try:
                values = repeated(run, count, tokens, repeats, random)
            except Exception as error:  # a way that does not run is told, and the other one is compared with
                print(f"transformers, {way}, {count} at once: {error!r}", file=sys.stderr, flush=True)
                continue
            rows.append(row(f"transformers, {way}, {count} at once", count, values))
            fastest[count] = min(fastest.get(count, math.inf), rows[-1]["seconds"])
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {
        "rows": rows,
        "ratios": {str(count): fastest[count] / engine[count] for count in counts if count in fastest},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU computes")
    parser.add_argument("--clips", type=int, action="append", help="clips at once; default: 1 and 64")
    parser.add_argument("--tokens", type=int, default=100, help="of each clip")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--audio-features", choices=("auto", "device", "workers"), default="auto")
    parser.add_argument("--encoder-tokens", type=int, help="max_num_encoder_input_tokens; 1,500 are a clip")
    parser.add_argument("--output", "-o", type=Path, help="file for the JSON, which is printed too")
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        save_model(
            Path(folder),
            TINY if given.tiny else LARGE_V3_TURBO,
            torch.bfloat16 if on_gpu else torch.float32,
            torch.device("cuda" if on_gpu else "cpu"),
        )
        options = {"audio_features": given.audio_features, "max_num_encoder_input_tokens": given.encoder_tokens}
        found = measure(Path(folder), given.clips or [1, 64], given.tokens, given.repeats, options)
    found["model"] = "tiny" if given.tiny else "whisper-large-v3-turbo"
    text = json.dumps(found, indent=1) + "\n"
    if given.output is not None:
        given.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
