"""A model in this process, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from compiled_engine.cli.errors import BadInputError, bad_input_is_reported


class LocalModel:
    """num_tokens: of the newest answer. Raises BadInputError for options and input that cannot be used."""

    def __init__(self, engine: Mapping[str, Any], sampling: Mapping[str, Any], *, quiet: bool) -> None:
        with bad_input_is_reported():
            from compiled_engine import LLM
            from compiled_engine.frontend.tokenizer import find_tokenizer_folder, load_tokenizer
            from compiled_engine.process.garbage_collection import leave_alone_what_is_there

            self._llm = LLM(**engine, progress=not quiet)
            try:
                default = self._llm.get_default_sampling_params()
                config = self._llm.config
                folder = find_tokenizer_folder(config.tokenizer, config.model.path)
                self._tokenizer = None if folder is None else load_tokenizer(folder)
                self._params = replace(default, **{"max_tokens": None, **sampling})
                leave_alone_what_is_there()
            except BaseException:
                self._llm.close()
                raise
        self.num_tokens = 0

    def complete(self, prompt: str) -> Iterator[str]:
        """The text that follows the prompt, as it comes."""
        return self._stream(prompt)

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """The answer to a conversation, as it comes."""
        from compiled_engine.frontend.chat import render_chat

        if self._tokenizer is None:
            raise BadInputError("this model has no tokenizer: it cannot chat")
        with bad_input_is_reported():
            prompt = render_chat(self._tokenizer, messages)
        return self._stream({"prompt": prompt.text, "prompt_token_ids": prompt.token_ids})

    def close(self) -> None:
        """Free the device."""
        self._llm.close()

    def _stream(self, prompt: Any) -> Iterator[str]:
        length = 0
        with bad_input_is_reported(), closing(self._llm.stream(prompt, self._params)) as stream:  # type: ignore[type-var]
            for output in stream:
                completion = output.outputs[0]
                self.num_tokens = len(completion.token_ids)
                yield completion.text[length:]
                length = len(completion.text)
