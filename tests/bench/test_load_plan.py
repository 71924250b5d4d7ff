"""What a load test sends, and when: lengths, arrivals, prompts, datasets, and what is refused before it begins."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.bench.serving.client import Job, Outgoing
from compiled_engine.bench.serving.figures import parse_goodput
from compiled_engine.bench.serving.load import shared_out
from compiled_engine.bench.serving.requests import (
    RandomPrompts,
    Rate,
    arrival_times,
    longest,
    parse_lengths,
    parse_ramp,
    parse_rates,
    read_dataset,
)
from compiled_engine.bench.serving.target import parse_target


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("text", "least", "most", "median"),
    [
        ("7", 7, 7, 7),
        ("uniform:1:9", 1, 9, 5),
        ("normal:50:10:20:60", 20, 60, 50),
        ("lognormal:100:1:10:1000", 10, 1000, 100),
    ],
)
def test_lengths_have_their_distribution_and_bounds(text: str, least: int, most: int, median: int) -> None:
    drawn = parse_lengths("input_len", text).draw(generator(), 4000)
    assert (min(drawn), max(drawn)) == (least, most)
    assert np.median(drawn) == pytest.approx(median, rel=0.06)
    assert drawn == parse_lengths("input_len", text).draw(generator(), 4000)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "uniform", "uniform:5", "uniform:5:4", "uniform:0:4", "uniform:1:2:3", "normal:1:2",
     "normal:1:-2:1:9", "normal:nan:2:1:9", "lognormal:0:1:1:9", "poisson:3"],
)  # fmt: skip
def test_wrong_lengths_name_the_option(text: str) -> None:
    with pytest.raises(ValueError, match=r"^output_len is '.*'; allowed: a number of tokens, or uniform:LEAST:MOST"):
        parse_lengths("output_len", text)


@given(
    count=st.integers(1, 50),
    rate=st.floats(0.1, 1000),
    burstiness=st.floats(0.2, 20),
    seed=st.integers(0, 9),
)
def test_arrivals_rise_and_keep_their_rate(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrival_times(count, rate, burstiness, None, generator(seed))
    assert len(times) == count
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / rate)


def test_gaps_have_the_asked_burstiness() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff(arrival_times(20_000, 10.0, burstiness, None, generator()))
        assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


@pytest.mark.parametrize(("text", "middle"), [("1:9", 5.0), ("exponential:1:9", 3.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(text: str, middle: float) -> None:
    ramp = parse_ramp(text)
    assert [ramp.rate_at(place) for place in (0, 0.5, 1)] == pytest.approx([1, middle, 9])
    times = arrival_times(3000, math.inf, 1.0, ramp, generator())
    first, last = (np.diff(times)[part].mean() for part in (slice(0, 100), slice(-100, None)))
    assert first / last == pytest.approx(9, rel=0.35)
    assert str(ramp) == text


def test_all_at_once_is_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, None, generator()) == [0, 0, 0]


def test_rates_may_be_lists_and_shares() -> None:
    assert parse_rates(["inf,50%", "2"]) == [Rate(math.inf), Rate(0.5, is_share=True), Rate(2)]


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan", "inf%", "", "1,,2", "50%", "50%,inf"])
def test_wrong_rates_say_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"^request_rate is .*; allowed: "):
        parse_rates([text])


@pytest.mark.parametrize("text", ["5", "1:2:3", "0:4", "1:inf", "exponential:0:1", "linear:1:2"])
def test_wrong_ramps_say_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"^ramp is .*; allowed: START:END"):
        parse_ramp(text)


def test_goodput_takes_both_ways_of_writing() -> None:
    assert parse_goodput(["ttft=200,tpot:20", "e2el=5e3"]) == {"ttft": 200, "tpot": 20, "e2el": 5000}
    for wrong in ("ttft", "ttft=0", "ttft=x", "itl=5", "speed=1"):
        with pytest.raises(ValueError, match=r"^goodput is .*; allowed: ttft=MS"):
            parse_goodput([wrong])


def test_groups_of_random_prompts_begin_alike() -> None:
    lengths = parse_lengths("input_len", "uniform:3:5")
    prompts = RandomPrompts(lengths, parse_lengths("output_len", "8"), 10, 2, 50)
    requests = prompts.requests("completions", 6, generator())
    assert [len(request.prompt) - 10 in (3, 4, 5) for request in requests] == [True] * 6
    assert len({tuple(request.prompt[:10]) for request in requests}) == 2
    assert len({tuple(request.prompt[10:]) for request in requests}) == 6
    assert all(0 <= token < 50 for request in requests for token in request.prompt)
    assert longest(requests) == max(len(request.prompt) for request in requests) + 8
    chats = prompts.requests("chat", 6, generator())
    assert {len(request.prompt[0]["content"].split()) for request in chats} <= {13, 14, 15}
    assert chats == prompts.requests("chat", 6, generator())


def test_datasets_hold_prompts_and_conversations(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    messages = [{"role": "user", "content": "b"}]
    lines = [{"prompt": "a", "output_tokens": 3}, {"messages": messages, "prompt": [4, 5], "more": 1}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    drawn = parse_lengths("output_len", "9")
    texts = read_dataset(path, "completions", 3, drawn, generator())
    assert [(each.prompt, each.output_len) for each in texts] == [("a", 3), ([4, 5], 9), ("a", 3)]
    chats = read_dataset(path, "chat", None, drawn, generator())
    assert [each.prompt for each in chats] == [[{"role": "user", "content": "a"}], messages]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("{", "line 1"),
        ('{"prompt": "a"}\n[]', "line 2"),
        ('{"prompt": ""}', "line 1 has no prompt"),
        ('{"prompt": "a", "output_len": 0}', "line 1: the output length is 0"),
        ('{"prompt": {}}', "line 1"),
    ],
)
def test_a_wrong_dataset_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^dataset is '.*lines.jsonl'.*{message}"):
        read_dataset(path, "completions", None, parse_lengths("output_len", "9"), generator())


@given(requests=st.integers(1, 20), concurrency=st.none() | st.integers(4, 30), processes=st.integers(1, 4))
def test_senders_share_requests_and_concurrency(requests: int, concurrency: int | None, processes: int) -> None:
    job = Job(
        parse_target("http://h", None, []), "chat", [Outgoing(i, i, b"{}") for i in range(requests)], concurrency, 1.0
    )
    parts = shared_out(job, processes)
    assert sorted(request.index for part in parts for request in part.requests) == list(range(requests))
    shares = [part.concurrency for part in parts]
    assert shares == [None] * processes if concurrency is None else sum(shares) == concurrency and min(shares) >= 1


def test_a_target_has_path_and_headers() -> None:
    target = parse_target("https://host/base/v1/", "key", ["X-Tier=a=b"])
    assert target.url == "https://host:443/base/v1"
    assert target.request("/completions", b"{}").startswith(b"POST /base/v1/completions HTTP/1.1\r\nhost: host\r\n")
    assert {"authorization": "Bearer key", "x-tier": "a=b"}.items() <= dict(target.headers).items()
    for url in ("ftp://host", "http://", "http://host:x"):
        with pytest.raises(ValueError, match=r"^url is"):
            parse_target(url, None, [])
    with pytest.raises(ValueError, match=r"^api_key is"):
        parse_target("host", "a\nb", [])
    for header in ("x", "=y", "a=b\r\nc: d"):
        with pytest.raises(ValueError, match=r"^header is"):
            parse_target("host", None, [header])
