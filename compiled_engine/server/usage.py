"""Tokens of a request, counted from its outputs."""

from __future__ import annotations

import msgspec

from compiled_engine.frontend.outputs import RequestOutput


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: those that came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of all prompts and completions of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class UsageCounter:
    """Adds up outputs of the kinds "delta" and "final"; each prompt counts once, however many completions it has."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion_tokens = 0

    def begin(self, prompt: int, tokens: int) -> None:
        """A prompt of so many tokens, of which nothing has come yet."""
        self._prompts[prompt] = (tokens, 0)

    def add(self, prompt: int, output: RequestOutput) -> None:
        self._prompts[prompt] = (len(output.prompt_token_ids), output.num_cached_tokens or 0)
        self._completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def usage(self, unwanted: int = 0) -> Usage:
        """So far; `unwanted` tokens were generated that nobody asked for."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        generated = self._completion_tokens - unwanted
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(sum(cached for _, cached in self._prompts.values())),
        )
