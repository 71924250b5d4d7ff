"""The routes of trainers: pauses, updates from folders and over gloo, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from checkpoints import make_checkpoint
from running_server import error_of, running
from safetensors.torch import load_file, save_file

from compiled_engine.async_llm import AsyncLLM
from compiled_engine.features.weight_updates import broadcast
from compiled_engine.features.weight_updates.broadcast import TIMEOUT
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server.options import ServerOptions

ENGINE: dict[str, Any] = {
    "mode": "eager",
    "device": "cpu",
    "progress": False,
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_blocks": 64,
}
PROMPT = [*range(3, 40)]
SHARED = {"names": [], "tensors": [], "storages": []}
KEY = {"authorization": "Bearer trainer"}
Tensors = Mapping[str, torch.Tensor]


class Trainer:
    """The calls of a trainer over HTTP, and its side of the broadcasts."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.group: Any = None

    def get(self, path: str, **query: Any) -> Any:
        return httpx.get(f"{self.url}{path}", params=query, headers=KEY, timeout=60).raise_for_status().json()

    def try_post(self, path: str, body: Any = None, **query: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, params=query, headers=KEY, timeout=60)

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        response = self.try_post(path, body, **query)
        assert response.status_code == 200, response.text
        return response.json()

    def tokens(self, count: int = 30) -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        token_ids: list[int] = self.post("/v1/completions", body)["choices"][0]["token_ids"]
        return token_ids

    def connect(self, *, packed: bool) -> None:
        size = self.get("/get_world_size")["world_size"] + 1
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        info = {"master_address": "127.0.0.1", "master_port": store.port, "world_size": size, "packed": packed}
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self.post, "/init_weight_transfer_engine", {"init_info": {"rank_offset": 1, **info}})
            self.group = dist.ProcessGroupGloo(store, 0, size, TIMEOUT)
            assert joined.result() == {"message": "Weight transfer initialized"}

    def send(self, tensors: Tensors, messages: list[torch.Tensor]) -> httpx.Response:
        info = {
            "names": [*tensors],
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [[*each.shape] for each in tensors.values()],
        }
        with ThreadPoolExecutor(1) as pool:
            updated = pool.submit(self.try_post, "/update_weights", {"update_info": info})
            for message in messages:
                self.group.broadcast(message, 0).wait()
            return updated.result()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    allowed = tmp_path_factory.mktemp("allowed")
    for seed, name in enumerate(("old", "new")):
        make_checkpoint(allowed / name, "llama", seed=seed, num_attention_heads=4, num_key_value_heads=2)
    return allowed / "old", allowed / "new"


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[int]]:
    """The tokens of the old weights, and those of the new ones."""
    found = []
    for folder in folders:
        with LLM(folder, **ENGINE) as llm:
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            found.append(llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids)
    return found


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def trainer(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Trainer]:
    engine = AsyncLLM(folders[0], **ENGINE, tensor_parallel_size=request.param, core="in_process")
    options = {
        "rollouts": True,
        "weight_transfer_config": '{"backend": "gloo"}',
        "allowed_weights_folder": (str(folders[0].parent),),
        "admin_api_key": ("trainer",),
    }
    with running(engine, **options) as server:
        yield Trainer(server.url)


def test_a_folder_is_loaded_and_named_in_answers(
    trainer: Trainer, folders: tuple[Path, Path], expected: list[list[int]]
) -> None:
    assert trainer.tokens() == expected[0]
    assert trainer.post("/start_weight_update") == {"message": "Weight update started"}
    trainer.post("/update_weights", {"update_info": {"path": str(folders[1])}})
    assert trainer.tokens() == expected[0]
    finished = trainer.post("/finish_weight_update", {"weight_version": "step 7"})
    assert finished["weight_version"] == "step 7"
    assert trainer.tokens() == expected[1]
    answer = trainer.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
    assert answer["choices"][0]["weight_version"] == "step 7"
    info = trainer.get("/server_info", config_format="json")
    assert info["weights"]["version"] == "step 7"
    assert info["vllm_config"]["weight_transfer_config"] == {"backend": "gloo"}
    metrics = httpx.get(f"{trainer.url}/metrics", headers=KEY, timeout=60).text
    assert 'compiled_engine:weights_info{model_name="small",version="step 7"} 1.0' in metrics
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(folders[0])}}
    ranks = trainer.get("/get_world_size")["world_size"]
    assert trainer.post("/collective_rpc", call | {"timeout": 60}) == {"results": [None] * ranks}
    assert trainer.tokens() == expected[0]
    assert trainer.post("/collective_rpc", {"method": "get_world_size"}) == {"results": [ranks] * ranks}
    assert trainer.post("/reset_prefix_cache") == {"success": True}


