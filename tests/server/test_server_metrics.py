"""What /metrics says, and that dashboard and documentation name what there is."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import httpx
import pytest
from folders import REPOSITORY
from prometheus_client.parser import text_string_to_metric_families
from running_server import MODEL, RunningServer

from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server.adapter_names import AdapterNames
from compiled_engine.server.exposition import exposition
from compiled_engine.server.metrics import HISTOGRAMS, Histogram, ServerMetrics
from compiled_engine.server.shared_figures import SharedFigures

DOCS = REPOSITORY / "docs"


def samples(server: RunningServer, **headers: str) -> dict[str, float]:
    """Name of a sample, with its labels but for the model's name -> value."""
    response = httpx.get(f"{server.url}/metrics", headers=headers, timeout=30)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(response.text)


def parsed(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "model_name"]
            found[",".join([sample.name, *labels])] = sample.value
    return found


def test_requests_are_counted(server: RunningServer) -> None:
    before = samples(server)
    for stream in (False, True):
        asked = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "n": 1, "ignore_eos": True, "stream": stream}
        httpx.post(f"{server.url}/v1/completions", json=asked, timeout=30)
    httpx.post(f"{server.url}/v1/completions", json={"prompt": []}, timeout=30)
    after = samples(server)

    def grown(name: str) -> float:
        name = f"compiled_engine:{name}"
        return after[name] - before.get(name, 0)

    assert grown("prompt_tokens_total") == 6
    assert grown("generation_tokens_total") == 8
    assert grown("request_success_total,finished_reason=length") == 2
    assert grown("request_success_total,finished_reason=abort") == 0
    assert grown("time_to_first_token_seconds_count") == 2
    assert 2 <= grown("inter_token_latency_seconds_count") <= 6  # tokens that come together are one interval
    assert grown("e2e_request_latency_seconds_count") == 2
    assert grown("request_generation_tokens_bucket,le=5.0") == 2
    assert grown("request_generation_tokens_bucket,le=2.0") == 0
    assert grown("http_responses_total,route=/v1/completions,status=200") == 2
    assert grown("http_responses_total,route=/v1/completions,status=400") == 1
    assert grown("num_steps_total") >= 8
    assert after["compiled_engine:num_requests_running"] == 0


def test_what_is_asked_for_does_not_become_a_label(server: RunningServer) -> None:
    httpx.get(f"{server.url}/some/where", timeout=60)
    assert samples(server)["compiled_engine:http_responses_total,route=other,status=404"] >= 1
    assert not any("some/where" in name for name in samples(server))


