"""Find or download checkpoints of the Hugging Face Hub: from `org/name` to a folder in huggingface_hub's cache.

Files in the cache are used without contacting the hub. Missing files are downloaded, but only configs, tokenizer files
and safetensors files. Small files are downloaded first; weights are downloaded when they are about to be loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, get_token, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from tqdm import tqdm

from compiled_engine.models.checkpoint.adapter_files import CONFIG_FILE, MOST_BYTES, WEIGHTS_FILE
from compiled_engine.models.checkpoint.file_names import name_some
from compiled_engine.models.checkpoint.image_processor import SETTINGS_FILE, WHOLE_FILE
from compiled_engine.models.checkpoint.pooling_folder import POOLING_FILES
from compiled_engine.models.checkpoint.quantisation_config import SETTINGS
from compiled_engine.models.checkpoint.safetensors_files import (
    DTYPES,
    INDEX,
    SINGLE,
    find_shards,
    indexed_files,
    weight_map,
)
from compiled_engine.process.progress import Advance, Progress

# Vocabulary files are downloaded last: if the cache has one of them, it has all other tokenizer files.
VOCABULARY_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "tokenizer.json")
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "merges.txt",
    *VOCABULARY_FILES,
)
CONFIG = "config.json"
PROCESSOR_FILES = (SETTINGS_FILE, WHOLE_FILE)  # of images
MODEL_FILES = (
    *(CONFIG, "generation_config.json", INDEX),
    *(*SETTINGS, *POOLING_FILES, *PROCESSOR_FILES, *TOKENIZER_FILES),
)
# Files of modules after the transformer in sentence-transformers' layout; their weights are small.
_OF_MODULES = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")


@dataclass(frozen=True)
class Repository:
    """A repository of the hub, as named by the user's options."""

    field: str  # option that names it, for errors
    name: str
    revision: str  # branch, tag or commit
    cache_dir: Path | None  # None: huggingface_hub's default


@dataclass(frozen=True)
class Snapshot:
    """A snapshot: the folder in huggingface_hub's cache that holds the files of one commit of a repository."""

    path: Path
    origin: str  # source of the files, in words

    @property
    def commit(self) -> str:
        return self.path.name


def find_checkpoint(repository: Repository, progress: Progress, *, with_weights: bool) -> Snapshot:
    """Return a snapshot that holds configs and tokenizer, downloaded if necessary.

    with_weights: whether weights must be in the snapshot or at least in the repository; they are not downloaded.

    Raises ValueError for an unknown repository or revision, or one without a readable checkpoint; PermissionError for a
    gated repository or refused access; FileNotFoundError if files are missing in the cache while HF_HUB_OFFLINE is set;
    ConnectionError if the hub cannot be reached.
    """
    cached = _cached(repository, CONFIG)
    lacking = _lacking(repository, cached, with_weights)
    if cached and not lacking and _has_vocabulary(cached):
        return Snapshot(cached, "from the cache of huggingface_hub")
    try:
        with _errors_in_words(repository, lacking):
            listed = _list_files(repository)
            if CONFIG not in listed:
                raise ValueError(f"{_named(repository)}, which has no {CONFIG}: it is no checkpoint that can be read")
            if with_weights:
                _weight_files(repository, listed, cached)
            folder = _download_first(repository, CONFIG)
            names = [name for name in listed if _OF_MODULES.fullmatch(name)]
            _download(repository, folder, [*names, *(n for n in MODEL_FILES if n in listed)], listed, progress)
    except (ConnectionError, FileNotFoundError):
        if cached and not lacking:  # a repository without a tokenizer
            return Snapshot(cached, "from the cache of huggingface_hub")
        raise
    return Snapshot(folder, f"from {constants.ENDPOINT}")


def find_tokenizer_files(repository: Repository, progress: Progress) -> Snapshot:
    """Return a snapshot with a tokenizer, downloaded if necessary. Raises the errors of `find_checkpoint`."""
    for name in VOCABULARY_FILES:
        if cached := _cached(repository, name):
            return Snapshot(cached, "from the cache of huggingface_hub")
    with _errors_in_words(repository, "its tokenizer"):
        listed = _list_files(repository)
        names = [name for name in TOKENIZER_FILES if name in listed]
        if not names:
            raise ValueError(f"{_named(repository)}, which has none of {', '.join(TOKENIZER_FILES)}")
        folder = _download_first(repository, names[0])
        _download(repository, folder, names, listed, progress)
    return Snapshot(folder, f"from {constants.ENDPOINT}")


