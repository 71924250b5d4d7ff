"""The text that the bundled model is trained on: the Python source of a standard library, split by file."""

from __future__ import annotations

import hashlib
import tokenize
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_BYTES = 100_000
VALIDATION_SHARE = 0.02
MIN_DOCUMENT_CHARACTERS = 200

# No part of the library, generated tables, prose in string literals, Python 2, deliberately odd input files.
EXCLUDED_FOLDERS = frozenset(
    {
        "site-packages",
        "lib-dynload",
        "__pycache__",
        "encodings",
        "pydoc_data",
        "idle_test",
        "data",
        "encoded_modules",
    }
)
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "bad_")


@dataclass(frozen=True)
class Document:
    """A source file: its path relative to the corpus folder in POSIX form, and its text."""

    path: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Disjoint documents: to train on, to pick the best checkpoint by, and to report the loss of."""

    name: str
    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def documents(self) -> tuple[Document, ...]:
        return self.train + self.validation + self.held_out

    def digest(self) -> str:
        """sha256 over all paths and texts: equal digests mean the same corpus and the same split."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.path}\0{document.text}\0".encode())
        return digest.hexdigest()


def join(documents: tuple[Document, ...]) -> str:
    """The documents as one text, each followed by END_OF_TEXT."""
    return "".join(document.text + END_OF_TEXT for document in documents)


def read_corpus(folder: Path, name: str) -> Corpus:
    """Read every usable .py file under `folder` and split the files; `name` is what the corpus is called.

    Files are ordered by the sha256 of their relative path, so the split depends on names and sizes alone. The
    first small ones are held out: three quarters to all of HELD_OUT_BYTES, or of a twentieth of the corpus if
    that is less. The next are for validation. What does not decode, is nearly empty or repeated is left out.

    Raises:
        ValueError: `folder` is not a directory, or holds too little Python source to be split.
    """
    if not folder.is_dir():
        raise ValueError(f"corpus must be a folder with Python source, got {str(folder)!r}")
    documents = _read_documents(folder)
    total = sum(document.num_bytes for document in documents)
    quarter = min(HELD_OUT_BYTES, total // 20) // 4
    held_out = _take([document for document in documents if document.num_bytes <= quarter], 3 * quarter)
    rest = [document for document in documents if document not in held_out]
    validation = _take(rest, int(VALIDATION_SHARE * total))
    train = rest[len(validation) :]
    if not (held_out and validation and train):
        raise ValueError(
            f"corpus must be large enough to split, got {len(documents)} usable .py files in {str(folder)!r}"
        )
    return Corpus(name, tuple(train), tuple(validation), tuple(held_out))


def _take(documents: list[Document], enough_bytes: int) -> list[Document]:
    """The shortest prefix of `documents` that has `enough_bytes`, or all of them."""
    taken = 0
    for count, document in enumerate(documents, start=1):
        taken += document.num_bytes
        if taken >= enough_bytes:
            return documents[:count]
    return documents


def _read_documents(folder: Path) -> list[Document]:
    """All usable files in hash order, the first of several with the same text."""
    paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    wanted = sorted((path.as_posix() for path in paths if not _is_excluded(path)), key=_path_hash)
    unique: dict[str, Document] = {}
    for path in wanted:
        text = _read_text(folder / path)
        if text is not None and len(text) >= MIN_DOCUMENT_CHARACTERS and END_OF_TEXT not in text:
            unique.setdefault(text, Document(path, text))
    return list(unique.values())


def _is_excluded(path: Path) -> bool:
    return any(part in EXCLUDED_FOLDERS or part.startswith(EXCLUDED_PREFIXES) for part in path.parts)


def _path_hash(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


def _read_text(path: Path) -> str | None:
    """The file's text in the encoding that it declares, newlines as \\n; None if it is not text."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return None
