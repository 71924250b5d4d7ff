"""Choose the prefix cache salt of a request. Requests share cached prefixes only if their salts are equal."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request

from compiled_engine.frontend.prompts import PromptLike
from compiled_engine.server.sampling_fields import SamplingFields
from compiled_engine.server.serving import serving_of

KEY = "api_key_digest"
"""The field of a request's state that holds the digest of its API key."""


def cache_salt(request: Request, fields: SamplingFields) -> str | None:
    """Return the salt of a request's prompts. Prompts with the salt None share prefixes with each other.

    Without the option prefix_cache_salt_per_key, the salt is the request's `cache_salt`. With the option, it is a
    digest of that and of the API key, so that requests with different API keys never share a salt.
    """
    if not serving_of(request).options.prefix_cache_salt_per_key:
        return fields.cache_salt
    key: bytes = request.scope["state"][KEY]
    return hashlib.sha256(key + (fields.cache_salt or "").encode()).hexdigest()


def salted(prompt: PromptLike, salt: str | None) -> PromptLike:
    """Return the prompt with its salt, in a form that the engine accepts."""
    if salt is None:
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": salt}
    given: dict[str, Any] = dict(prompt) if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
    return given | {"cache_salt": salt}
