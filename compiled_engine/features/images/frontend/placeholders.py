"""Replace the placeholders of images in a prompt by tokens, and find the positions of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

Runs = tuple[tuple[int, int], ...]
"""(first position, number of positions) of embeddings, ascending."""


class TextTokens(Protocol):
    """A tokenizer, see frontend/tokenizer.py."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]: ...


def expanded(
    token_ids: Sequence[int],
    placeholder: int,
    replacements: Sequence[Sequence[int]],
    special_ids: frozenset[int] = frozenset(),
    tokenizer: TextTokens | None = None,
) -> tuple[int, ...]:
    """Return a prompt in which each placeholder token is replaced by the tokens of its image, in order.

    replacements: the tokens for each image. A replacement may begin and end with text, such as line ends, which a
    tokenizer joins with the text beside it. With `tokenizer`, such text is tokenised again. special_ids: ids of the
    tokens that are not text.

    Raises ValueError unless there are as many placeholders as replacements.
    """
    if (found := list(token_ids).count(placeholder)) != len(replacements):
        raise ValueError(f"the prompt has {found} placeholders for {len(replacements)} images; allowed: one for each")
    if not replacements:
        return tuple(token_ids)
    # The prompt as pieces; at each of their ends two tokenised texts meet.
    pieces: list[list[int]] = [[]]
    left = iter(replacements)
    for token_id in token_ids:
        if token_id == placeholder:
            pieces += [list(next(left)), []]
        else:
            pieces[-1].append(token_id)
    if tokenizer is None or not _meet_as_text(replacements, special_ids):
        return tuple(token_id for piece in pieces for token_id in piece)
    return _joined(pieces, special_ids, tokenizer)


def _meet_as_text(replacements: Sequence[Sequence[int]], special_ids: frozenset[int]) -> bool:
    return any(ids and (ids[0] not in special_ids or ids[-1] not in special_ids) for ids in replacements)


def _joined(pieces: Sequence[Sequence[int]], special_ids: frozenset[int], tokenizer: TextTokens) -> tuple[int, ...]:
    """Return the token ids of all pieces as one list. Text that spans several pieces is tokenised again.

    Such text keeps its tokens if tokenising any piece's part of it alone would not return the tokens of that part.
    """
    marked = [(token_id, number) for number, piece in enumerate(pieces) for token_id in piece]
    joined: list[int] = []
    for is_special, group in groupby(marked, lambda each: each[0] in special_ids):
        run = list(group)
        ids = [token_id for token_id, _ in run]
        if not is_special and run[0][1] != run[-1][1]:
            before = joined[-1:]
            parts = [[token_id for token_id, _ in part] for _, part in groupby(run, lambda each: each[1])]
            if all(_encoded(before, tokenizer.decode(part), tokenizer) == part for part in parts):
                ids = _encoded(before, tokenizer.decode(ids), tokenizer)
        joined += ids
    return tuple(joined)


def _encoded(before: Sequence[int], text: str, tokenizer: TextTokens) -> list[int]:
    """Return the tokens of `text`. before: the special token in front of it, or empty."""
    return tokenizer.encode_parts([*before, text])[len(before) :]


def runs_of_images(token_ids: Sequence[int], image_token: int, counts: Sequence[int]) -> list[Runs]:
    """Return the positions of each image's embeddings in a prompt, as runs.

    counts: the number of embeddings of each image, in the order of the images in the prompt. Raises ValueError unless
    their sum is the number of `image_token` in the prompt.
    """
    places = [place for place, token_id in enumerate(token_ids) if token_id == image_token]
    if len(places) != sum(counts):
        raise ValueError(
            f"the prompt has {len(places)} positions for embeddings of images, and the images have {sum(counts)}"
        )
    begin, found = 0, []
    for length in counts:
        found.append(_runs(places[begin : begin + length]))
        begin += length
    return found


def _runs(places: Sequence[int]) -> Runs:
    runs: list[tuple[int, int]] = []
    for _, group in groupby(enumerate(places), lambda each: each[1] - each[0]):
        consecutive = [place for _, place in group]
        runs.append((consecutive[0], len(consecutive)))
    return tuple(runs)
