"""The usage of a request counts its drafts, if it had any."""

from __future__ import annotations

import msgspec

from compiled_engine.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from compiled_engine.server.protocol import UsageCounter


def output(prompt: str, drafts: tuple[int, int], *, finished: bool) -> RequestOutput:
    """drafts: how many, and how many of them are part of the output."""
    completion = CompletionOutput(0, "abc", [5, 6, 7], None, None, "length" if finished else None, None)
    metrics = RequestMetrics(0.0, num_drafts=1, num_draft_tokens=drafts[0], num_accepted_tokens=drafts[1])
    return RequestOutput(prompt, None, [1, 2], None, [completion], finished, 0, metrics)


def test_drafts_count_once_at_the_end_of_each_prompt() -> None:
    usage = UsageCounter()
    usage.add(0, output("0", (3, 2), finished=False))
    assert "completion_tokens_details" not in msgspec.to_builtins(usage.usage())
    usage.add(0, output("0", (7, 4), finished=True))
    usage.add(1, output("1", (4, 0), finished=True))
    found = msgspec.to_builtins(usage.usage())
    assert found["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 7}
    assert found["completion_tokens"] == 9


def test_requests_without_drafts_have_no_details() -> None:
    usage = UsageCounter()
    usage.add(0, output("0", (0, 0), finished=True))
    assert "completion_tokens_details" not in msgspec.to_builtins(usage.usage())
