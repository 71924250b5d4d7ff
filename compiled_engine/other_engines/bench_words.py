"""Table that translates the options of `vllm bench serve` to options of `compiled-engine bench serve`.

The functions are readers of its rows (see Honoured.read): value is an option's value, given has all options by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from compiled_engine.other_engines.keywords import LEAVE_OUT, Honoured, Rows, only, without_effect

BODY_FIELDS = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
RESULT = "bench_serve.json"


def server_url(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the option `url`, made of the options host and port in `given`."""
    host, port = given.get("host", "127.0.0.1"), given.get("port", 8000)
    return {"url": f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"}


def result_file(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the option `output`, made of the result file's folder and name in `given`.

    Returns {} unless save_result is given.
    """
    if not given.get("save_result", False):
        return {}
    return {"output": str(PurePath(str(given.get("result_dir", ""))) / str(given.get("result_filename", RESULT)))}


def body_fields(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the option `extra_body`: the sampling parameters in `given`, as JSON."""
    return {"extra_body": json.dumps({name: given[name] for name in BODY_FIELDS if name in given})}


BENCH: Rows = {
    "dataset_name": Honoured(
        "random prompts, or `dataset` with JSONL of vLLM's form custom",
        choices={"random": {}, "custom": {}},
    ),
    **dict.fromkeys(
        ("backend", "endpoint_type"),
        Honoured(
            "`endpoint`",
            choices={"vllm": {}, "openai": {}, "openai-chat": {"endpoint": "chat"}},
        ),
    ),
    **dict.fromkeys(("host", "port"), Honoured("`url`", read=server_url)),
    "save_result": Honoured("`output`", read=result_file, switch=True),
    **dict.fromkeys(("result_dir", "result_filename"), Honoured("`output`, with --save-result", read=result_file)),
    **dict.fromkeys(BODY_FIELDS, Honoured("`extra_body`", read=body_fields)),
    "served_model_name": Honoured("`model`", "model"),
    "ready_check_timeout_sec": Honoured("`ready_timeout`", "ready_timeout"),
    "custom_output_len": Honoured("`output_len`", "output_len"),
    "disable_tqdm": Honoured("`quiet`", choices={True: {"quiet": True}, False: {}}, switch=True),
    **only("give --input-len and --output-len uniform:LEAST:MOST", random_range_ratio=(0,)),
    **only("run compiled-engine bench step --profile", profile=False),
    **only(LEAVE_OUT, no_stream=False, use_beam_search=False),
    **only("give --extra-body '{\"logprobs\": 1}'", logprobs=()),
    **only("give --model, an adapter's name", lora_modules=([],)),
    **without_effect("tokenizer tokenizer_mode trust_remote_code?", "the server tokenises"),
    **without_effect("percentile_metrics", "all of these metrics are reported"),
    **without_effect("label metadata* request_id_prefix append_result?"),
}
