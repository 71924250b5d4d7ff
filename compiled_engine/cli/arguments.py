"""Command-line arguments declared once, as tables, and given to every command that takes them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer

from compiled_engine.cli.errors import bad_input_is_reported
from compiled_engine.options import EngineOptions

ENVIRONMENT = "COMPILED_ENGINE_"
# Options whose variable the engine reads itself, as a default that need not be honoured.
READ_BY_THE_ENGINE = ("cache_dir",)


@dataclass(frozen=True)
class Argument:
    """One option of the command line, for the field `name` of a dataclass; absent unless it is given.

    type: of one value. flag: how it is written, if not as the field. convert: from what was written to what
    the field takes.
    """

    name: str
    type: Any
    help: str
    flag: str | None = None
    convert: Callable[[Any], Any] = lambda value: value

    @property
    def written(self) -> str:
        """How it is written."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable that stands in for it: the option's name, in capitals."""
        return ENVIRONMENT + self.written.split("/")[0].removeprefix("--").replace("-", "_").upper()

    def parameter(self, panel: str, default: object = None, *, from_environment: bool = False) -> inspect.Parameter:
        shows_nothing = default in (None, (), "") or isinstance(default, bool)
        shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
        text = self.help if shows_nothing else f"{self.help} Default: {shown}."
        variable = self.variable if from_environment and self.name not in READ_BY_THE_ENGINE else None
        option = typer.Option(
            None,
            self.written,
            help=text,
            rich_help_panel=panel,
            show_default=False,
            envvar=variable,
            show_envvar=False,
        )
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=self.type | None)


def block_size(value: str) -> int | str:
    return int(value) if value.isdecimal() else value


ENGINE_ARGUMENTS = (
    Argument(
        "model",
        str,
        "Checkpoint folder in Hugging Face layout, or org/name or org/name@revision of the Hugging Face Hub. Without "
        "it: the bundled model.",
    ),
    Argument("tokenizer", str, "Folder or name of the tokenizer, when it is not the model's."),
    Argument("revision", str, "Branch, tag or commit of a model from the hub. Default: its main branch."),
    Argument("tokenizer_revision", str, "The same for the tokenizer."),
    Argument("download_dir", Path, "Where files from the hub are kept, instead of its own cache.", convert=str),
    Argument(
        "skip_tokenizer_init",
        bool,
        "Load no tokenizer: prompts are token ids, outputs have no text.",
        flag="--skip-tokenizer-init",
    ),
    Argument("mode", str, "eager, compiled, graphed, or auto: graphed, as far as the device and the model allow."),
    Argument("dtype", str, "auto, float32, bfloat16 or float16."),
    Argument("device", str, "auto, cpu, cuda or cuda:N."),
    Argument("max_model_len", int, "Most tokens of prompt and output together."),
    Argument("max_num_seqs", int, "Most requests in one step."),
    Argument("max_num_batched_tokens", int, "Most tokens in one step."),
    Argument("max_prefill_tokens", int, "Most tokens of prompts in a step that other requests run in."),
    Argument("block_size", str, "Tokens in a block of the KV cache, or auto.", convert=block_size),
    Argument("num_blocks", int, "Blocks of the KV cache, instead of what fits into memory."),
    Argument("gpu_memory_utilization", float, "Share of the device's memory to use, weights included."),
    Argument(
        "enable_prefix_caching",
        bool,
        "Compute every prompt whole, also where prompts begin alike.",
        flag="--no-prefix-caching",
        convert=operator.not_,
    ),
    Argument("scheduling_policy", str, "fcfs or priority."),
    Argument(
        "async_scheduling",
        bool,
        "Launch a step before the results of the one before it are known. Default: on CUDA.",
        flag="--async-scheduling/--no-async-scheduling",
    ),
    Argument("seed", int, "Seed of all that is random."),
    Argument("load_format", str, "auto, safetensors, or dummy: random weights."),
    Argument(
        "model_impl",
        str,
        "Whose code the model is: textbook, transformers, or auto: the textbook's where there is one.",
    ),
    Argument("attention_backend", str, "auto, torch, triton or flash_attn."),
    Argument("passes", list[str], "FX pass to run, instead of all; may be repeated.", flag="--pass", convert=tuple),
    Argument(
        "disable_passes",
        list[str],
        "FX pass to leave out; may be repeated.",
        flag="--disable-pass",
        convert=tuple,
    ),
    Argument("strict_passes", bool, "Fail if a pass matches less often than it must.", flag="--strict-passes"),
    Argument("verify_passes", bool, "Execute every rewrite, before and after, and compare.", flag="--verify-passes"),
    Argument(
        "compile_ranges",
        list[int],
        "Compile once more for batches of up to so many tokens; may be repeated; 0 for none.",
        flag="--compile-range",
        convert=lambda sizes: () if sizes == [0] else tuple(sizes),
    ),
    Argument("compile_workers", int, "Processes that compile; 0 compiles in this one."),
    Argument(
        "graph_mode",
        str,
        "auto, none, piecewise, full, full_decode_only, full_and_piecewise or breakable: what CUDA graphs hold; on a "
        "CPU auto, none or recorded.",
    ),
    Argument(
        "capture_sizes",
        list[int],
        "Number of decodes to capture as a CUDA graph, instead of the default rule; may be repeated.",
        flag="--capture-size",
        convert=tuple,
    ),
    Argument(
        "capture_token_sizes",
        list[int],
        "The same for batches with prefills, by their tokens; may be repeated.",
        flag="--capture-token-size",
        convert=tuple,
    ),
    Argument(
        "background_capture",
        bool,
        "Capture between the steps of the first requests, not before them.",
        flag="--background-capture",
    ),
    Argument("cache_dir", Path, "Where compiled artifacts are kept.", convert=str),
    Argument("compile_cache", bool, "Keep no compiled artifacts.", flag="--no-cache", convert=operator.not_),
    Argument("generation_config", str, "auto: the checkpoint's defaults for sampling; none: ignore them."),
    Argument("tensor_parallel_size", int, "Devices that compute each layer together, one process a device."),
    Argument("pipeline_parallel_size", int, "Stages that the layers are divided into, on devices of their own."),
    Argument("data_parallel_size", int, "Replicas of the model, each on devices of its own."),
    Argument(
        "sequence_parallel",
        bool,
        "With several devices a layer, each normalises a share of the tokens of long prefills.",
        flag="--sequence-parallel",
    ),
    Argument("collectives", str, "auto or nccl: what carries sums between GPUs."),
    Argument("distributed_executor", str, "auto, in_process, multiprocess or ray: who runs the devices."),
    Argument(
        "logits_processors",
        list[str],
        "Logits processor, as package.module:Name; may be repeated.",
        flag="--logits-processor",
        convert=tuple,
    ),
    Argument("profile_dir", Path, "Where a profile is written to.", convert=str),
)

