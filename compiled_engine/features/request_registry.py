"""Makes the features' parts for the frontend, for `LLM` and for `AsyncLLM`."""

from __future__ import annotations

from typing import NamedTuple

from compiled_engine.config import EngineConfig
from compiled_engine.features.adapters.frontend.requests import AdapterRequests
from compiled_engine.features.images.frontend.requests import ImageRequests
from compiled_engine.features.speech.frontend.requests import SpeechRequests
from compiled_engine.features.structured.frontend.requests import StructuredRequests
from compiled_engine.frontend.tokenizer import Tokenizer


class RequestFeatures(NamedTuple):
    """The features' parts for the frontend, in the order in which they are called."""

    structured: StructuredRequests
    adapters: AdapterRequests
    speech: SpeechRequests
    images: ImageRequests


def request_features(
    config: EngineConfig, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int], objects_allowed: str = ""
) -> RequestFeatures:
    """Return all features' parts for the frontend. See StructuredRequests for `objects_allowed`."""
    return RequestFeatures(
        StructuredRequests(tokenizer, config.model.vocab_size, eos_token_ids, objects_allowed),
        AdapterRequests(config.adapters),
        SpeechRequests.of(config, tokenizer),
        ImageRequests.of(config, tokenizer),
    )