def find_adapter(repository: Repository, progress: Progress) -> Snapshot:
    """Return a snapshot with the two files of a LoRA adapter, downloaded if necessary.

    Raises the errors of `find_checkpoint`, and ValueError for weights above the limit of adapter files.
    """
    if all(_cached(repository, name) for name in (CONFIG_FILE, WEIGHTS_FILE)):
        folder = _cached(repository, WEIGHTS_FILE)
        assert folder is not None
        return Snapshot(folder, "from the cache of huggingface_hub")
    with _errors_in_words(repository, "its adapter"):
        listed = _list_files(repository)
        if missing := [name for name in (CONFIG_FILE, WEIGHTS_FILE) if name not in listed]:
            raise ValueError(f"{_named(repository)}, which has no {missing[0]}; allowed: an adapter as safetensors")
        if (size := listed[WEIGHTS_FILE]) > MOST_BYTES:
            raise ValueError(f"{_named(repository)}, whose {WEIGHTS_FILE} has {size:,} bytes; allowed: {MOST_BYTES:,}")
        folder = _download_first(repository, CONFIG_FILE)
        _download(repository, folder, [WEIGHTS_FILE], listed, progress)
    return Snapshot(folder, f"from {constants.ENDPOINT}")


def has_weights(folder: Path) -> bool:
    """Return whether a snapshot's folder has all weights of the checkpoint."""
    return not _weights_problem(folder)


def download_weights(name: str, folder: Path, progress: Progress) -> None:
    """Download missing weights into a snapshot that `find_checkpoint` returned.

    name: the repository's name. folder: the snapshot's folder. Raises the errors of `find_checkpoint`.
    """
    if has_weights(folder):
        return
    repository = Repository("model", name, folder.name, folder.parents[2])
    with _errors_in_words(repository, _weights_problem(folder)):
        listed = _list_files(repository)
        _download(repository, folder, _weight_files(repository, listed, folder), listed, progress)


def describe_weights(
    name: str, folder: Path, choose: Callable[[Collection[str]], Collection[str]]
) -> dict[str, torch.Tensor]:
    """Return a snapshot's weights as meta tensors by name, from the headers of the safetensors files on the hub.

    name: the repository's name. folder: the snapshot's folder. choose: selects tensor names from all names of the
    index; only the headers of the files with these tensors are read, and all their tensors are returned. Without an
    index the headers of all files are read. Raises the errors of `find_checkpoint`.
    """
    repository = Repository("model", name, folder.name, folder.parents[2])
    found: dict[str, torch.Tensor] = {}
    with _errors_in_words(repository, _weights_problem(folder)):
        files = _weight_files(repository, _list_files(repository), folder)
        if (folder / INDEX).is_file():
            file_of = weight_map(folder)
            files = sorted({file_of[each] for each in choose(file_of)})
        for file in files:
            try:
                header = HfApi().parse_safetensors_file_metadata(name, file, revision=folder.name)
            except SafetensorsParsingError as error:
                raise ValueError(f"{_named(repository)}, whose {file} is damaged: {error}") from error
            for each, info in header.tensors.items():  # dtypes without a name here are those of packed codes
                dtype = DTYPES.get(info.dtype, torch.uint8)
                found[each] = torch.empty(info.shape, dtype=dtype, device="meta")
    return found


def _cached(repository: Repository, file: str) -> Path | None:
    """Return the snapshot folder of the repository's revision if the cache has `file` in it; None otherwise."""
    with _errors_in_words(repository, ""):
        path = try_to_load_from_cache(repository.name, file, repository.cache_dir, repository.revision)
    return Path(path).parent if isinstance(path, str) else None


def _lacking(repository: Repository, cached: Path | None, with_weights: bool) -> str:
    """Return a text that names what the cache lacks: the revision or, if with_weights, weights.

    Returns "" if the cache lacks neither. cached: the snapshot folder with the revision's config; None if the cache
    does not have it.
    """
    if cached is None:
        return f"revision {repository.revision}"
    return _weights_problem(cached) if with_weights else ""


def _weights_problem(folder: Path) -> str:
    """Return a text that names the weight files that a snapshot's folder lacks; "" if no weights are missing."""
    if (folder / INDEX).is_file():
        return name_some([name for name in indexed_files(folder) if not (folder / name).is_file()])
    try:
        shards = find_shards(folder)
    except ValueError:
        return "its weights"
    # Without the index, the number of shards is unknown.
    return INDEX if any("-of-" in shard.name for shard in shards) else ""


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARY_FILES)


