"""Features in the frontend: what they add to a request, with several of them and with none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from compiled_engine.engine.messages import RequestLimits, prefix_root
from compiled_engine.frontend.input_processor import InputProcessor
from compiled_engine.frontend.prompts import parse_prompts
from compiled_engine.frontend.request_hooks import NO_PART, RequestFeature, RequestPart
from compiled_engine.sampling.params import SamplingParams


class Noted(RequestFeature):
    """Gives the requests that have a note its length and the note; refuses greedy requests."""

    def __init__(self, name: str, argument: str) -> None:
        self.name, self.argument = name, argument

    def check(self, params: SamplingParams) -> None:
        if params.temperature == 0:
            raise ValueError("temperature must be above 0, got 0")

    def parts(self, params: Sequence[SamplingParams], given: Mapping[str, Any]) -> Sequence[RequestPart]:
        notes: Sequence[str | None] | None = given.get(self.argument)
        if notes is None:
            return ()
        return [
            NO_PART if note is None else RequestPart({self.name: len(note)}, {self.name: note}, note, {"prompt": note})
            for note in notes
        ]


def process(*features: RequestFeature, params: SamplingParams | None = None, **given: Any) -> list[Any]:
    processor = InputProcessor(None, RequestLimits(100, 50, 50), frozenset(), features=features)
    return processor.process(parse_prompts([[1], [2], [3]]), params or SamplingParams(detokenize=False), **given)


def test_requests_have_the_parts_of_the_features_that_they_use() -> None:
    one, other = Noted("one", "notes"), Noted("other", "marks")
    for features in ((one,), (one, other)):
        requests = process(*features, notes=["abc", None, "d"])
        assert [request.engine_requests[0].extras for request in requests] == [{"one": 3}, {}, {"one": 1}]
        assert [request.given for request in requests] == ["abc", None, "d"]
        assert [dict(request.output) for request in requests] == [{"prompt": "abc"}, {}, {"prompt": "d"}]
        roots = [request.engine_requests[0].prefix_root for request in requests]
        assert roots == [prefix_root(one="abc"), prefix_root(), prefix_root(one="d")]
    both = process(one, other, notes=["abc", None, "d"], marks=[None, None, "xy"])
    assert [request.engine_requests[0].extras for request in both] == [{"one": 3}, {}, {"one": 1, "other": 2}]
    assert both[2].engine_requests[0].prefix_root == prefix_root(one="d", other="xy")


@pytest.mark.parametrize("features", [(), (Noted("one", "notes"),)])
def test_requests_without_features_are_plain(features: Sequence[RequestFeature]) -> None:
    for request in process(*features):
        assert request.engine_requests[0].extras == {}
        assert (request.given, dict(request.output)) == (None, {})


def test_a_feature_refuses_parameters_by_name() -> None:
    with pytest.raises(ValueError, match="sampling_params: temperature must be above 0, got 0"):
        process(Noted("one", "notes"), params=SamplingParams(temperature=0, detokenize=False))