@pytest.mark.product(one_in=1000, each=("packed",))
@pytest.mark.parametrize("packed", [True, False])
def test_tensors_are_broadcast_to_all_ranks(
    trainer: Trainer,
    folders: tuple[Path, Path],
    expected: list[list[int]],
    packed: bool,
) -> None:
    """Three updates, as a trainer makes them: a pause, the tensors, a reset of the prefix cache, and on."""
    trainer.connect(packed=packed)
    for step in (1, 0, 1):
        tensors = load_file(folders[step] / "model.safetensors")
        flat = [tensor.contiguous().view(torch.uint8).view(-1) for tensor in tensors.values()]
        trainer.post("/pause", mode="keep")
        assert trainer.get("/is_paused") == {"is_paused": True}
        trainer.post("/start_weight_update", {})
        answer = trainer.send(tensors, [torch.cat(flat)] if packed else flat)
        assert answer.json() == {"message": "Weights updated"}
        trainer.post("/finish_weight_update", {})
        trainer.post("/reset_prefix_cache")
        trainer.post("/resume")
        assert trainer.tokens() == expected[step]
    trainer.post("/update_weights", {"update_info": {"path": str(folders[0])}})


def test_a_trainer_that_ends_in_the_middle_of_a_transfer_changes_nothing(
    trainer: Trainer, folders: tuple[Path, Path], expected: list[list[int]]
) -> None:
    trainer.connect(packed=False)
    tensors = load_file(folders[1] / "model.safetensors")
    trainer.post("/start_weight_update", {})
    flat = [tensor.contiguous().view(torch.uint8).view(-1) for tensor in tensors.values()]
    ending = threading.Timer(0.2, lambda: setattr(trainer, "group", None))

    def send() -> httpx.Response:
        with ThreadPoolExecutor(1) as pool:
            info = {
                "names": [*tensors],
                "dtype_names": ["float32"] * len(tensors),
                "shapes": [[*each.shape] for each in tensors.values()],
            }
            updated = pool.submit(trainer.try_post, "/update_weights", {"update_info": info})
            for message in flat[:3]:
                trainer.group.broadcast(message, 0).wait()
            ending.start()
            return updated.result()

    negative = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1, -2]]}
    refused = trainer.try_post("/update_weights", {"update_info": negative})
    assert "shape of a is [-1, -2]; allowed: integers from 0" in error_of(refused)["message"]
    error = error_of(send())  # the trainer was still connected
    assert "a transfer has failed, so the trainer is disconnected" in error["message"]
    assert trainer.tokens() == expected[0]
    assert trainer.get("/server_info")["weights"]["received"] == 0
    trainer.post("/update_weights", {"update_info": {"path": str(folders[1])}})
    trainer.post("/finish_weight_update", {"weight_version": "x"})
    assert trainer.tokens() == expected[1]
    trainer.post("/update_weights", {"update_info": {"path": str(folders[0])}})


def reload_of(folder: Any) -> dict[str, Any]:
    return {"method": "reload_weights", "kwargs": {"weights_path": folder if isinstance(folder, int) else str(folder)}}


