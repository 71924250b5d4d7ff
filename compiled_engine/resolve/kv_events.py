"""Resolve the option kv_events_config, which has vLLM's keys, or raise an error that says what is allowed."""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from typing import Any

from compiled_engine.config import KVEventsConfig
from compiled_engine.options import EngineOptions
from compiled_engine.schema import SWITCH, Kind, integer, one_of, read_mapping, require, text, unknown_name_message

log = logging.getLogger("compiled_engine")

NAME = "kv_events_config"
ZMQ, NULL = "zmq", "null"
ENABLED, PUBLISHER = "enable_kv_cache_events", "publisher"
_MOST = (1 << 31) - 2
_ENDPOINT = Kind(
    require(
        "tcp://host:port, with * for all hosts, ipc://path or inproc://name",
        lambda value: isinstance(value, str),
        lambda value: re.fullmatch(r"tcp://\S+:([1-9]\d{0,4})|(ipc|inproc)://\S+", value) is not None,
    ),
    {"type": "string"},
)
KEYS = {
    ENABLED: SWITCH,
    PUBLISHER: one_of(ZMQ, NULL),
    "endpoint": _ENDPOINT,
    "replay_endpoint": _ENDPOINT,
    "buffer_steps": integer(1, _MOST),
    "hwm": integer(0, _MOST),
    "max_queue_size": integer(1, _MOST),
    "topic": text(may_be_empty=True),
}


def resolve_kv_events(options: EngineOptions, caches_prefixes: bool, reasons: dict[str, str]) -> KVEventsConfig | None:
    """Return how events of the prefix cache are published; None if they are not.

    If the option is given but no events are published, the reason is added to `reasons` and logged as a warning. Raises
    TypeError or ValueError with the key, its value and what is allowed, and ValueError if pyzmq is not installed.
    """
    given = {name: value for name, value in read_mapping(NAME, options.kv_events_config).items() if value is not None}
    for name, value in given.items():
        if name not in KEYS:
            message = unknown_name_message(f"{NAME} has no key", str(name), KEYS)
            raise ValueError(f"{message}; allowed: {', '.join(KEYS)}")
        KEYS[name].check(f"{NAME}[{name!r}]", value)
    if given and (obstacle := _obstacle(given, caches_prefixes)):
        reasons["kv_events"] = obstacle
        log.warning("no KV events are published: %s", obstacle)
        return None
    if not given:
        return None
    if find_spec("zmq") is None:
        raise ValueError(
            f"{NAME} is given, but the package pyzmq is not installed: "
            "python -m pip install 'compiled-engine[events]'; allowed without it: None"
        )
    return KVEventsConfig(
        endpoint=given.get("endpoint", "tcp://*:5557"),
        replay_endpoint=given.get("replay_endpoint"),
        topic=given.get("topic", ""),
        buffer_steps=given.get("buffer_steps", 10_000),
        hwm=given.get("hwm", 100_000),
        max_queued=given.get("max_queue_size", 100_000),
    )


def _obstacle(given: dict[str, Any], caches_prefixes: bool) -> str:
    if not given.get(ENABLED, False):
        return f"{NAME}[{ENABLED!r}] is not True"
    if given.get(PUBLISHER, ZMQ) == NULL:
        return f"{NAME}[{PUBLISHER!r}] is {NULL!r}"
    return "" if caches_prefixes else "there is no prefix cache"
