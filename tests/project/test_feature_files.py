"""The files that know a feature, besides its folder: the last column of the table in docs/features.md.

Not counted are options and their resolution, the cache key, reports, passes, readers of checkpoints, the server, the
command line, measurements, and the two registries. `python tests/project/test_feature_files.py` prints the files.
"""

from __future__ import annotations

import re

import pytest
from folders import REPOSITORY
from test_engine_words import lines_of
from test_import_directions import imports_of, modules, within

# By feature: what lines of code that name it contain, and its own modules. Lines have a space between any two tokens.
FEATURES = {
    "prompt log-probabilities": ("prompt_?logprob", ("features.prompt_logprobs",)),
    "recurrences": ("recurr", ("features.recurrence", "recurrence")),
    "pipelines": (
        r"pipeline(?!d)|micro_?batch|StageLink|StagePlan|stages_of|for_stage|stage : int|stage \. is_",
        ("features.pipeline", "parallel.stages", "graphs.compiler.stage_plan"),
    ),
    "adapters": (r"adapter|adapted_|lora(?![a-z])", ("features.adapters",)),
    "images": (r"images?(?![a-z])", ("features.images", "models.vision", "vision")),
    "angles by length": (r"(length|by)_?angles|angle_?lengths|angles_?by_?length|first_length", ("features.angles",)),
    "pooling": (
        r"pooling|pooler|pools(?![a-z])|second_text",
        ("features.pooling", "pooling", "models.textbook.pooler"),
    ),
    "speech": (r"speech|audio|CLIPS?(?![a-z])|hoist", ("features.speech", "speech")),
    "token masks": (
        r"token_?masks?(?![a-z])|StepMasks|Masks \(",
        ("sampling.token_mask", "features.structured"),
    ),
    "structured outputs": (
        r"structured_outputs|features \. structured|grammar",
        ("features.structured", "sampling.structured_outputs"),
    ),
    "sleep": (r"sleep(s|_mode|ing)?(?![a-z])(?! \()|wake_up", ("features.sleep",)),
    "rank calls": (r"rank_calls|calls_on_ranks|call_on_ranks|collective_rpc", ("features.rank_calls",)),
    "KV events": ("kv_?events?(?![a-z])", ("features.kv_events",)),
    "KV offload": ("kv_offload|host_blocks", ("features.kv_offload",)),
    "weight updates": (r"weight_(update|version)|update_calls", ("features.weight_updates",)),
    "speculation": (
        r"draft|eagle|mtp|specul|aux_(hidden|layers)|reads_hidden|sharpness|model \. head(?![a-z_])",
        ("features.speculation", "models.textbook.eagle3", "models.textbook.mtp"),
    ),
}
NOT_COUNTED = (
    *("options", "config", "schema", "resolve", "graphs.cache", "graphs.inspection", "other_engines"),
    *("passes", "models.checkpoint", "models.foreign", "models.bundled", "models.vision"),
    *("server", "cli", "bench", "tune", "features.registry", "features.request_registry"),
    *("sampling.params", "sampling.other_params"),
    *("attention.backends", "attention.case", "recurrence"),  # kernels, for any request with several rows
)


def files_that_know(feature: str) -> set[str]:
    """Return paths below the package of the modules outside a feature that import it or name it."""
    words, own = FEATURES[feature]
    found = set()
    for module in modules():
        if not any(within(module, each) for each in (*own, *NOT_COUNTED)):
            named = any(re.search(words, line, re.IGNORECASE) for line in lines_of(module).values())
            if named or any(within(name, each) for name in imports_of(module) for each in own):
                found.add(f"{module.replace('.', '/') or '__init__'}.py")
    return found


def told(feature: str) -> tuple[int, set[str]]:
    """Return the number and the files in the feature's row of docs/features.md."""
    page = (REPOSITORY / "docs/features.md").read_text()
    (row,) = re.findall(rf"^\| {feature} \| (\d+): (.*) \|$", page, re.MULTILINE)
    return int(row[0]), set(re.findall(r"`([\w/]+\.py)`", row[1]))


@pytest.mark.parametrize("feature", FEATURES)
def test_the_page_names_the_files_that_know_a_feature(feature: str) -> None:
    """A change that adds one needs a reason; most features should need four at most."""
    found = files_that_know(feature)
    number, named = told(feature)
    assert named == found, f"more than docs/features.md says: {found - named}; fewer: {named - found}"
    assert number == len(found)


def main() -> None:
    for feature in FEATURES:
        found = sorted(files_that_know(feature))
        print(f"{feature}: {len(found)}: {', '.join(found)}")


if __name__ == "__main__":
    main()
