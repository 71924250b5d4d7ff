"""The option kv_events_config: vLLM's keys and defaults, errors, and endpoints of replicas."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from plain_config import BASE

from compiled_engine.config import KVEventsConfig, ParallelConfig, effective_fields
from compiled_engine.options import EngineOptions
from compiled_engine.resolve import kv_events
from compiled_engine.resolve.kv_events import resolve_kv_events

ON = {"enable_kv_cache_events": True}


def resolved(given: Any, *, caches_prefixes: bool = True) -> tuple[KVEventsConfig | None, dict[str, str]]:
    reasons: dict[str, str] = {}
    return resolve_kv_events(EngineOptions(kv_events_config=given), caches_prefixes, reasons), reasons


@pytest.mark.parametrize("given", [None, {}, "{}"])
def test_nothing_is_published_by_default(given: Any) -> None:
    assert resolved(given) == (None, {})


@pytest.mark.parametrize("given", [ON, '{"enable_kv_cache_events": true}', {**ON, "publisher": None}])
def test_defaults_are_those_of_vllm(given: Any) -> None:
    assert resolved(given) == (KVEventsConfig("tcp://*:5557", None, "", 10_000, 100_000, 100_000), {})


def test_every_key_is_taken() -> None:
    given = {
        **ON,
        "publisher": "zmq",
        "endpoint": "tcp://router:5557",
        "replay_endpoint": "tcp://*:5558",
        "buffer_steps": 3,
        "hwm": 4,
        "max_queue_size": 5,
        "topic": "kv@pod@model",
    }
    config, _ = resolved(given)
    assert config == KVEventsConfig("tcp://router:5557", "tcp://*:5558", "kv@pod@model", 3, 4, 5)


@pytest.mark.parametrize(
    ("given", "caches_prefixes", "reason"),
    [
        ({"endpoint": "tcp://*:1"}, True, "kv_events_config['enable_kv_cache_events'] is not True"),
        ({**ON, "publisher": "null"}, True, "kv_events_config['publisher'] is 'null'"),
        (ON, False, "there is no prefix cache"),
    ],
)
def test_a_configuration_that_publishes_nothing_is_told(
    given: Any, caches_prefixes: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolved(given, caches_prefixes=caches_prefixes) == (None, {"kv_events": reason})
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable": True}, "kv_events_config has no key 'enable'"),
        ({**ON, "publisher": "nats"}, r"\['publisher'\] is 'nats'; allowed: zmq, null"),
        ({**ON, "endpoint": "localhost:5557"}, r"\['endpoint'\] is 'localhost:5557'; allowed: tcp://host:port"),
        ({**ON, "endpoint": "tcp://*"}, r"\['endpoint'\] is 'tcp://\*'; allowed: tcp://host:port"),
        ({**ON, "buffer_steps": 0}, r"\['buffer_steps'\] is 0; allowed: an integer from 1"),
        ("{", "kv_events_config is '{'; allowed: a dict as JSON"),
    ],
)
def test_a_wrong_value_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(given)


def test_the_package_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"python -m pip install 'compiled-engine\[events\]'"):
        resolved(ON)
    assert resolved(None) == (None, {})


@pytest.mark.parametrize(
    ("endpoint", "of_second"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::]:5557", "tcp://[::]:5559"),
        ("inproc://events", "inproc://events_dp2"),
        ("ipc:///tmp/events", "ipc:///tmp/events_dp2"),
    ],
)
def test_replicas_have_endpoints_of_their_own(endpoint: str, of_second: str) -> None:
    events = KVEventsConfig(endpoint, endpoint, "", 1, 1, 1)
    config = replace(BASE, kv_events=events, parallel=ParallelConfig(1, "in_process", 3))
    assert config.of_replica(0).kv_events == events
    assert config.of_replica(2).kv_events == replace(
        events, endpoint=of_second, replay_endpoint=of_second, data_parallel_rank=2
    )


def test_events_change_nothing_that_is_computed() -> None:
    events = KVEventsConfig("tcp://*:5557", None, "", 1, 1, 1)
    assert effective_fields(replace(BASE, kv_events=events)) == effective_fields(BASE)
