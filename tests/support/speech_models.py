"""Tiny Whisper models of random weights, and what transformers' whole model says to a clip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from compiled_engine.features.speech.frontend.transcription import Segment

RATE = 16_000
MELS, SECONDS, LENGTH = 8, 1, 50  # a second has 100 frames, and half as many positions
VOCABULARY = 120
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_source_positions": LENGTH,
    "max_target_positions": 64,
    "num_mel_bins": MELS,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
    "decoder_start_token_id": 2,
}


def random_clip(seed: int, seconds: float = SECONDS) -> np.ndarray:
    """Return a clip of tones that begin at different times, float32."""
    random = np.random.default_rng(seed)
    times = np.arange(round(RATE * seconds)) / RATE
    tones = [
        np.sin(2 * np.pi * random.uniform(100, 6000) * times) * (times > random.uniform(0, seconds)) for _ in range(4)
    ]
    return sum(tones).astype(np.float32) / 8


def save_config(folder: Path, **sizes: Any) -> Path:
    """Save the configuration of a tiny Whisper alone; returns the folder."""
    config = WhisperConfig(**SIZES | sizes, architectures=["WhisperForConditionalGeneration"])
    config.save_pretrained(folder)
    return folder


class SpeechOracle:
    """A tiny Whisper of transformers, saved as a checkpoint with its feature extractor."""

    def __init__(self, folder: Path, seed: int = 0, seconds: int = SECONDS, **sizes: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        torch.manual_seed(seed)
        config = WhisperConfig(**SIZES | {"max_source_positions": LENGTH * seconds} | sizes)
        self.model: Any = WhisperForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():  # so that clips, and positions, matter
                if parameter.dim() > 1:
                    scale = 0.3 if "embed" in name else 2 / parameter[0].numel() ** 0.5
                    parameter.copy_(torch.randn_like(parameter) * scale)
        self.model.save_pretrained(folder)
        extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=seconds)
        extractor.save_pretrained(folder)
        self.extractor = extractor

    def features(self, clip: np.ndarray) -> torch.Tensor:
        """Return the features of a clip, [1, mel bins, frames]."""
        found: torch.Tensor = self.extractor(clip, sampling_rate=RATE, return_tensors="pt")["input_features"]
        return found

    def greedy(
        self, ids: Sequence[int], clip: np.ndarray, count: int, rules: Sequence[LogitsProcessor] = ()
    ) -> tuple[list[int], list[float]]:
        """Return the most probable continuation that rules allow, and its log-probabilities without the rules."""
        encoded, known, found = None, list(ids), []
        for _ in range(count):
            with torch.no_grad():
                given: Any = {"encoder_outputs": encoded} if encoded else {"input_features": self.features(clip)}
                output = self.model(**given, decoder_input_ids=torch.tensor([known]), use_cache=False)
            encoded = (output.encoder_last_hidden_state,)
            last = edited = output.logits[:, -1].log_softmax(-1)
            for rule in rules:
                edited = rule(torch.tensor([known]), edited)
            known.append(int(edited.argmax()))
            found.append(float(last[0, known[-1]]))
        return known[-count:], found


def rules_of(length: int, *, timestamps: bool, **settings: Any) -> list[LogitsProcessor]:
    """Return transformers' rules for tokens after a prompt of this length, for GENERATION and other settings."""
    first = SuppressTokensAtBeginLogitsProcessor(GENERATION["begin_suppress_tokens"], begin_index=length)
    every = SuppressTokensLogitsProcessor(GENERATION["suppress_tokens"])
    config = GenerationConfig(**GENERATION | settings)
    return [first, every, *([WhisperTimeStampLogitsProcessor(config, begin_index=length)] if timestamps else [])]


# Of a model that transcribes: bytes, then these tokens, then timestamps.
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>"),
    *("<|startofprev|>", "<|notimestamps|>"),
)
IDS = {name: 256 + number for number, name in enumerate(SPECIAL)}
FIRST_TIME = 256 + len(SPECIAL)
NUM_TIMES = LENGTH + 1  # of a model whose clips have a second
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": IDS["<|startoftranscript|>"],
    **dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), IDS["<|endoftext|>"]),
    "no_timestamps_token_id": IDS["<|notimestamps|>"],
    "prev_sot_token_id": IDS["<|startofprev|>"],
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": IDS["<|en|>"], "<|de|>": IDS["<|de|>"]},
    "task_to_id": {"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]},
    "suppress_tokens": [1, 2, *(IDS[name] for name in SPECIAL[1:])],
    "begin_suppress_tokens": [220, IDS["<|endoftext|>"]],
    "max_initial_timestamp_index": 20,
    "max_length": 28,
}


def transcribing_oracle(folder: Path, seconds: int = SECONDS, **changes: Any) -> SpeechOracle:
    """Write a tiny Whisper with clips of so many seconds, a byte tokenizer and a generation_config.json.

    changes: of its configuration.
    """
    times = [f"<|{number / 50:.2f}|>" for number in range(LENGTH * seconds + 1)]  # in steps of 20 ms
    sizes = {"vocab_size": FIRST_TIME + len(times), "max_target_positions": 28} | changes
    oracle = SpeechOracle(folder, seed=3, seconds=seconds, **sizes)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    oracle.model.generation_config = GenerationConfig.from_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(times)
    assert all(tokenizer.token_to_id(name) == number for name, number in IDS.items())
    assert tokenizer.token_to_id(times[0]) == FIRST_TIME
    tokenizer.save(str(folder / "tokenizer.json"))
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(made))
    return oracle


def text_of_generate(oracle: SpeechOracle, clip: np.ndarray, **given: Any) -> list[int]:
    """Return the tokens that transformers generates for a clip, without special tokens and without timestamps."""
    whole = {"return_dict_in_generate": True, "force_unique_generate_call": True}  # even if it generates timestamps
    with torch.no_grad():
        found = oracle.model.generate(oracle.features(clip), return_timestamps=False, **whole, **given)
    return [token for token in found["sequences"][0].tolist() if token not in IDS.values()]


def segments_of_generate(oracle: SpeechOracle, clip: np.ndarray, **given: Any) -> list[tuple[float, float, list[int]]]:
    """Return (start, end, tokens) of the segments that transformers finds. No time is after the clip's end."""
    features = oracle.extractor(clip, sampling_rate=RATE, return_tensors="pt", truncation=False)["input_features"]
    with torch.no_grad():
        found = oracle.model.generate(features, return_timestamps=True, return_segments=True, **given)["segments"][0]
    seconds = len(clip) / RATE
    return [
        (min(float(each["start"]), seconds), min(float(each["end"]), seconds), each["tokens"].tolist())
        for each in found
    ]


def check_segments(
    found: Sequence[Segment], expected: Sequence[tuple[float, float, list[int]]], seconds: float
) -> None:
    """Compare segments with those of transformers, which continues in the silence after the clip."""
    count = len(found)
    assert [list(each.token_ids) for each in found] == [tokens for _, _, tokens in expected[:count]]
    times = [time for each in found for time in (each.start, each.end)]
    assert times == pytest.approx([time for start, end, _ in expected[:count] for time in (start, end)])
    assert all(start == seconds for start, _, _ in expected[count:])
