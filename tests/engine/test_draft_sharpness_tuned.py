"""The sharpness of a head's drafts is found while requests run, and changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from eagle_heads import make_bigram_model, write_exact_head
from safetensors.torch import load_file, save_file

from compiled_engine.llm import LLM
from compiled_engine.models.bundled import BUNDLED_MODEL_PATH
from compiled_engine.sampling.params import SamplingParams

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "mode": "eager",
    "progress": False,
    "max_model_len": 96,
    "max_num_seqs": 12,
    "tokenizer": str(BUNDLED_MODEL_PATH),
}
VOCAB = 131
pytestmark = pytest.mark.usefixtures("one_thread")


def generate(llm: LLM, seed: int, temperature: float) -> list[list[int]]:
    params = [
        SamplingParams(seed=seed + i, max_tokens=40, ignore_eos=True, detokenize=False, temperature=temperature)
        for i in range(12)
    ]
    prompts = [{"prompt_token_ids": [i, (7 * i + seed) % VOCAB]} for i in range(12)]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def test_the_best_sharpness_is_found_and_changes_no_token(tmp_path: Path) -> None:
    """The head knows the model exactly, but its logits are smaller by a factor of 1.5."""
    target = tmp_path / "target"
    target.mkdir()
    make_checkpoint(target, "qwen3", hidden_size=64, vocab_size=VOCAB)
    make_bigram_model(target)
    head = write_exact_head(tmp_path / "head", target)
    tensors = load_file(head / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] / 1.5
    save_file(tensors, head / "model.safetensors")
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    found = []
    for config in (None, drafts):
        with LLM(model=str(target), **ENGINE, speculative_config=config) as llm:
            greedy = generate(llm, 0, 0.0)
            assert "draft_sharpness_shares" not in llm.metrics() or not any(
                llm.metrics()["draft_sharpness_shares"].values()
            )
            found.append([greedy, *(generate(llm, seed, 1.3) for seed in range(2))])
            metrics = llm.metrics()
    assert found[0] == found[1]
    shares = metrics["draft_sharpness_shares"]
    assert metrics["draft_sharpness"] == "1.5"
    assert shares["1.5"] == 1.0 > max(share for name, share in shares.items() if name != "1.5")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"draft_sharpness": 0},
            "'draft_sharpness'] is 0; allowed: auto, greedy, or a number above 0 and at most",
        ),
        ({"draft_sharpness": "sharp"}, "'draft_sharpness'] is 'sharp'; allowed: auto, greedy, or a number above 0"),
        ({"draft_sharpness": True}, "'draft_sharpness'] is True; allowed: auto, greedy, or a number above 0"),
        ({"draft_sharpness": 2, "method": "ngram"}, "'draft_sharpness'] is 2, but 'method' is 'ngram'; allowed with"),
    ],
    ids=str,
)
def test_wrong_values_are_errors(given: dict[str, Any], message: str) -> None:
    drafts = {"method": "eagle3", "model": "somewhere", "num_speculative_tokens": 2} | given
    if given.get("method") == "ngram":
        del drafts["model"]
    with pytest.raises((TypeError, ValueError), match=message):
        LLM(**ENGINE, speculative_config=drafts)
