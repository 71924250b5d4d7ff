"""depyf's debug folder of a model: decompiled code, guards, the graphs of all stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import depyf
from torch import nn

from compiled_engine.config import EngineConfig, ModelConfig
from compiled_engine.graphs.compiled_model import compile_model
from compiled_engine.process.progress import Progress
from compiled_engine.process.timeline import Timeline


def write_depyf_folder(
    config: EngineConfig, make_model: Callable[[ModelConfig], nn.Module], folder: Path, progress: Progress
) -> None:
    """Compile the model again in this process, without the cache, under depyf, which writes into `folder`.

    Raises what `compile_model` raises.
    """
    here = replace(config, compile=replace(config.compile, cache_dir=None, workers=0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*You are trying to debug `torch.compile`", category=UserWarning)
        with depyf.prepare_debug(str(folder)):
            compile_model(here, make_model, progress, Timeline())
