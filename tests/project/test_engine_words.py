"""How far features are woven into the engine: lines of the core that name one, and imports from the core to one.

The core is to be read without them. CEILINGS has the counts of today. A change that raises one belongs into the
feature's own files; a change that lowers one lowers the ceiling with it. `python tests/project/test_engine_words.py`
prints the table as the code is, `--lines MODULE` the lines that count.
"""

from __future__ import annotations

import argparse
import io
import re
import tokenize
from collections import Counter, defaultdict
from functools import cache

import pytest
from test_import_directions import imports_of, modules, within

# By feature, the words that its names have, whatever stands around them. Kernels' own masks, memory pools, progress
# that is told in stages and writes that are staged are no features.
WORDS = {
    "speculation": r"draft|eagle|mtp|n_?gram|specul|taps?(?![a-z])|aux_(hidden|layers)|sharpness|accept|verif"
    r"|(?<![a-z])(rests|rested|resting|let_rest|plain|follows?|head(?!_dim|_width))(?![a-z])",
    # The idea in the engine that drafts need, in its own words: they cost a reader as much. Rows at an offset are the
    # core's own idea.
    "several rows": r"numbered|row_numbers|ahead_SK|num_ahead|of_several|several_|rows_of_requests|history_|NO_ROW"
    r"|NOT_TAKEN|taken_R",
    "adapters": r"adapt|lora(?![a-z])|overtak|set_aside",
    "pooling": r"pool(s|ed|er|ing)(?![a-z])|vectors|second_text",
    "masks": r"mask|constrain|grammar|structured",
    "recurrences": r"recurr|snapshot|state_?rows",
    "pipelines": r"(?<![a-z])(lanes?|stages?|micro_?batch(es)?)(?![a-z])|traffic|pipeline",
    "prompt log-probabilities": r"prompt_?logprob",
}
NO_WORDS = (
    r"\btl \.|\bmask (=|&) |begin \+ lane|(\.|def) stage \(|stage_(batch|decodes|empty)|num_stages|compile \. verify"
)
# Modules of features, and packages of such.
FEATURES = (
    "features",
    "parallel.stages",
    "passes.layout.aux_hidden_states",
    "passes.linear.adapters",
    "pooling",
    "recurrence",
    "sampling.token_mask",
)
# Packages whose modules are the core's or a feature's.
PACKAGES = ("engine", "rows", "graphs.cuda_graphs")
# By module of the core: lines that name a feature, and imports from features. Any other module of PACKAGES has none.
CEILINGS: dict[str, tuple[int, int]] = {
    "engine.input_batch": (10, 0),
    "engine.request_states": (8, 0),
    "engine.runner": (2, 0),
    "engine.scheduler": (2, 0),
    "graphs.cuda_graphs.dispatcher": (2, 0),
}


@cache
def lines_of(module: str) -> dict[int, str]:
    """Lines of code by their number: no comments, no docstrings, a space between any two tokens."""
    found: dict[int, list[str]] = defaultdict(list)
    begins_statement = True
    for token in tokenize.generate_tokens(io.StringIO(modules()[module].read_text()).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins_statement = True
        elif token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            if not (begins_statement and token.type == tokenize.STRING):
                found[token.start[0]].append(token.string)
            begins_statement = False
    return {number: " ".join(tokens) for number, tokens in found.items()}


def woven_lines(module: str) -> dict[int, list[str]]:
    """By number of the line, the features that it names."""
    found = {}
    for number, line in lines_of(module).items():
        if not re.search(NO_WORDS, line):
            named = [feature for feature, words in WORDS.items() if re.search(words, line, re.IGNORECASE)]
            found |= {number: named} if named else {}
    return found


def feature_imports(module: str) -> list[str]:
    return sorted(name for name in imports_of(module) if is_feature(name))


def is_feature(module: str) -> bool:
    return any(within(module, feature) for feature in FEATURES)


def core() -> list[str]:
    """The modules that are counted."""
    of_packages = {name for name in modules() if any(within(name, package) for package in PACKAGES)}
    return sorted(CEILINGS.keys() | {name for name in of_packages if not is_feature(name)})


@pytest.mark.parametrize("module", core())
def test_the_core_names_no_more_of_its_features_than_it_did(module: str) -> None:
    assert module in modules(), f"CEILINGS has {module}, which is gone"
    woven = woven_lines(module)
    counts, ceiling = (len(woven), len(feature_imports(module))), CEILINGS.get(module, (0, 0))
    by_feature = Counter(feature for named in woven.values() for feature in named)
    assert counts == ceiling, (
        f"{module} has {counts[0]} lines that name a feature {dict(by_feature)} and {counts[1]} imports of features"
        f" {feature_imports(module)}, CEILINGS say {ceiling}: a higher count belongs into the feature's files, a lower"
        " one into CEILINGS"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", metavar="MODULE", help="print the lines of this module that count")
    if module := parser.parse_args().lines:
        source = modules()[module].read_text().splitlines()
        for number, named in woven_lines(module).items():
            print(f"{number:4} {source[number - 1]}  # {', '.join(named)}")
        return
    found = {name: (len(woven_lines(name)), len(feature_imports(name))) for name in core() if name in modules()}
    for name, counts in found.items():
        if any(counts):
            print(f'    "{name}": {counts},')
    num_lines = sum(len(lines_of(name)) for name in found)
    print(f"{sum(lines for lines, _ in found.values())} of {num_lines} lines in {len(found)} modules,", end=" ")
    print(f"{sum(imports for _, imports in found.values())} imports")


if __name__ == "__main__":
    main()
