"""Tiny Whisper models of random weights, and what transformers' whole model says to a clip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

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
    """A clip of tones that begin at different times, float32."""
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

    def __init__(self, folder: Path, seed: int = 0, **sizes: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        torch.manual_seed(seed)
        config = WhisperConfig(**SIZES | sizes)
        self.model = WhisperForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():  # so that clips, and positions, matter
                if parameter.dim() > 1:
                    scale = 0.3 if "embed" in name else 2 / parameter[0].numel() ** 0.5
                    parameter.copy_(torch.randn_like(parameter) * scale)
        self.model.save_pretrained(folder)
        extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)
        extractor.save_pretrained(folder)
        self.extractor = extractor

    def features(self, clip: np.ndarray) -> torch.Tensor:
        """The features of a clip, [1, mel bins, frames]."""
        found: torch.Tensor = self.extractor(clip, sampling_rate=RATE, return_tensors="pt")["input_features"]
        return found

    def greedy(self, ids: Sequence[int], clip: np.ndarray, count: int) -> tuple[list[int], list[float]]:
        """The most probable continuation of a prompt, and its log-probabilities."""
        encoded, known, found = None, list(ids), []
        for _ in range(count):
            with torch.no_grad():
                given: Any = {"encoder_outputs": encoded} if encoded else {"input_features": self.features(clip)}
                output = self.model(**given, decoder_input_ids=torch.tensor([known]), use_cache=False)
            encoded = (output.encoder_last_hidden_state,)
            last = output.logits[0, -1].log_softmax(-1)
            known.append(int(last.argmax()))
            found.append(float(last.max()))
        return known[-count:], found


# Of a model that transcribes: bytes, then these tokens.
SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>"),
    *("<|startofprev|>", "<|notimestamps|>"),
)
IDS = {name: 256 + number for number, name in enumerate(SPECIAL)}
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
    "max_length": 28,
}


def transcribing_oracle(folder: Path) -> SpeechOracle:
    """A tiny Whisper with a tokenizer of bytes, and a generation_config.json."""
    oracle = SpeechOracle(folder, vocab_size=256 + len(SPECIAL), max_target_positions=28, seed=3)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    oracle.model.generation_config = GenerationConfig.from_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    assert tokenizer.token_to_id(SPECIAL[-1]) == IDS[SPECIAL[-1]]
    tokenizer.save(str(folder / "tokenizer.json"))
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(made))
    return oracle
