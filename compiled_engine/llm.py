"""`LLM`: the engine in the caller's process. Takes prompts and returns completions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from compiled_engine.engine.control import ControlError
from compiled_engine.engine.messages import ControlCall
from compiled_engine.features.pooling.frontend.running import RunningPooling, classifications, embeddings, results
from compiled_engine.features.rank_calls.frontend.collective_calls import OF_ENGINES, calls_on_ranks
from compiled_engine.features.weight_updates.frontend import update_calls
from compiled_engine.frontend.attachments import Arrivals
from compiled_engine.frontend.chat import Conversation, read_chat_template, render_chat, split_conversations
from compiled_engine.frontend.metric_list import Metric, metric_list
from compiled_engine.frontend.outputs import RequestOutput
from compiled_engine.frontend.prepared_request import PreparedRequest
from compiled_engine.frontend.prompts import Prompt, PromptLike, parse_prompt, parse_prompts
from compiled_engine.other_engines.methods import MISSING, refuse_arguments
from compiled_engine.process.bytecode import bytecode_kept
from compiled_engine.process.forks import Owner
from compiled_engine.process.in_background import import_apart
from compiled_engine.process.init_cuda import core_has_device, given_device, init_cuda
from compiled_engine.process.memory import collection_paused, no_full_gc
from compiled_engine.process.progress import Progress, RichProgress, SilentProgress
from compiled_engine.process.timeline import Timeline
from compiled_engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from compiled_engine.config import EngineConfig, ModelConfig
    from compiled_engine.engine.core import EngineCore
    from compiled_engine.features.adapters.lora_request import LoRARequest
    from compiled_engine.features.pooling.frontend.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from compiled_engine.features.pooling.frontend.processor import PoolingProcessor
    from compiled_engine.features.pooling.frontend.task import PoolingParams
    from compiled_engine.features.speech.frontend.transcription import Asked, Transcription
    from compiled_engine.features.weight_updates.frontend.update_calls import WeightSource
    from compiled_engine.llm_parts import LLMParts
    from compiled_engine.processes.replicas import Replicas

# Seconds before a progress bar appears; a few texts take less time than drawing it.
POOLING_PATIENCE_S = 0.5


class LLM:
    """An engine with a model loaded, compiled and ready.

    model: checkpoint folder in Hugging Face layout, or org/name of the Hugging Face Hub; None for the bundled model.
    options: the fields of `EngineOptions`. progress: show the progress of slow work on stderr.

    Raises TypeError for an unknown option, ValueError or OSError for a value that cannot be used. Not thread-safe.
    Closing the engine, leaving its `with` block or dropping the last reference to it and its iterators frees the
    device.
    """

    def __init__(self, model: str | Path | None = None, *, progress: bool = True, **options: Any) -> None:
        timeline = Timeline()
        timeline.add("before the engine", 0.0, timeline.now())  # the interpreter, imports, and what the caller did
        self._owner = Owner("LLM")
        self._progress = RichProgress() if progress else SilentProgress()
        parts = _start({"model": model, **options}, self._progress, timeline)
        self._frontend, self._loop, self._profiler = parts.frontend, parts.loop, parts.profiler
        self._core: EngineCore | Replicas | None = parts.core

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete one or many prompts. Returns one output per prompt, in the order of the prompts.

        prompts: text, token ids (a list of integers is one prompt), or a dict with "prompt" (text),
            "prompt_token_ids", or both: the ids are run, and the text is RequestOutput.prompt. Or a list of these.
            A dict may have images: "multi_modal_data": {"image": one or a list}, and "mm_processor_kwargs".
        sampling_params: for all prompts, or one for each; None for the checkpoint's defaults.
        use_tqdm: show progress.
        priority: for all prompts, or one for each; lower values are served first. Must be 0 unless scheduling_policy is
            "priority".
        lora_request: an adapter for all prompts, or an adapter or None for each; requires enable_lora.

        Raises TypeError or ValueError for bad input, before anything is scheduled. Images and audio are
        processed while earlier prompts run; one that cannot be used ends the call when its prompt's turn comes.
        """
        refuse_arguments("generate", others)
        self._require_generating()
        return self._generate(parse_prompts(prompts), sampling_params, use_tqdm, priority, lora_request)

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt. Yields its output, with all text so far, whenever it has grown.

        Closing the iterator aborts the request. Raises the errors of `generate`, before the first output.
        """
        self._require_generating()
        requests = self._prepare([parse_prompt(prompt)], sampling_params, lora_request=lora_request)
        return self._loop.run(requests, partial=True)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue one conversation (a list of {"role", "content"}) or many (a list of such lists).

        A content is text, or a list of parts: {"type": "text", "text"}, {"type": "image_url", "image_url": {"url"}},
        {"type": "image", "image": a PIL image, an array, bytes or a path}.
        chat_template: a Jinja template, or the path of a file with one; None for the tokenizer's.
        add_generation_prompt: end the prompt with the beginning of an answer.
        continue_final_message: continue the last message instead.
        tools, chat_template_kwargs: values for the template. mm_processor_kwargs: arguments of the image processor.

        Returns one output per conversation, in their order. Other arguments and errors: see `generate`.
        """
        refuse_arguments("chat", others)
        self._require_generating()
        tokenizer = self._frontend.require_tokenizer()
        template = read_chat_template(chat_template, tokenizer)
        prompts = [
            render_chat(
                tokenizer,
                conversation,
                name=name,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                placeholder=self._frontend.features.images.placeholder,
                mm_processor_kwargs=mm_processor_kwargs,
            )
            for name, conversation in split_conversations(messages)
        ]
        return self._generate(prompts, sampling_params, use_tqdm, priority, lora_request)

    def transcribe(
        self,
        audio: Any,
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str | None = None,
        temperature: float | Sequence[float] | None = None,
        timestamps: bool = False,
        use_tqdm: bool = False,
    ) -> Transcription:
        """Return the text of audio of any length, with a speech model.

        audio: a pair (samples, rate), a path, or the bytes of a file.
        language: a code such as "en"; None to detect it.
        task: "transcribe", or "translate" into English.
        prompt: a text before the audio's, whose style and names the result follows.
        temperature: of sampling. If there are several, a window whose text repeats itself or is improbable is decoded
            again with the next one. None for the temperatures of the Whisper paper.
        timestamps: the model divides the text into segments with times, and windows are decoded one after the other.
            Otherwise windows are decoded together, and each is a segment.

        Raises TypeError, ValueError or OSError for bad input, before anything is scheduled.
        """
        self._require_generating()
        transcribing = self._frontend.features.speech.transcribing
        work = transcribing(audio, language, task, prompt, temperature, timestamps=timestamps)

        def run_all(asked: list[Asked]) -> list[RequestOutput]:
            params = [each.params for each in asked]
            return self._generate(parse_prompts([each.prompt for each in asked]), params, use_tqdm, None, None)

        from compiled_engine.features.speech.frontend.transcription import run

        return run(work, run_all)

    @no_full_gc()
    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
        prompt_name: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return vectors for one or many prompts, computed with a pooling model.

        prompts, lora_request: see `generate`.
        pooling_params: options of pooling for all prompts; None for the defaults.
        pooling_task: embed or classify, whichever the model does; or token_embed or token_classify, for a result per
            token.
        prompt_name: name of one of the checkpoint's prompts, which is put before each text.

        Raises TypeError or ValueError for bad input, before anything is scheduled.
        """
        refuse_arguments("encode", others, pools=True)
        requests = self._pooler().process(prompts, pooling_params, pooling_task, prompt_name, lora_request=lora_request)
        return results(self._pooled(requests, use_tqdm))

    @no_full_gc()
    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        prompt_name: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return an embedding for each prompt. Arguments and errors: see `encode`."""
        refuse_arguments("embed", others, pools=True)
        requests = self._pooler().process(prompts, pooling_params, "embed", prompt_name, lora_request=lora_request)
        return embeddings(self._pooled(requests, use_tqdm))

    @no_full_gc()
    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the labels for each prompt. Arguments and errors: see `encode`."""
        refuse_arguments("classify", others, pools=True)
        requests = self._pooler().process(prompts, pooling_params, "classify", lora_request=lora_request)
        return classifications(self._pooled(requests, use_tqdm))

    @no_full_gc()
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        instruction: str | None = None,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Return a score for each pair of one query and each document, or of equally many queries and documents.

        The score is the result of a model with one label. With an embedding model, it is the cosine of the two
        embeddings. instruction: for a reranker whose template takes one. lora_request: an adapter for all texts.
        """
        refuse_arguments("score", others, pools=True)
        scoring = self._pooler().score(queries, documents, pooling_params, instruction, lora_request=lora_request)
        return scoring.scores(self._pooled(scoring.requests, use_tqdm))

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer as an object of transformers, which the first call imports."""
        return self._frontend.require_tokenizer().hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the parameters that are used when no sampling_params are given."""
        return self._frontend.default_sampling_params.clone()

    def metrics(self) -> dict[str, Any]:
        """Return the engine's metrics by name: counts since it started, and current values."""
        metrics: dict[str, Any] = self._require_open().call(ControlCall("metrics"))
        return metrics | self._frontend.metrics()

    def get_metrics(self) -> list[Metric]:
        """Return the metrics as named counters and gauges, such as compiled_engine:num_requests_running."""
        return metric_list(self.metrics())

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache. Returns True.

        reset_running_requests: running requests are computed again; otherwise they are not affected. reset_connector:
            has no effect, as blocks kept in host memory and files are given up in any case.
        """
        self._require_open().call(ControlCall("reset_prefix_cache", {"of_running": reset_running_requests}))
        return True

    def reset_mm_cache(self) -> None:
        """Drop the processed images that are kept in host memory."""
        self._require_open()
        self._frontend.features.images.forget()

    def update_weights(self, weights: WeightSource, *, version: str | None = None, recompute: bool = True) -> None:
        """Replace the weights in place, between two steps; nothing is compiled or captured again.

        weights: a folder with safetensors files, or tensors by the checkpoint's names: a dict, (name, tensor) pairs, or
            SharedTensors of another process. They must be the whole checkpoint; between `start_weight_update` and
            `finish_weight_update`, each call may have a part of it.
        version, recompute: see `finish_weight_update`.

        Raises TypeError or ControlError for weights that do not fit; the engine then keeps the old weights.
        """
        calls = update_calls.update(weights, self.config.parallel, version, recompute=recompute, in_this_process=True)
        update_calls.served(calls, self._require_open().call)

    def start_weight_update(self) -> None:
        """Begin an update in parts, and drop one that was not finished. Requests run on with the old weights."""
        self._require_open().call(update_calls.START)

    def finish_weight_update(self, version: str | None = None, *, recompute: bool = True) -> str:
        """Check and use the weights that `update_weights` has added since `start_weight_update`; return the version.

        The prefix cache is emptied. version: the name of the new weights in outputs and metrics; None for the number of
            updates so far.
        recompute: running requests are computed again from their tokens; otherwise they keep the keys and values of the
            old weights.

        Raises ControlError if the weights do not fit; the engine then drops them and keeps the old weights.
        """
        found: str = self._require_open().call(update_calls.finish(version, recompute=recompute))
        return found

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back to the system until `wake_up`; requires enable_sleep_mode.

        level: 1 gives back the KV cache and, on a GPU, the weights, which are copied to host memory; 2 gives back both
            without a copy, so `update_weights` must follow; 0 only stops the engine.
        mode: what becomes of open streams: "abort" ends them, "keep" computes them again after `wake_up`.

        Raises ControlError for another level or mode, or without enable_sleep_mode.
        """
        if mode not in ("abort", "keep"):
            raise ControlError(f"mode is {mode!r}; allowed: abort, keep")
        core = self._require_open()
        core.call(ControlCall("sleep", {"level": level}, slow=True))
        core.call(ControlCall("pause", {"mode": mode, "clear_cache": False}))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate again the memory that `sleep` has given back. tags: weights, kv_cache, or None for both.

        Requests run again once both are awake and, after level 2, `update_weights` has brought weights.
        """
        core = self._require_open()
        if core.call(ControlCall("wake_up", {"tags": None if tags is None else list(tags)})):
            core.call(ControlCall("resume"))

    def is_sleeping(self) -> bool:
        """Return whether weights or KV cache are asleep: `wake_up` has not been called for them since `sleep`."""
        sleeping: bool = self._require_open().call(ControlCall("is_sleeping"))
        return sleeping

    def reset_encoder_cache(self) -> None:
        """Drop the embeddings of images and the keys of audio that are kept on the device, with the prefix cache."""
        self.reset_prefix_cache()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks, each with a device of its own. include_dp: of all replicas, not of one."""
        parallel = self.config.parallel
        return parallel.num_ranks if include_dp else parallel.devices_per_replica

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the engine by its name, or a function on every rank; return a result for each rank.

        method: the name of a method, see docs/rollouts.md; or a function, or its name "package.module:function", which
            is called as `function(rank, *args, **kwargs)` between two steps, with a `Rank`. With one rank it may be any
            callable, and take and return anything. With several ranks it must be a function of a module that their
            processes can import, and arguments and results plain data.
        timeout: must be None, since the call runs in this thread.

        Raises ValueError for another method, ControlError if the call fails.
        """
        core = self._require_open()
        if timeout is not None:
            raise ValueError(f"timeout is {timeout}; allowed: None, since the call runs in this thread")
        if method in OF_ENGINES:
            return [getattr(self, str(method))(*args, **(kwargs or {}))] * self.config.parallel.num_ranks
        calls = calls_on_ranks(method, args, kwargs or {}, self.config, in_this_process=True)
        results: list[Any] = update_calls.served(calls, core.call)
        return results

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to record every operator and kernel. profile_prefix: beginning of the file's name.

        Raises RuntimeError if a profile is running, ValueError for a prefix that cannot be part of a file's name.
        """
        self._require_open()
        self._profiler.start(profile_prefix)

    def stop_profile(self) -> Path:
        """Write the recorded profile to the folder profile_dir. Returns the file's path; ui.perfetto.dev opens it.

        Raises RuntimeError if no profile is running.
        """
        self._require_open()
        return self._profiler.stop()

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration."""
        return self._frontend.config

    @property
    def llm_engine(self) -> LLM:
        """This object: scripts for vLLM reach the configuration, metrics and tokenizer through this name."""
        return self

    @property
    def model_config(self) -> ModelConfig:
        """The model's part of the configuration, under vLLM's name."""
        return self._frontend.config.model

    @property
    def core(self) -> EngineCore:
        """The engine core, for measurements and tests that need more than this class offers.

        Raises ValueError if the core runs as replicas, which are in other processes.
        """
        core = self._require_open()
        if self._frontend.config.parallel.has_replicas:
            raise ValueError(f"data_parallel_size is {self._frontend.config.parallel.data_parallel_size}; allowed: 1")
        return cast("EngineCore", core)

    def close(self) -> None:
        """Free the device, after writing a running profile. May be called repeatedly.

        Methods that use the core then fail. Does nothing in a fork of the process that made the engine, because the
        device belongs to that process.
        """
        if self._core is not None and self._owner.is_here:
            self._loop.close()
            if self._profiler.running:
                self._profiler.stop()
            self._core.close()
            self._core = None
            self._frontend.close()

    if not TYPE_CHECKING:  # otherwise a type checker would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            advice = f"; {MISSING[name]}" if name in MISSING else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{advice}", name=name, obj=self
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled: it holds a device; make one in each process")

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int | Sequence[int] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        with no_full_gc():
            arrivals = self._frontend.arrivals(
                prompts, sampling_params, priority, self._ready_core, lora_request=lora_request
            )
            if arrivals is None:
                requests = self._prepare(prompts, sampling_params, priority, lora_request)
                return self._finished("generate", requests, use_tqdm)
            with closing(arrivals):
                return self._finished("generate", (), use_tqdm, arrivals=arrivals)

    def _finished(
        self,
        stage: str,
        requests: Sequence[PreparedRequest],
        use_tqdm: bool,
        patience_s: float = 0.0,
        arrivals: Arrivals | None = None,
    ) -> list[Any]:
        """Run `requests`, or the requests of `arrivals`. Return their outputs in the order of the prompts.

        stage: name of this work in progress reports. patience_s: see Progress.
        """
        total = len(requests) if arrivals is None else len(arrivals)
        finished: dict[str, Any] = {}
        progress = self._progress if use_tqdm else SilentProgress()
        has_drafts, num_drafts, num_accepted = self._frontend.config.max_new_tokens_per_step > 1, 0, 0

        def acceptance() -> str:
            return f"mean acceptance length {1 + num_accepted / num_drafts:.2f}" if num_drafts else ""

        with (
            progress.stage(
                stage, total=total, note=acceptance if has_drafts else None, patience_s=patience_s
            ) as advance,
            closing(self._loop.run(requests, arrivals=arrivals)) as outputs,
        ):
            for output in outputs:
                finished[output.request_id] = output
                if has_drafts and output.metrics is not None:
                    num_drafts += output.metrics.num_drafts
                    num_accepted += output.metrics.num_accepted_tokens
                advance(1)
        ids = [request.request_id for request in requests] if arrivals is None else arrivals.request_ids
        return [finished[request_id] for request_id in ids]

    def _pooled(self, requests: Sequence[PreparedRequest], use_tqdm: bool) -> list[RunningPooling]:
        """Run pooling requests. Return them, in the same order, when all have ended."""
        self._ready_core(requests)
        return self._finished("pool", requests, use_tqdm, POOLING_PATIENCE_S)

    def _pooler(self) -> PoolingProcessor:
        self._require_open()
        return self._frontend.require_pooling()

    def _require_generating(self) -> None:
        self._require_open()
        self._frontend.require_generating()

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PreparedRequest]:
        requests = self._frontend.completions(prompts, sampling_params, priority, lora_request=lora_request)
        self._ready_core(requests)
        return requests

    def _ready_core(self, requests: Sequence[PreparedRequest]) -> None:
        """Make the control calls that must precede these requests, such as those that load adapters."""
        of_core = [each for request in requests for each in request.engine_requests]
        for feature in self._frontend.features:
            feature.before(of_core, self._require_open())

    def _require_open(self) -> EngineCore | Replicas:
        if self._core is None:
            raise RuntimeError("this LLM is closed; make a new one")
        self._owner.require_here()
        return self._core


@bytecode_kept()
def _start(keywords: Mapping[str, Any], progress: Progress, timeline: Timeline) -> LLMParts:
    """Start an engine with these keywords of `LLM`, and return its parts.

    PyTorch is imported only here, while the GPU's context is created.
    """
    if "torch" not in sys.modules:
        init_cuda(given_device(keywords), runs_here=core_has_device(keywords))
    with timeline.span("import torch"), collection_paused():
        import_apart("compiled_engine.llm_parts")
    from compiled_engine.llm_parts import start_llm
    from compiled_engine.other_engines.translate import make_options

    return start_llm(make_options(keywords), progress, timeline)
