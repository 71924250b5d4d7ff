"""The drafts that a step has verified, in the extras of its result and of outputs: plain data for both sides."""

from __future__ import annotations

from typing import NamedTuple

VERIFIED_DRAFTS = "verified_drafts"
"""The name of the extras that are VerifiedDrafts."""


class VerifiedDrafts(NamedTuple):
    """The drafts of a request that a step has verified: how many there were, and how many were right. All tokens of the
    step but the last are right drafts."""

    number: int = 0
    right: int = 0
