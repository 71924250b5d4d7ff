"""A start loads the tokenizer beside the model; modules of transformers are imported by both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tokenizers
from transformers import BertConfig, PreTrainedTokenizerFast

BOTH = """
import sys, threading
from pathlib import Path
import torch
from compiled_engine.frontend.tokenizer import load_by_transformers
from compiled_engine.models.foreign.find_description import find_description

folder, errors = Path(sys.argv[1]), []
def of_model():
    try:
        find_description((folder / "config.json").read_text(), torch.float32, None)
    except BaseException as error:
        errors.append(error)
both = threading.Thread(target=of_model)
both.start()
load_by_transformers(folder)
both.join()
print(errors)
"""


def test_a_tokenizer_and_a_model_of_transformers_are_loaded_at_the_same_time(tmp_path: Path) -> None:
    shape = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertConfig(**shape, intermediate_size=8, architectures=["BertModel"]).save_pretrained(tmp_path)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    run = subprocess.run([sys.executable, "-c", BOTH, tmp_path], check=False, capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stdout + run.stderr[-2000:]
