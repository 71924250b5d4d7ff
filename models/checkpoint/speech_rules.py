"""Reads the rules by which a speech model transcribes, such as its special tokens, from generation_config.json."""

from __future__ import annotations

from pathlib import Path

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.speech import SpeechRules

FILE = "generation_config.json"
REQUIRED = ("decoder_start_token_id", "no_timestamps_token_id")
EOS = "eos_token_id"


def read_speech_rules(folder: Path, longest: int) -> SpeechRules | None:
    """Return the rules in the checkpoint's folder; None if generation_config.json or a required token id is missing.

    Also returns None if there is not exactly one token that ends a text.

    longest: the most tokens, of the prompt and the generated text together, that the engine accepts. Raises ValueError
    for a damaged file, and for a field of another type.
    """
    path = folder / FILE
    fields = JsonFields.from_file(path) if path.is_file() else JsonFields(str(path), {})
    start, no_timestamps = (fields.token_id(name) for name in REQUIRED)
    # transformers writes a number, or a list for several.
    eos = fields.token_ids(EOS) if isinstance(fields.values.get(EOS), list) else (fields.token_id(EOS),)
    if start is None or no_timestamps is None or len(eos) != 1 or eos[0] is None:
        return None
    return SpeechRules(
        start=start,
        no_timestamps=no_timestamps,
        eos=eos[0],
        most_tokens=min(fields.integer("max_length", longest), longest),
        languages={name.strip("<|>"): token for name, token in _named(fields, "lang_to_id").items()},
        tasks=_named(fields, "task_to_id"),
        suppressed=fields.token_ids("suppress_tokens"),
        suppressed_first=fields.token_ids("begin_suppress_tokens"),
        before_context=fields.token_id("prev_sot_token_id"),
        latest_first=fields.token_id("max_initial_timestamp_index"),
    )


def _named(fields: JsonFields, name: str) -> dict[str, int]:
    """Return the field `name`, a JSON object whose values are token ids; {} if the field is missing or null."""
    section = fields.section(name)
    return {each: token for each in section.values if (token := section.token_id(each)) is not None}
