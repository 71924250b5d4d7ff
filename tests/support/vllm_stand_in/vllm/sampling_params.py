"""See the package."""

StructuredOutputsParams = None
