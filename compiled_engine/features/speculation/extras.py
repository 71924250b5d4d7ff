"""Defines the counts of verified drafts, which the extras of a step's result and of outputs contain."""

from __future__ import annotations

from typing import NamedTuple

VERIFIED_DRAFTS = "verified_drafts"
"""The name of the extras that are VerifiedDrafts."""


class VerifiedDrafts(NamedTuple):
    """The number of drafts of a request that a step has verified, and the number that were right.

    The step yields the right drafts and one more token.
    """

    number: int = 0
    right: int = 0
