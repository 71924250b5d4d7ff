"""Reads the rules by which a speech model transcribes, such as its special tokens, from generation_config.json."""

from __future__ import annotations

from pathlib import Path

from compiled_engine.models.checkpoint.json_fields import JsonFields
from compiled_engine.speech import SpeechRules

FILE = "generation_config.json"
REQUIRED = ("decoder_start_token_id", "no_timestamps_token_id", "eos_token_id")


def read_speech_rules(folder: Path, longest: int) -> SpeechRules | None:
    """Return the rules in the checkpoint's folder; None if generation_config.json or a required token id is missing.

    longest: the most tokens, of the prompt and the generated text together, that the engine accepts. Raises ValueError
    for a damaged file.
    """
    path = folder / FILE
    values = JsonFields.from_file(path).values if path.is_file() else {}
    if not all(isinstance(values.get(name), int) for name in REQUIRED):
        return None
    languages = values.get("lang_to_id") or {}
    return SpeechRules(
        start=values["decoder_start_token_id"],
        no_timestamps=values["no_timestamps_token_id"],
        eos=values["eos_token_id"],
        most_tokens=min(int(values.get("max_length") or longest), longest),
        languages={name.strip("<|>"): token for name, token in languages.items()},
        tasks=values.get("task_to_id") or {},
        suppressed=tuple(values.get("suppress_tokens") or ()),
        suppressed_first=tuple(values.get("begin_suppress_tokens") or ()),
        before_context=values.get("prev_sot_token_id"),
        latest_first=values.get("max_initial_timestamp_index"),
    )
