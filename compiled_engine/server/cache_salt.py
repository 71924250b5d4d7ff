"""The salt of a request: prefixes are shared among requests of one salt, and on request of one API key."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request

from compiled_engine.frontend.prompts import PromptLike
from compiled_engine.server.sampling_fields import SamplingFields
from compiled_engine.server.serving import serving_of

KEY = "api_key_digest"
"""The field of a request's state that has the digest of its API key."""


def cache_salt(request: Request, fields: SamplingFields) -> str | None:
    """The salt of a request's prompts; None where they share with all that have none.

    With a salt per key, requests of two keys never have the same one, whatever `cache_salt` they give. What it is made
    of cannot be read off it.
    """
    if not serving_of(request).options.prefix_cache_salt_per_key:
        return fields.cache_salt
    key: bytes = request.scope["state"][KEY]
    return hashlib.sha256(key + (fields.cache_salt or "").encode()).hexdigest()


def salted(prompt: PromptLike, salt: str | None) -> PromptLike:
    """The prompt with its salt, in the form that the engine takes."""
    if salt is None:
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": salt}
    given: dict[str, Any] = dict(prompt) if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
    return given | {"cache_salt": salt}
