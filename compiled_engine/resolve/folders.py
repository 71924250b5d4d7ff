"""Find the folders of the model, the tokenizer and adapters, which may be local or on the hub, and the cache folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.options import EngineOptions
from compiled_engine.process.cache_root import default_root
from compiled_engine.process.progress import Progress
from compiled_engine.schema import require_defaults

if TYPE_CHECKING:
    from compiled_engine.models.checkpoint.hub import Repository

DEFAULT_REVISION = "main"
_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>.+))?")


@dataclass(frozen=True)
class ModelFolder:
    """A checkpoint's folder, and where the checkpoint comes from."""

    path: Path
    hub_name: str | None = None  # None for a local folder
    revision: str | None = None  # commit of a checkpoint from the hub


def resolve_model_folder(options: EngineOptions, reasons: dict[str, str], progress: Progress) -> ModelFolder:
    """Return the model's folder. Raises ValueError if a revision is given for a local folder.

    Also raises the errors of `find_checkpoint`.
    """
    if options.model is None:
        reasons["model.path"] = "no model was named: the bundled one"
    repository = _repository("model", options.model, "revision", options.revision, options.download_dir)
    if repository is None:
        return ModelFolder(BUNDLED_MODEL_PATH if options.model is None else Path(options.model))
    from compiled_engine.models.checkpoint.hub import (
        find_checkpoint,  # imports huggingface_hub, not needed for a folder
    )

    snapshot = find_checkpoint(repository, progress, with_weights=options.load_format != "dummy")
    reasons["model.path"] = f"{repository.name}, {snapshot.origin}"
    reasons["model.revision"] = f"the commit of {repository.revision}"
    return ModelFolder(snapshot.path, repository.name, snapshot.commit)


def resolve_tokenizer_folder(options: EngineOptions, reasons: dict[str, str], progress: Progress) -> Path | None:
    """Return the tokenizer's folder, or None if the tokenizer is in the model's folder.

    Raises ValueError if a revision is given for a local folder. Also raises the errors of `find_tokenizer_files`.
    """
    named = options.tokenizer
    if named is None and options.tokenizer_revision is not None:  # another revision of the model's own
        named = options.model.partition("@")[0] if isinstance(options.model, str) else options.model
    repository = _repository("tokenizer", named, "tokenizer_revision", options.tokenizer_revision, options.download_dir)
    if repository is None:
        return None if named is None else Path(named)
    from compiled_engine.models.checkpoint.hub import find_tokenizer_files

    snapshot = find_tokenizer_files(repository, progress)
    reasons["tokenizer"] = f"{repository.name}, the commit of {repository.revision}, {snapshot.origin}"
    return snapshot.path


def resolve_adapter_folder(field: str, named: str | Path, download_dir: str | Path | None, progress: Progress) -> Path:
    """Return an adapter's folder, local or downloaded from the hub.

    field: the option, for errors. named: the option's value. Raises ValueError, or OSError if a download fails.
    """
    repository = _repository(field, named, "revision", None, download_dir)
    if repository is None:
        return Path(named).expanduser()
    from compiled_engine.models.checkpoint.hub import find_adapter

    return find_adapter(repository, progress).path


def local_adapter_folder(named: str | Path) -> Path | None:
    """Return an adapter's local folder; None if `named` is a name on the hub."""
    is_on_hub = isinstance(named, str) and _HUB_NAME.fullmatch(named) is not None and not Path(named).exists()
    return None if is_on_hub else Path(named).expanduser()


def resolve_cache_dir(options: EngineOptions) -> Path | None:
    """Return the folder in which compiled artifacts are kept; None if the option compile_cache is False.

    Raises ValueError if cache_dir is given although compile_cache is False.
    """
    if not options.compile_cache:
        require_defaults(options, "compile_cache is False: nothing would be kept", "cache_dir")
        return None
    return default_root() if options.cache_dir is None else Path(options.cache_dir).expanduser()


def _repository(
    field: str,
    named: str | Path | None,
    revision_field: str,
    revision: str | None,
    download_dir: str | Path | None,
) -> Repository | None:
    """Return the hub repository for `named`, org/name or org/name@revision; None for a local folder and for None.

    A local folder with this name takes precedence. field, revision_field: the options, for errors. Raises ValueError if
    a revision is given for a local folder, or twice.
    """
    match = _HUB_NAME.fullmatch(named) if isinstance(named, str) else None
    is_there = named is not None and Path(named).exists()
    if match is None or is_there:
        if revision is not None:
            raise ValueError(
                f"{revision_field} is {revision!r}, but {field} is {None if named is None else str(named)!r}; "
                f"allowed with {'a name that is no local folder' if match else 'org/name of the Hugging Face Hub'}"
            )
        return None
    if revision is not None and match["revision"] is not None:
        raise ValueError(f"{revision_field} is {revision!r}, but {field} is {named!r}, which names one already")
    from compiled_engine.models.checkpoint.hub import Repository

    cache_dir = None if download_dir is None else Path(download_dir).expanduser()
    return Repository(field, match["name"], revision or match["revision"] or DEFAULT_REVISION, cache_dir)
