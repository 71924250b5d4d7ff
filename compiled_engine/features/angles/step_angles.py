"""Stores, for each request, the length in tokens from which the rotary angles of its first tokens are computed."""

from __future__ import annotations

from compiled_engine.attention.inputs import FIRST_LENGTH
from compiled_engine.config import LengthAngles
from compiled_engine.engine.messages import NewRequest
from compiled_engine.engine.step_hooks import StepFeature
from compiled_engine.rows.row_fields import RowField, RowFields


class StepAngles(StepFeature):
    """Stores each request's angle length in its row of the field FIRST_LENGTH on the device.

    The forward's input ANGLE_LENGTHS is computed from this field, see attention/inputs.py.
    """

    def __init__(self, angles: LengthAngles, fields: RowFields) -> None:
        self._recomputes, self._fields = angles.recomputes, fields
        fields.declare(RowField(FIRST_LENGTH))

    def added(self, row: int, request: NewRequest) -> None:
        """Set the angle length to the number of all known tokens (LongRoPE) or of the prompt's tokens (dynamic NTK).

        See features/angles/plan.py for these two kinds of angles.
        """
        length = len(request.token_ids) if self._recomputes else request.num_prompt_tokens
        self._fields.set(row, **{FIRST_LENGTH: length})
