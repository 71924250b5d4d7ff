"""Where the second of two texts begins, for models whose embedding tells the two apart."""

from __future__ import annotations

from compiled_engine.attention.inputs import NO_SECOND_TEXT, SECOND_TEXT
from compiled_engine.messages import NewRequest
from compiled_engine.rows.row_fields import RowField, RowFields
from compiled_engine.runner.hooks import StepFeature


class TokenTypes(StepFeature):
    """Keeps the row field that the step tensor of token types is computed from, see attention/inputs.py."""

    name = "token_types"

    def __init__(self, fields: RowFields) -> None:
        self._fields = fields
        fields.declare(RowField(SECOND_TEXT, initial=NO_SECOND_TEXT))

    def added(self, row: int, request: NewRequest) -> None:
        if (before := request.extras.get(self.name)) is not None:
            self._fields.set(row, **{SECOND_TEXT: before})
