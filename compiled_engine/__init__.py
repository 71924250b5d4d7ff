"""compiled_engine: an LLM inference engine built around the compiler.

Names are imported on first use, so that importing the package costs nothing. Most names import PyTorch. Garbage
collection is paused during these imports, since they create very many objects and no garbage.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compiled_engine.process.bytecode import bytecode_kept
from compiled_engine.process.memory import collection_paused

if TYPE_CHECKING:
    from compiled_engine.async_llm import AsyncLLM
    from compiled_engine.features.adapters.lora_request import LoRARequest
    from compiled_engine.features.pooling.frontend.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from compiled_engine.features.pooling.frontend.task import PoolingParams
    from compiled_engine.frontend.outputs import CompletionOutput, Logprob, RequestOutput
    from compiled_engine.llm import LLM
    from compiled_engine.passes.registry import register_pass, unregister_pass
    from compiled_engine.pooling import PoolerConfig
    from compiled_engine.processes.core_client import EngineDeadError
    from compiled_engine.sampling.logits_processor import LogitsProcessor
    from compiled_engine.sampling.params import SamplingParams
    from compiled_engine.sampling.structured_outputs import StructuredOutputs
    from compiled_engine.sampling.token_mask import TokenMask

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "PoolerConfig",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "TokenMask",
    "register_pass",
    "unregister_pass",
]

# Names that vLLM uses, each with the module and the attribute that it stands for here.
_OTHER_NAMES = {
    "AsyncEngineArgs": ("compiled_engine.other_engines.names", "EngineArgs"),
    "AsyncLLMEngine": ("compiled_engine.async_llm", "AsyncLLM"),
    "EngineArgs": ("compiled_engine.other_engines.names", "EngineArgs"),
    "TextPrompt": ("compiled_engine.other_engines.names", "text_prompt"),
    "TokensPrompt": ("compiled_engine.other_engines.names", "tokens_prompt"),
}
_MODULES = {
    "LLM": "compiled_engine.llm",
    "AsyncLLM": "compiled_engine.async_llm",
    "ClassificationRequestOutput": "compiled_engine.features.pooling.frontend.outputs",
    "CompletionOutput": "compiled_engine.frontend.outputs",
    "EmbeddingRequestOutput": "compiled_engine.features.pooling.frontend.outputs",
    "EngineDeadError": "compiled_engine.processes.core_client",
    "LoRARequest": "compiled_engine.features.adapters.lora_request",
    "LogitsProcessor": "compiled_engine.sampling.logits_processor",
    "Logprob": "compiled_engine.frontend.outputs",
    "PoolerConfig": "compiled_engine.pooling",
    "PoolingParams": "compiled_engine.features.pooling.frontend.task",
    "PoolingRequestOutput": "compiled_engine.features.pooling.frontend.outputs",
    "RequestOutput": "compiled_engine.frontend.outputs",
    "SamplingParams": "compiled_engine.sampling.params",
    "ScoringRequestOutput": "compiled_engine.features.pooling.frontend.outputs",
    "StructuredOutputs": "compiled_engine.sampling.structured_outputs",
    "TokenMask": "compiled_engine.sampling.token_mask",
    "register_pass": "compiled_engine.passes.registry",
    "unregister_pass": "compiled_engine.passes.registry",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("compiled-engine")
    if name in _MODULES or name in _OTHER_NAMES:
        module, attribute = _OTHER_NAMES.get(name) or (_MODULES[name], name)
        with collection_paused(), bytecode_kept():
            return getattr(import_module(module), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
