"""Defines `FrontendParts`, the objects with which `LLM` and `AsyncLLM` check arguments and make requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from compiled_engine.config import EngineConfig
from compiled_engine.engine.messages import RequestLimits
from compiled_engine.features.pooling.frontend.processor import PoolingProcessor, make_pooling_processor
from compiled_engine.features.request_registry import RequestFeatures, request_features
from compiled_engine.frontend.attachments import Arrivals
from compiled_engine.frontend.input_processor import InputProcessor
from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.prompts import Prompt
from compiled_engine.frontend.request_hooks import Attachment, attach_all
from compiled_engine.frontend.tokenizer import Tokenizer, read_eos_token_ids
from compiled_engine.sampling.params import SamplingParams


@dataclass(frozen=True)
class FrontendParts:
    """The parts of an engine that work on arguments and requests. They are the same wherever the core runs."""

    config: EngineConfig
    limits: RequestLimits
    tokenizer: Tokenizer | None  # None with skip_tokenizer_init or if the checkpoint has none
    inputs: InputProcessor
    features: RequestFeatures
    pooling: PoolingProcessor | None  # None for a generative model
    default_sampling_params: SamplingParams

    def completions(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
        *,
        attached: Sequence[Attachment | None] = (),
        **given: Any,
    ) -> list[PreparedRequest]:
        """Return a request for each prompt. sampling_params None: the checkpoint's defaults.

        See `InputProcessor.process` for the other arguments and the errors.
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        return self.inputs.process(prompts, params, priority, attached=attached, **given)

    def arrivals(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        made: Callable[[Sequence[PreparedRequest]], None],
        **given: Any,
    ) -> Arrivals | None:
        """Return an `Arrivals`, which makes each request once its prompt's data is ready; None if no prompt has data.

        Arguments, and prompts without data, are checked at once. Raises the errors of `completions`. made: called with
        a list of one request, for each request, before `Arrivals.take` returns it.
        """
        if not (attached := self.attach(prompts)):
            return None
        params = self.default_sampling_params if sampling_params is None else sampling_params
        makers = self.inputs.makers(prompts, params, priority, attached=attached, **given)

        def request_of(make: Callable[[], PreparedRequest]) -> PreparedRequest:
            request = make()
            made([request])
            return request

        for index, attachment in enumerate(attached):
            if attachment is None:
                makers[index] = partial(_same, makers[index]())
        priorities: Sequence[int] = [0] * len(prompts)
        if self.limits.has_priorities and isinstance(priority, list | tuple):
            priorities = priority
        order = sorted(range(len(prompts)), key=lambda index: priorities[index])
        running = self.config.scheduler.max_num_seqs * self.config.parallel.data_parallel_size
        return Arrivals(attached, [partial(request_of, make) for make in makers], order, running)

    def attach(self, prompts: Sequence[Prompt]) -> Sequence[Attachment | None]:
        """Return an Attachment for each prompt with data and None for the others; () if no prompt has data.

        The data need not be ready yet. Raises as RequestFeature.attach does, and ValueError if no feature reads data.
        """
        return attach_all(self.features, prompts)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of features in this process, by name."""
        return {name: figure for feature in self.features for name, figure in feature.metrics().items()}

    def close(self) -> None:
        """Free what features have started. May be called again."""
        for feature in self.features:
            feature.close()

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises ValueError if there is none."""
        if self.tokenizer is None:
            raise ValueError(f"tokenizer must be given: {str(self.config.model.path)!r} has none")
        return self.tokenizer

    def require_pooling(self) -> PoolingProcessor:
        """Return the processor of pooling requests. Raises ValueError for a generative model."""
        if self.pooling is None:
            raise ValueError(
                "the model generates text, and does not pool; allowed: runner='pooling', which loads it for that"
            )
        return self.pooling

    def require_generating(self) -> None:
        """Raise ValueError for a pooling model."""
        if self.pooling is not None:
            raise ValueError(
                "the model pools, and generates no text; allowed: runner='generate', if its checkpoint can"
            )


def _same(request: PreparedRequest) -> PreparedRequest:
    return request


def make_frontend(
    config: EngineConfig,
    limits: RequestLimits,
    tokenizer: Tokenizer | None,
    default_sampling_params: SamplingParams,
    *,
    objects_allowed: str = "",
    id_prefix: str = "",
) -> FrontendParts:
    """Return the frontend parts of an engine.

    id_prefix: the beginning of request ids. objects_allowed: see StructuredRequests.
    """
    eos_token_ids = read_eos_token_ids(config.model.path, tokenizer, config.model.overrides)
    features = request_features(config, tokenizer, eos_token_ids, objects_allowed)
    inputs = InputProcessor(tokenizer, limits, eos_token_ids, id_prefix, features)
    pooling = make_pooling_processor(config.model, inputs)
    return FrontendParts(config, limits, tokenizer, inputs, features, pooling, default_sampling_params)
