"""`compiled-engine quantise`: write a checkpoint with quantised linears."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compiled_engine.cli.errors import bad_input_is_reported, read_text
from compiled_engine.cli.output import AsJson, make_room, print_json, written_to

if TYPE_CHECKING:
    from compiled_engine.config import ModelConfig
    from compiled_engine.models.checkpoint.quantise_folder import QuantisePlan
    from compiled_engine.process.progress import Progress

Scheme = Annotated[
    str,
    typer.Option(
        help="fp8: one scale per row. fp8_block: one scale per 128 x 128 weights. int4: four bits, one scale per 128 "
        "columns of a row.",
        show_default=False,
    ),
]


def quantise(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder, or org/name of the Hugging Face Hub.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write, which must not exist.", show_default=False)],
    *,
    scheme: Scheme,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave these modules as they are: names, or re: and a regular expression; may be repeated. Without it "
            "lm_head and the routers of experts."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Compute the loss on the text of this file, before and after.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute the loss: auto, cpu, cuda or cuda:N.")] = "auto",
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a model of the hub.", show_default=False)
    ] = None,
    download_dir: Annotated[
        Path | None, typer.Option(help="Folder for downloads. Default: the cache of huggingface_hub.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint with quantised linears and experts, in the format of compressed-tensors.

    The weights are those that the engine's option --quantization makes while it loads, except with fp8_block if a
    linear's rows are no multiple of 128. Memory for about one tensor is needed, and no GPU. With --text, both models
    are also loaded, one after the other, on --device. The folder appears under its name once it is complete.

    JSON: folder, scheme, quantised, kept (module: reason), bytes_before, bytes_after, and with --text num_tokens,
    loss_before and loss_after, in nats per token.

    Examples:

      compiled-engine quantise path/to/Qwen3-8B Qwen3-8B-FP8 --scheme fp8

      compiled-engine quantise org/name out --scheme fp8_block --ignore lm_head --ignore "re:.*layers\\.0\\..*"

      compiled-engine quantise path/to/Qwen3-8B Qwen3-8B-FP8 --scheme fp8 --text held_out.txt
    """
    with bad_input_is_reported():
        _check_out(out)
        words = None if text is None else read_text("text", text)

        from compiled_engine.bench.held_out_loss import held_out_loss
        from compiled_engine.llm import LLM
        from compiled_engine.models.checkpoint.quantise_folder import write_folder
        from compiled_engine.process.progress import RichProgress

        progress = RichProgress()
        config, plan = _plan(model, scheme, tuple(ignore or ()), revision, download_dir, progress)
        if words is not None and config.pooling is not None:
            raise ValueError(f"text is {str(text)!r}, but the model pools, so it has no loss; allowed: None")
        _check_space(out, plan)
        result = {
            "folder": str(out),
            "scheme": scheme,
            "quantised": len(plan.schemes),
            "kept": dict(plan.kept),
            "bytes_before": plan.bytes_before,
            "bytes_after": plan.bytes_after,
        }
        losses = []
        for folder in (config.path, out):
            if folder == out:
                with written_to(out):
                    write_folder(plan, out, progress)
            if words is not None:
                with LLM(folder, mode="compiled", device=device, enable_prefix_caching=False) as llm:
                    losses.append(held_out_loss(llm, words))
    if losses:
        before, after = losses
        result |= {"num_tokens": before.num_tokens, "loss_before": before.nats, "loss_after": after.nats}
    if as_json:
        print_json(result)
    else:
        typer.echo("\n".join(_lines(result)))


def _plan(
    model: str,
    scheme: str,
    ignore: tuple[str, ...],
    revision: str | None,
    download_dir: Path | None,
    progress: Progress,
) -> tuple[ModelConfig, QuantisePlan]:
    from compiled_engine.models.checkpoint.config_reader import read_model_config
    from compiled_engine.models.checkpoint.quantise_folder import plan_folder, require_unquantised
    from compiled_engine.other_engines.translate import make_options
    from compiled_engine.quantisation_names import ONLINE
    from compiled_engine.resolve.folders import resolve_cache_dir, resolve_model_folder

    if scheme not in ONLINE:
        raise ValueError(f"scheme is {scheme!r}; allowed: {', '.join(ONLINE)}")
    options = make_options({"model": model, "revision": revision, "download_dir": download_dir})
    folder = resolve_model_folder(options, {}, progress)
    require_unquantised(folder.path)
    cache_dir = resolve_cache_dir(options)
    config, _ = read_model_config(
        folder.path,
        hub_name=folder.hub_name,
        revision=folder.revision,
        dtype="auto",
        max_model_len=None,
        load_format="auto",
        seed=0,
        device_type="cpu",
        cache_dir=cache_dir,
        quantization=scheme,
        quantization_ignore=ignore,
    )
    if folder.hub_name is not None:
        from compiled_engine.models.checkpoint.hub import download_weights  # imports huggingface_hub

        download_weights(folder.hub_name, folder.path, progress)
    return config, plan_folder(config, cache_dir, ignore)


def _check_out(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise ValueError(f"out is {str(out)!r}, which exists; allowed: a path that does not exist")
    make_room("out", out)


def _check_space(out: Path, plan: QuantisePlan) -> None:
    free = shutil.disk_usage(out.absolute().parent).free
    if free < plan.bytes_after:
        raise ValueError(
            f"out is {str(out)!r}, on a disk with {free / 1e9:.2f} GB free; the weights take "
            f"{plan.bytes_after / 1e9:.2f} GB"
        )


def _lines(result: dict[str, Any]) -> list[str]:
    from compiled_engine.models.checkpoint.file_names import name_some

    lines = [
        f"{result['quantised']} linears in {result['scheme']}; "
        f"{result['bytes_before'] / 1e6:,.1f} MB before, {result['bytes_after'] / 1e6:,.1f} MB after; "
        f"written to {result['folder']}"
    ]
    reasons: dict[str, list[str]] = {}
    for module, reason in result["kept"].items():
        reasons.setdefault(reason, []).append(module)
    lines += [f"kept as it was: {name_some(modules)} ({reason})" for reason, modules in reasons.items()]
    if "num_tokens" in result:
        before, after = result["loss_before"], result["loss_after"]
        lines.append(
            f"loss over {result['num_tokens']:,} tokens: {before:.4f} nats per token before, {after:.4f} after "
            f"({after - before:+.4f})"
        )
    return lines
