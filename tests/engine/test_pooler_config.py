"""How a model pools, as plain data, and what a user may override of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compiled_engine.pooling import CLASSIFY, EMBED, KINDS, NORMALISE, SOFTMAX, Dense, PoolerConfig, Pooling

BIG, SMALL = Dense("1", 64, 32), Dense("2", 32, 8)
OF_TOKENS = Dense("", 64, 1, tokens=(5, 6))  # a reranker's yes and no


@pytest.mark.parametrize(
    ("pooling", "width", "every_token", "labels"),
    [
        (Pooling(EMBED, ("lasttoken",), (), NORMALISE), 64, False, 0),
        (Pooling(EMBED, ("mean",), (), NORMALISE), 64, True, 0),
        (Pooling(EMBED, ("cls",), (), NORMALISE), 64, True, 0),
        (Pooling(EMBED, ("lasttoken", "mean", "max"), (), NORMALISE), 192, True, 0),
        (Pooling(EMBED, ("mean",), (BIG, SMALL), NORMALISE), 8, True, 0),
        (Pooling(CLASSIFY, ("lasttoken",), (BIG,), SOFTMAX, labels=("a", "b", "c")), 32, False, 3),
        (
            Pooling(CLASSIFY, ("lasttoken",), (OF_TOKENS,), SOFTMAX, labels=("a", "b")),
            1,
            False,
            1,
        ),
        (Pooling(CLASSIFY, ("lasttoken",), (), SOFTMAX, labels=("a", "b")), 64, False, 2),
    ],
    ids=str,
)
def test_results(pooling: Pooling, width: int, every_token: bool, labels: int) -> None:
    assert (pooling.width(64), pooling.every_token, pooling.num_labels) == (width, every_token, labels)
    assert (pooling.include_prompt, pooling.lower_case, pooling.dimensions, pooling.own_head) == (
        True,
        False,
        None,
        False,
    )


@pytest.mark.parametrize(
    ("given", "kinds", "activates"),
    [
        ({}, None, None),
        ({"pooling_type": "MEAN"}, ("mean",), None),
        ({"pooling_type": "last"}, ("lasttoken",), None),
        ({"pooling_type": "ALL"}, ("lasttoken",), None),
        ({"pooling_type": "CLS", "seq_pooling_type": "max"}, ("max",), None),
        ({"normalize": False}, None, False),
        ({"use_activation": True}, None, True),
        ({"use_activation": True, "normalize": False}, None, False),
        ({"use_activation": False, "normalize": True}, None, True),
        ({"tok_pooling_type": "ALL", "softmax": True, "dimensions": 1}, None, None),
        *[({"seq_pooling_type": kind}, (kind,), None) for kind in KINDS],
    ],
)
def test_overrides(given: dict[str, Any], kinds: tuple[str, ...] | None, activates: bool | None) -> None:
    made = PoolerConfig.of(given)
    assert (made.kinds, made.activates) == (kinds, activates)
    assert PoolerConfig.of(json.dumps(given)) == made == PoolerConfig(**given)
    assert PoolerConfig.of(made) is made


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("{", ValueError, "pooler_config must be a JSON object, got '{'"),
        ("[1]", TypeError, r"pooler_config must be a mapping or a PoolerConfig, got \[1\]"),
        (5, TypeError, "pooler_config must be a mapping or a PoolerConfig, got 5"),
        ({"normalise": True}, ValueError, "pooler_config has no 'normalise'; allowed: pooling_type, "),
        ({"pooling_type": "sum"}, ValueError, "pooler_config: pooling_type is 'sum'; allowed: cls, mean, last, all"),
        ({"seq_pooling_type": 1}, ValueError, "pooler_config: seq_pooling_type is 1; allowed"),
        ({"tok_pooling_type": "STEP"}, ValueError, "pooler_config: tok_pooling_type is 'STEP'; allowed: ALL"),
        ({"normalize": 1}, TypeError, "pooler_config: normalize is 1; allowed: true, false, null"),
        ({"use_activation": "yes"}, TypeError, "pooler_config: use_activation is 'yes'"),
        ({"softmax": 0}, TypeError, "pooler_config: softmax is 0"),
        ({"dimensions": 0}, ValueError, "pooler_config: dimensions is 0; allowed: an integer of at least 1"),
        ({"dimensions": True}, ValueError, "pooler_config: dimensions is True"),
        ({"dimensions": 8.0}, ValueError, "pooler_config: dimensions is 8.0"),
    ],
)
def test_what_is_no_override(given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        PoolerConfig.of(given)