def test_a_histogram_counts_up_to_its_borders() -> None:
    histogram = Histogram((1, 2), SharedFigures())
    for value, times in ((0.5, 1), (1, 2), (1.5, 1), (7, 1)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1.0", 3.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == 0.5 + 2 + 1.5 + 7


def observed(figures: SharedFigures) -> ServerMetrics:
    """Metrics of one request whose times are all different."""
    metrics = ServerMetrics(figures, ["/"])
    request = metrics.request(SamplingParams(n=2, max_tokens=30))
    times = RequestMetrics(0.0, 1.0, 3.0, 11.0, 16.0, num_generation_tokens=14)
    completions = [CompletionOutput(index, "", [5] * (14 - index), None, None, "stop", None) for index in range(2)]
    request.output(RequestOutput("0", None, [1] * 17, None, completions, True, 8, times))
    request.end()
    return metrics


OBSERVED = {
    "time_to_first_token_seconds": 3,
    "inter_token_latency_seconds": 13,  # one for each of the 13 tokens after the first
    "request_time_per_output_token_seconds": 1,
    "e2e_request_latency_seconds": 16,
    "request_queue_time_seconds": 1,
    "request_inference_time_seconds": 15,
    "request_prefill_time_seconds": 2,
    "request_decode_time_seconds": 8,
    "request_prompt_tokens": 17,
    "request_generation_tokens": 27,
    "request_params_n": 2,
    "request_params_max_tokens": 30,
}


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_each_histogram_has_its_own_figure(name: str) -> None:
    histogram = observed(SharedFigures()).histograms[name]
    assert histogram.sum == pytest.approx(OBSERVED[name])
    assert histogram.buckets()[-1][1] == (13 if name == "inter_token_latency_seconds" else 1)


def test_each_count_has_its_own_figure() -> None:
    metrics = observed(SharedFigures())
    assert metrics.tokens.totals() == {"prompt_tokens": 17, "prompt_tokens_cached": 8}
    assert metrics.finish_reasons.totals() == {"stop": 2, "length": 0, "error": 0, "abort": 0}


@pytest.mark.parametrize("name", ["grafana_dashboard.json", "metrics.md"])
def test_names_in_dashboard_and_documentation_exist(server: RunningServer, name: str) -> None:
    text = (DOCS / name).read_text()
    if name.endswith(".json"):
        json.loads(text)
    response = httpx.get(f"{server.url}/metrics", timeout=30).text
    there = set(re.findall(r"^# TYPE (compiled_engine:\w+)", response, re.MULTILINE))
    there |= {family + end for family in there for end in ("_bucket", "_sum", "_count")}
    named = set(re.findall(r"compiled_engine:\w+", text))
    assert len(named) > 20
    assert named <= there


def test_the_dashboard_shows_what_the_compiler_did() -> None:
    names = ("compile_cache_info", "pass_matches", "graph_replays_total", "graph_padded_tokens_total")
    names += ("graph_fallbacks_total", "start_up_seconds", "num_compiles_total", "api_processes")
    text = (DOCS / "grafana_dashboard.json").read_text()
    assert [name for name in names if f"compiled_engine:{name}" not in text] == []


def test_figures_of_vllm_under_its_names_too(server: RunningServer) -> None:
    """With equal values; without the option there are none."""
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    assert not any(name.startswith("vllm:") for name in samples(server))
    engine = {"running": 3, "kv_usage": 0.25, "prefix_hits": 7, "generated_tokens": 11}
    engine |= {"drafted_requests": 4, "draft_tokens": 8, "accepted_tokens": 5, "accepted_by_position": {"0": 3, "1": 2}}
    both = replace(server.serving, options=replace(server.serving.options, vllm_metric_names=True))
    found = parsed(exposition(both, engine).decode())
    copies = [name for name in found if name.startswith("vllm:")]
    for name in copies:
        own, *labels = name.replace("vllm:", "compiled_engine:", 1).split(",")
        assert found[name] == found[",".join([own, *(label for label in labels if label != "engine=0")])]
    assert found["vllm:num_requests_running,engine=0"] == 3
    assert found["vllm:prefix_cache_hits_total,engine=0"] == 7
    assert found["vllm:spec_decode_num_accepted_tokens_total,engine=0"] == 5
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total,engine=0,position=1"] == 2
    assert found["vllm:e2e_request_latency_seconds_count,engine=0"] >= 1
    assert found["vllm:request_success_total,engine=0,finished_reason=length"] >= 1


def test_adapters_are_named_in_labels(server: RunningServer) -> None:
    """Names that no adapter has any more are not."""
    options = replace(server.serving.options, vllm_metric_names=True)
    both = replace(server.serving, options=options, adapters=AdapterNames([LoRARequest("sql", 1, "/sql")]))
    counts = {"sql": 5} | {f"gone {i}": 1 for i in range(40)}
    engine = {"max_adapters": 2, "adapter_requests": counts, "adapter_requests_running": {"sql": 2, "code": 1}}
    found = parsed(exposition(both, engine | {"adapter_requests_waiting": {"law": 3}}).decode())
    own = {name.partition(",")[0].removeprefix("compiled_engine:"): name for name in found}
    assert "adapter=sql" in own["adapter_requests_total"]
    assert found[own["adapter_requests_total"]] == 5
    assert not any("gone" in name for name in found)
    assert "adapter=law" in own["adapter_requests_waiting"]
    (info,) = (name for name in found if name.startswith("vllm:lora_requests_info"))
    for label in ("max_lora=2", "running_lora_adapters=code", "waiting_lora_adapters=law"):
        assert label in info
    assert not any("lora_requests_info" in name for name in parsed(exposition(both, {}).decode()))


def test_every_metric_is_documented(server: RunningServer) -> None:
    response = httpx.get(f"{server.url}/metrics", timeout=30).text
    there = set(re.findall(r"^# TYPE (compiled_engine:\w+)", response, re.MULTILINE))
    text = (DOCS / "metrics.md").read_text()
    assert [name for name in sorted(there) if f"`{name}`" not in text] == []