def _list_files(repository: Repository) -> dict[str, int]:
    """Return the files of the repository's revision on the hub, with their sizes in bytes."""
    info = HfApi().model_info(
        repository.name,
        revision=repository.revision,
        files_metadata=True,
        timeout=constants.HF_HUB_ETAG_TIMEOUT,
    )
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _weight_files(repository: Repository, listed: dict[str, int], folder: Path | None) -> list[str]:
    """Return the names of the checkpoint's safetensors files.

    These are the files that the index in `folder` names, the single file model.safetensors, or else all files that end
    in .safetensors. Files in other formats or in subfolders are skipped: they hold the same weights again.

    listed: the repository's files. folder: the snapshot's folder, None if there is none. Raises ValueError if there are
    no such files, or if the index names files that are missing.
    """
    if INDEX in listed and folder is not None and (folder / INDEX).is_file():
        names = indexed_files(folder)
    elif SINGLE in listed and INDEX not in listed:
        names = [SINGLE]
    else:
        names = [name for name in listed if name.endswith(".safetensors") and "/" not in name]
    absent = [name for name in names if name not in listed]
    if absent:
        raise ValueError(f"{_named(repository)}, whose {INDEX} names files that it does not have: {name_some(absent)}")
    if not names:
        others = [name for name in listed if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
        raise ValueError(
            f"{_named(repository)}, which has no *.safetensors files"
            f"{f', only {name_some(others)}' if others else ''}; choose a repository or a revision that has them"
        )
    return names


def _download_first(repository: Repository, name: str) -> Path:
    """Download one file of the repository's revision. Returns the snapshot's folder.

    The file is requested by the revision's name instead of the commit's, so that the cache maps that name to the
    commit.
    """
    path = hf_hub_download(
        repository.name,
        name,
        revision=repository.revision,
        cache_dir=repository.cache_dir,
        tqdm_class=_report_to(lambda count: None),
    )
    return Path(path).parent


def _download(
    repository: Repository, folder: Path, names: Sequence[str], listed: dict[str, int], progress: Progress
) -> None:
    """Download files that the snapshot lacks, one by one; huggingface_hub parallelises within a large file.

    folder: the snapshot's folder. names: the files that it should have. listed: sizes of the repository's files in
    bytes.
    """
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return
    total = sum(listed[name] for name in missing)
    with progress.stage(f"download {repository.name}", total, in_bytes=True) as advance:
        for name in missing:
            hf_hub_download(
                repository.name,
                name,
                revision=folder.name,
                cache_dir=repository.cache_dir,
                tqdm_class=_report_to(advance),
            )


def _report_to(advance: Advance) -> type[tqdm]:
    """Return a progress bar class for huggingface_hub that draws nothing and reports bytes to `advance`."""

    class Reporter(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            advance(int(n or 0))

        # Chunked transfers report bytes twice, received and written. Without these methods they need a second bar.
        def update_transfer(self, n: float | None = 1) -> None:
            pass

        def set_transfer_postfix_str(self, *args: Any, **settings: Any) -> None:
            pass

    return Reporter


def _named(repository: Repository) -> str:
    """Return the beginning of an error message: the user's option, the repository that it names, and the hub."""
    return f"{repository.field} is {repository.name!r} on {constants.ENDPOINT}"


@contextmanager
def _errors_in_words(repository: Repository, lacking: str) -> Iterator[None]:
    """Convert errors of huggingface_hub that are raised within a `with` block.

    The new errors are those of `find_checkpoint`. Their messages are one line that says what is wrong and what to do.
    lacking: names what the cache lacks, for the messages.
    """
    name, hub = repository.name, constants.ENDPOINT
    start = f"{repository.field} is {name!r}, which is no local folder"
    lacks = f"the cache {repository.cache_dir or constants.HF_HUB_CACHE} lacks {lacking}"
    log_in = "set HF_TOKEN or run `hf auth login`"
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{start} and no name of a repository: {error}") from error
    except GatedRepoError as error:
        access = "no token was found" if get_token() is None else "the token that was found has no access"
        raise PermissionError(
            f"{start}; the repository on {hub} is gated, and {access}: accept its terms at {hub}/{name}, then {log_in}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{start} and was not found on {hub}; if it is private there, {log_in}") from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"revision of {repository.field} is {repository.revision!r}, which {name!r} does not have on {hub}; "
            "allowed: a branch, a tag or a commit"
        ) from error
    except OfflineModeIsEnabled as error:
        raise FileNotFoundError(
            f"{start}; {lacks}, and HF_HUB_OFFLINE forbids downloads: unset it, or fill the cache where there is a "
            "network"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        answer = f"{status} {error.server_message or error.response.reason_phrase}"
        if status in (401, 403):
            raise PermissionError(f"{start}; {hub} refuses access ({answer}): {log_in}") from error
        raise ConnectionError(f"{start}; {lacks}, and {hub} answers {answer}: try again later") from error
    except (HTTPError, OSError) as error:
        raise ConnectionError(
            f"{start}; {lacks}, and the download from {hub} failed: {error.__cause__ or error}. Files that are "
            "complete are kept: start again when the cause is fixed"
        ) from error
