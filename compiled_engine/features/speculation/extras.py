"""Defines the counts of verified drafts. A step's result and outputs have them for each request.

They are under the name VERIFIED_DRAFTS in RunnerOutput.columns, StepOutputs.columns and EngineOutput.extras.
"""

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