SAMPLING_ARGUMENTS = (
    Argument("max_tokens", int, "Most tokens to generate."),
    Argument("min_tokens", int, "Tokens to generate before an end-of-sequence token may come."),
    Argument("temperature", float, "0 takes the most likely token."),
    Argument("top_p", float, "Sample from the most likely tokens that reach this probability together."),
    Argument("top_k", int, "Sample from this many most likely tokens; 0 for all."),
    Argument("min_p", float, "Leave out tokens less likely than this times the most likely one."),
    Argument("repetition_penalty", float, "Above 1: tokens that were there become less likely."),
    Argument("presence_penalty", float, "Subtracted from the logits of tokens generated so far."),
    Argument("frequency_penalty", float, "The same, once for each time."),
    Argument("n", int, "Completions of each prompt."),
    Argument("stop", list[str], "Stop at this text; may be repeated."),
    Argument("stop_token_ids", list[int], "Stop at this token; may be repeated.", flag="--stop-token-id"),
    Argument("ignore_eos", bool, "Go on after an end-of-sequence token.", flag="--ignore-eos"),
    Argument("logprobs", int, "Log-probabilities of this many tokens for each position (with --json)."),
)

Command = Callable[..., Any]


def takes_engine_options(command: Command) -> Command:
    """Let `command(engine=...)` have the engine's options, and get those that were given as a dict."""
    return takes_options(command, "engine", "Engine", ENGINE_ARGUMENTS, engine_defaults())


def engine_defaults() -> dict[str, Any]:
    """The engine's options, each with its default."""
    return {field.name: field.default for field in fields(EngineOptions)}


def takes_sampling_params(command: Command) -> Command:
    """Let `command(sampling=...)` have sampling parameters, and get those that were given as a dict."""
    panel = "Sampling (if not given: the checkpoint's defaults)"
    return takes_options(command, "sampling", panel, SAMPLING_ARGUMENTS, {})


def takes_options(
    command: Command,
    keyword: str,
    panel: str,
    arguments: Sequence[Argument],
    defaults: Mapping[str, Any],
    *,
    from_environment: bool = False,
) -> Command:
    """Let `command(keyword=...)` have more options, and get those that were given as a dict.

    What typer reads is a command's signature, so that is what is put together.
    """
    added = [
        argument.parameter(panel, defaults.get(argument.name), from_environment=from_environment)
        for argument in arguments
    ]
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != keyword]

    def wrapper(**values: Any) -> Any:
        given = {}
        for argument in arguments:
            value = values.pop(argument.name)
            if value not in (None, []):
                with bad_input_is_reported((ValueError,)):
                    given[argument.name] = argument.convert(value)
        return command(**values, **{keyword: given})

    wrapper.__name__ = command.__name__
    wrapper.__doc__ = command.__doc__
    wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    return wrapper


def as_written(arguments: Sequence[Argument], given: Mapping[str, Any]) -> list[str]:
    """What stands on a command line for these values; the reverse of reading them."""
    words: list[str] = []
    for argument in arguments:
        if argument.name not in given:
            continue
        value = given[argument.name]
        if argument.type is bool:
            on, _, off = argument.written.partition("/")
            words.append(on if value or not off else off)
        elif isinstance(value, tuple | list):
            words += [word for each in value or (0,) for word in (argument.written, str(each))]
        else:
            words += [argument.written, str(value)]
    return words