def test_what_does_not_fit_is_refused_by_name(
    trainer: Trainer, folders: tuple[Path, Path], expected: list[list[int]], tmp_path: Path
) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    del tensors["model.norm.weight"]
    bad = folders[0].parent / "bad"
    bad.mkdir(exist_ok=True)
    save_file(tensors, bad / "model.safetensors")
    refused = [
        ("/update_weights", {"update_info": {"path": str(bad)}}, "1 missing: model.norm.weight"),
        ("/update_weights", {"update_info": {"path": str(tmp_path)}}, "path must be a folder within"),
        ("/update_weights", {"update_info": {"path": f"{bad}/../../x"}}, "path must be a folder within"),
        ("/update_weights", {"update_info": {"names": ["a"]}}, "update_info must have names, dtype_names and shapes"),
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASV"}}, "pickles are not read: see shared"),
        ("/update_weights", {"update_info": {"shared": SHARED}}, "shared must be given with --weight-transfer-config"),
        ("/update_weights", {}, "update_info must be given"),
        ("/finish_weight_update", {}, "no weight update is under way"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format must be true"),
        ("/collective_rpc", {"method": "exit"}, "method must be one of reload_weights, reset_prefix_cache"),
        ("/collective_rpc", {"method": "rank_functions:count"}, "method must be one of reload_weights"),
        ("/collective_rpc", reload_of(tmp_path), "weights_path must be a folder within"),
        ("/collective_rpc", reload_of(3), "weights_path must be a str"),
        ("/collective_rpc", {"method": "get_world_size", "kwargs": {"x": 1}}, "kwargs must be with names among"),
        (
            "/collective_rpc",
            {"method": "reset_prefix_cache", "kwargs": {"reset_running_requests": "false"}},
            "reset_running_requests must be a bool",
        ),
    ]
    for path, body, message in refused:
        response = trainer.try_post(path, body)
        assert response.status_code == 400, (path, response.text)
        assert message in error_of(response)["message"]
    assert "mode must be one of abort, wait, keep" in error_of(trainer.try_post("/pause", mode="x"))["message"]
    assert trainer.tokens() == expected[0]


def test_requests_get_their_tokens_when_a_pause_ends_them(trainer: Trainer, expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": PROMPT, "max_tokens": 50, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        running_ = pool.submit(trainer.try_post, "/v1/completions", body)
        while not running_.done() and trainer.get("/load")["server_load"] == 0:
            pass
        trainer.post("/pause", mode="abort")
        choice = running_.result().raise_for_status().json()["choices"][0]
    assert choice["finish_reason"] in ("abort", "length")  # it may have ended before
    count = min(30, len(choice["token_ids"]))
    assert choice["token_ids"][:count] == expected[0][:count]
    trainer.post("/resume")
    assert trainer.tokens() == expected[0]


def test_the_routes_need_the_option_and_the_key(trainer: Trainer, folders: tuple[Path, Path]) -> None:
    for path in ("/pause", "/resume", "/start_weight_update", "/update_weights", "/collective_rpc"):
        response = httpx.post(f"{trainer.url}{path}", json={}, headers={"authorization": "Bearer other"}, timeout=60)
        assert (response.status_code, error_of(response)["code"]) == (403, "admin_key_required")
    engine = AsyncLLM(folders[0], **ENGINE, core="in_process")
    with running(engine) as server:
        response = httpx.post(f"{server.url}/pause", timeout=60)
        assert response.status_code == 404
        assert error_of(response)["message"].endswith("a server has it with --rollouts")


def test_options_without_rollouts_and_other_backends_are_refused() -> None:
    with pytest.raises(ValueError, match=r"allowed_weights_folder is .*, but rollouts is False"):
        ServerOptions(allowed_weights_folder=("/x",))
    with pytest.raises(ValueError, match=r"weight_transfer_config is {'backend': 'mpi'}; allowed: .* gloo, nccl, ipc"):
        ServerOptions(rollouts=True, weight_transfer_config='{"backend": "mpi"}')


def test_a_message_ends_with_the_tensor_that_exceeds_its_size() -> None:
    announced: list[broadcast.Announced] = [(str(size), torch.float32, [size]) for size in (2, 3, 9, 1, 1)]
    found = [[name for name, *_ in message] for message in broadcast._messages(announced, 16)]
    assert found == [["2", "3"], ["9"], ["1", "1"]]
    assert [len(message) for message in broadcast._messages(announced, 0)] == [1] * 5
