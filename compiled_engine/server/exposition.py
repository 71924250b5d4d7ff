"""/metrics: engine and server metrics in the Prometheus text format."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from compiled_engine.frontend.metric_list import PREFIX
from compiled_engine.server.metrics import HISTOGRAMS, PROMPT_TOKENS
from compiled_engine.server.serving import Serving, serving_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Engine metric -> name after the prefix, and help text. Metrics that vLLM also has carry vLLM's name.
GAUGES = {
    "running": ("num_requests_running", "Completions that run."),
    "waiting": ("num_requests_waiting", "Completions that wait."),
    "kv_usage": ("kv_cache_usage_perc", "Share of the KV cache's blocks that is held, 0 to 1."),
    "resting": ("spec_decode_num_requests_resting", "Completions that run and have no drafts of a head any more."),
    "paused": ("paused", "1 while the engine is paused."),
    "image_cache_rows": ("encoder_cache_tokens", "Embeddings of images that the device has memory for."),
    "image_cache_rows_used": ("encoder_cache_tokens_used", "Embeddings of images on the device."),
    "clip_slots": ("clip_slots", "Clips that the device has memory for."),
    "clip_slots_used": ("clip_slots_used", "Clips on the device."),
    "api_processes": ("api_processes", "Processes that answer requests."),
    "kv_offload_blocks": ("kv_offload_blocks", "Blocks in host memory."),
    "kv_offload_slots": ("kv_offload_slots", "Blocks that host memory has room for."),
    "kv_offload_states": ("kv_offload_states", "Snapshots of recurrent states in host memory."),
    "kv_offload_state_slots": ("kv_offload_state_slots", "Snapshots that host memory has room for."),
    "kv_offload_files": ("kv_offload_files", "Blocks and snapshots that have files."),
    "kv_offload_writing": ("kv_offload_writing", "Files that are being written."),
    "blocks_total": ("kv_cache_blocks", "Blocks of the KV cache."),
    "graph_bytes_used": ("graph_memory_bytes", "Memory of the CUDA graphs."),
    "graph_bytes_predicted": ("graph_memory_predicted_bytes", "Memory of the CUDA graphs as predicted."),
    "capture_seconds": ("graph_capture_seconds", "Time that capturing took."),
    "start_s": ("engine_start_seconds", "Time that the engine core took to start."),
}
COUNTERS = {
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found there."),
    "generated_tokens": ("generation_tokens", "Tokens generated, as they come."),
    "preemptions": ("num_preemptions", "Completions that lost their blocks and were computed again."),
    "steps": ("num_steps", "Steps of the engine."),
    "traces": ("num_traces", "Models traced; 0 after a warm start."),
    "compiles": ("num_compiles", "Pieces compiled; 0 after a warm start."),
    "captures": ("num_graph_captures", "CUDA graphs captured."),
    "recordings": ("num_recordings", "Lists of calls recorded on a CPU."),
    "recorded_replays": ("num_recorded_replays", "Replays of such lists."),
    "grammar_requests": ("grammar_requests", "Completions with a grammar."),
    "grammar_compiles": ("grammar_compiles", "Grammars compiled."),
    "grammar_failures": ("grammar_failures", "Grammars that could not be compiled."),
    "grammar_cache_hits": ("grammar_cache_hits", "Grammars that were compiled already."),
    "grammar_compile_s": ("grammar_compile_seconds", "Time that compiling them took, in parallel with the steps."),
    "graph_padded_tokens": ("graph_padded_tokens", "Tokens that replays computed for nothing."),
    "drafted_requests": ("spec_decode_num_drafts", "Verified drafts of a completion in a step, of any length."),
    "draft_tokens": ("spec_decode_num_draft_tokens", "Tokens of these."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Those of them that were right."),
    "kv_offload_saved": ("kv_offload_saved_blocks", "Blocks copied to host memory."),
    "kv_offload_loaded": ("kv_offload_loaded_blocks", "Blocks copied back for a request."),
    "kv_offload_written": ("kv_offload_written_blocks", "Blocks written to files."),
    "kv_offload_read": ("kv_offload_read_blocks", "Blocks read from files."),
    "kv_offload_saved_states": ("kv_offload_saved_states", "Snapshots of recurrent states copied to host memory."),
    "kv_offload_loaded_states": ("kv_offload_loaded_states", "Snapshots copied back for a request."),
    "kv_offload_read_states": ("kv_offload_read_states", "Snapshots read from files."),
    "kv_offload_store_bytes": ("kv_offload_store_bytes", "Bytes that a rank has copied to host memory."),
    "kv_offload_load_bytes": ("kv_offload_load_bytes", "Bytes that a rank has copied back."),
    "kv_offload_file_errors": ("kv_offload_file_errors", "Files that could not be written or read."),
    "kv_offload_queries": ("external_prefix_cache_queries", "Tokens that the KV cache lacked, of admitted requests."),
    "kv_offload_hits": ("external_prefix_cache_hits", "Those of them that came from host memory."),
    "kv_event_batches": ("kv_event_batches", "Batches of KV events published."),
    "kv_events": ("kv_events", "Events in these."),
    "kv_event_batches_dropped": ("kv_event_batches_dropped", "Batches not published, as too many waited."),
    "weight_updates": ("weight_updates", "Updates of the weights while the engine runs."),
    "images": ("images", "Images of completions."),
    "image_cache_hits": ("encoder_cache_hits", "Images of completions whose embeddings were on the device."),
    "tower_images": ("encoder_images", "Images whose embeddings a vision tower has computed."),
    "tower_embeddings": ("encoder_tokens", "Embeddings that it has computed."),
    "tower_runs": ("encoder_runs", "Steps with a run of the vision tower."),
    "tower_seconds": ("encoder_seconds", "Time of these runs, on the device."),
    "clips": ("clips", "Clips of completions."),
    "clip_cache_hits": ("clip_cache_hits", "Clips of completions whose keys and values were on the device."),
    "clips_encoded": ("encoded_clips", "Clips that the encoder has encoded."),
    "rested": ("spec_decode_num_requests_rested", "Completions that ceased to have drafts of a head."),
}
# Metrics with a label: name, label, help text.
LABELLED = {
    "graph_replays_by_key": ("graph_replays", "key", "Replays of CUDA graphs."),
    "graph_fallbacks_by_reason": ("graph_fallbacks", "reason", "Batches that ran without a CUDA graph, and why."),
    "accepted_by_position": (
        "spec_decode_num_accepted_tokens_per_pos",
        "position",
        "Right draft tokens, by their position in the draft, from 0.",
    ),
    "draft_lengths": ("spec_decode_num_steps", "num_drafts", "Steps with a chosen number of drafts, by that number."),
    "adapter_requests": ("adapter_requests", "adapter", "Completions that named an adapter."),
}
LABELLED_GAUGES = {
    "waiting_by_reason": ("num_requests_waiting_by_reason", "reason", "Completions that wait, by what they wait for."),
    "draft_sharpness_shares": (
        "spec_decode_draft_sharpness_acceptance_rate",
        "sharpness",
        "Share of first drafts that are right, by the factor on the logits of a head.",
    ),
    "draft_length_chosen": (
        "spec_decode_chosen_num_drafts",
        "batch_size",
        "The number of drafts that yields most tokens in a second.",
    ),
    "adapter_requests_running": ("adapter_requests_running", "adapter", "Completions of an adapter that run."),
    "adapter_requests_waiting": ("adapter_requests_waiting", "adapter", "Completions of an adapter that wait."),
}
# Labels of vLLM's adapter metric.
LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")

# Totals over several replicas.
FOR_REPLICAS = {
    "requests_queued": ("requests_queued", "Completions that wait for room at a replica.", GaugeMetricFamily),
    "requests_rerun": ("requests_rerun", "Completions that went on when their replica died.", CounterMetricFamily),
}
# Metrics of each replica, with the label "replica".
OF_REPLICAS = {
    "lives": ("replica_up", "Whether the replica takes requests.", GaugeMetricFamily),
    "running": ("replica_requests_running", "Completions that run there.", GaugeMetricFamily),
    "waiting": ("replica_requests_waiting", "Completions that wait there.", GaugeMetricFamily),
    "kv_usage": ("replica_kv_cache_usage_perc", "Share of its KV cache's blocks that is held.", GaugeMetricFamily),
    "generated_tokens": ("replica_generation_tokens", "Tokens generated there.", CounterMetricFamily),
    "prefix_hits": ("replica_prefix_cache_hits", "Prompt tokens found in its prefix cache.", CounterMetricFamily),
}

# Metrics that vLLM also has, by name after the prefix.
VLLM_PREFIX = "vllm:"
OF_VLLM = {
    *HISTOGRAMS,
    *PROMPT_TOKENS,
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
    *("prefix_cache_queries", "prefix_cache_hits", "generation_tokens", "request_success"),
    *("external_prefix_cache_queries", "external_prefix_cache_hits"),
    *("kv_offload_store_bytes", "kv_offload_load_bytes"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("spec_decode_num_accepted_tokens_per_pos", "lora_requests_info", "mm_cache_queries", "mm_cache_hits"),
}


async def metrics(request: Request) -> Response:
    """Handle GET /metrics."""
    serving = serving_of(request)
    return Response(exposition(serving, await serving.engine.metrics()), headers={"content-type": CONTENT_TYPE})


def exposition(serving: Serving, engine: Mapping[str, Any]) -> bytes:
    """Return all metrics as text. `engine` is the result of `AsyncLLM.metrics`."""
    labels = {"model_name": serving.names[0]}
    if "adapter_requests" in engine:  # drop adapters that lost their name
        counts = {name: count for name, count in engine["adapter_requests"].items() if serving.adapters.get(name)}
        engine = {**engine, "adapter_requests": counts}
    families = [*engine_families(engine, labels), *serving.metrics.collect(labels), *_admission(serving)]
    if serving.options.vllm_metric_names:
        families += _as_vllm(families)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


def engine_families(engine: Mapping[str, Any], labels: Mapping[str, str]) -> list[Metric]:
    """Return the engine's metrics, each sample with `labels`. `engine` is the result of `AsyncLLM.metrics`.

    A metric that `engine` lacks has no samples, except compile_cache and weights.
    """
    names, values = list(labels), list(labels.values())
    families: list[Metric] = []
    for key, (name, text) in {**GAUGES, **COUNTERS}.items():
        make = GaugeMetricFamily if key in GAUGES else CounterMetricFamily
        family: GaugeMetricFamily | CounterMetricFamily = make(PREFIX + name, text, labels=names)
        if key in engine:
            family.add_metric(values, engine[key])
        families.append(family)
    for key, (name, label, text) in {**LABELLED, **LABELLED_GAUGES}.items():
        make = GaugeMetricFamily if key in LABELLED_GAUGES else CounterMetricFamily
        labelled = make(PREFIX + name, text, labels=[*names, label])
        for value, count in engine.get(key, {}).items():
            labelled.add_metric([*values, value], count)
        families.append(labelled)
    families += [*_of_chosen_drafts(engine, labels), *_of_replicas(engine, labels), _lora_requests_info(engine)]
    matches = GaugeMetricFamily(PREFIX + "pass_matches", "Matches of FX passes.", labels=[*names, "range", "pass"])
    for compile_range, passes in engine.get("passes", {}).items():
        for name, counts in passes.items():
            matches.add_metric([*values, compile_range, name], counts["matches"])
    stages = GaugeMetricFamily(PREFIX + "start_up_seconds", "Stages of the start.", labels=[*names, "stage"])
    for stage, seconds in engine.get("start_up_seconds", {}).items():
        stages.add_metric([*values, stage], seconds)
    cache = InfoMetricFamily(PREFIX + "compile_cache", "Whether the compiled model came from the cache.", labels=names)
    cache.add_metric(values, {"status": str(engine.get("cache", "off")), "why": str(engine.get("cache_why", ""))})
    weights = InfoMetricFamily(PREFIX + "weights", "The version of the weights.", labels=names)
    weights.add_metric(values, {"version": str(engine.get("weight_version") or "")})
    return [*families, matches, stages, cache, weights]


def _of_chosen_drafts(engine: Mapping[str, Any], labels: Mapping[str, str]) -> list[Metric]:
    """Return the metrics by which the engine chooses the number of drafts and the scale of their logits (sharpness).

    If both are fixed, the metrics have no samples.
    """
    values = list(labels.values())
    text = "Newest share of right drafts among those whose predecessors are right, by position, from 0."
    shares = GaugeMetricFamily(PREFIX + "spec_decode_acceptance_rate_per_pos", text, labels=[*labels, "position"])
    for position, share in enumerate(engine.get("draft_shares", ())):
        shares.add_metric([*values, str(position)], share)
    text = "Mean time of a step by number of requests, rounded up to a power of 2, and of drafts."
    steps = GaugeMetricFamily(PREFIX + "spec_decode_step_seconds", text, labels=[*labels, "batch_size", "num_drafts"])
    for size, times in engine.get("draft_step_ms", {}).items():
        for num_drafts, milliseconds in times.items():
            steps.add_metric([*values, size, num_drafts], milliseconds / 1e3)
    text = "The factor on the logits of a head with which most drafts are right: 1."
    sharpness = GaugeMetricFamily(PREFIX + "spec_decode_draft_sharpness", text, labels=[*labels, "sharpness"])
    if "draft_sharpness" in engine:
        sharpness.add_metric([*values, engine["draft_sharpness"]], 1)
    return [shares, steps, sharpness]


def _lora_requests_info(engine: Mapping[str, Any]) -> Metric:
    """Return a metric whose labels name the running and waiting adapters. As in vLLM, its value is the Unix time."""
    family = GaugeMetricFamily(PREFIX + "lora_requests_info", "Adapters that run and wait.", labels=LORA_LABELS)
    if "max_adapters" in engine:
        states = (engine[f"adapter_requests_{state}"] for state in ("running", "waiting"))
        family.add_metric([str(engine["max_adapters"]), *(",".join(sorted(names)) for names in states)], time.time())
    return family


def _as_vllm(families: Iterable[Metric]) -> list[Metric]:
    """Return copies of the metrics that vLLM also has, with vLLM's prefix and its label "engine"."""
    copies = []
    for family in families:
        if family.name.removeprefix(PREFIX) in OF_VLLM:
            copy = Metric(VLLM_PREFIX + family.name.removeprefix(PREFIX), family.documentation, family.type)
            copy.samples = [
                sample._replace(
                    name=VLLM_PREFIX + sample.name.removeprefix(PREFIX), labels={"engine": "0", **sample.labels}
                )
                for sample in family.samples
            ]
            copies.append(copy)
    return copies


def _of_replicas(engine: Mapping[str, Any], labels: Mapping[str, str]) -> list[Metric]:
    """Return the metrics of the replicas. They have no samples with a single engine core."""
    families: list[Metric] = []
    for key, (name, text, make) in FOR_REPLICAS.items():
        family = make(PREFIX + name, text, labels=list(labels))
        if key in engine:
            family.add_metric(list(labels.values()), engine[key])
        families.append(family)
    for key, (name, text, make) in OF_REPLICAS.items():
        family = make(PREFIX + name, text, labels=[*labels, "replica"])
        for replica in engine.get("replicas", ()):
            if key in replica:
                family.add_metric([*labels.values(), str(replica["replica"])], replica[key])
        families.append(family)
    return families


def _admission(serving: Serving) -> list[Metric]:
    return [
        GaugeMetricFamily(PREFIX + "completions_in_flight", "Completions that the server has taken on.",
                          value=serving.admission.in_flight),
        CounterMetricFamily(PREFIX + "busy_refusals", "Requests refused because the server was busy.",
                            value=serving.admission.refused),
    ]  # fmt: skip


class _Families:
    """A Prometheus collector that returns the given metrics."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
