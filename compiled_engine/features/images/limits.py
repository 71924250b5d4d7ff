"""Limits of requests with images. The frontend checks them, and planning does again, since any client may reach it."""

from __future__ import annotations

from compiled_engine.config import ImagesConfig
from compiled_engine.features.prompt_logprobs.extras import MOST_PROMPT_LOGPROBS
from compiled_engine.sampling.params import SamplingParams


def check_num_embeddings(name: str, num_embeddings: int, config: ImagesConfig) -> None:
    """Raise ValueError unless steps can compute an image with this many embeddings. name: the image's name."""
    most = min(config.cache_size, config.most_embeddings)
    if not 0 < num_embeddings <= most:
        raise ValueError(f"{name} has {num_embeddings} embeddings; allowed: 1 to {most}")


def check_params(name: str, params: SamplingParams, config: ImagesConfig) -> None:
    """Raise ValueError for log-probabilities of prompt tokens that would cut an image into several steps.

    Only models whose image tokens attend both ways are limited. name: what messages call the prompt.
    """
    if config.vision.both_ways and params.prompt_logprobs == -1:
        raise ValueError(
            f"{name}: prompt_logprobs is -1, for which a step computes few tokens, and all those of an image belong to"
            " one step; allowed: a number"
        )
    most = MOST_PROMPT_LOGPROBS // max(1, config.vision.tile_embeddings or config.most_embeddings) - 1
    if config.vision.both_ways and (wanted := params.prompt_logprobs or 0) > most:
        raise ValueError(
            f"{name}: prompt_logprobs is {wanted}, for which a step computes fewer tokens than an image has, and all of"
            f" them belong to one step; allowed: at most {most}"
        )
