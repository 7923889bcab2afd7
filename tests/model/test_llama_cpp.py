"""Exports in llama.cpp, whose converter and library need an environment of their own, LLAMA_CPP:

pip download llama-cpp-python --no-deps --no-binary llama-cpp-python
mkdir llama && tar xf llama_cpp_python-*.tar.gz -C llama --strip-components 1
python -m venv llama/.venv && llama/.venv/bin/pip install ./llama     # compiles for minutes
pip install sentencepiece    # imported by the converter
LLAMA_CPP=llama bash tests/run.sh --slow tests/model/test_llama_cpp.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHARED

from config import parse_recipe
from data.file_tokenizer import save_tokenizer
from data.tokenizer import load_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import save_pretrained

READ = """
import json, sys
import llama_cpp
ids = json.loads(sys.argv[2])
model = llama_cpp.Llama(
    sys.argv[1], n_ctx=64, logits_all=True, type_k=0, type_v=0, n_gpu_layers=0, verbose=False
)
model.eval(ids)
print(json.dumps(model.scores[: len(ids)].tolist()))
"""


@pytest.mark.slow
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="no LLAMA_CPP, see above")
@pytest.mark.skipif(not (SHARED / "tiktoken").is_dir(), reason="no GPT-2 vocabulary")
@pytest.mark.parametrize("recipe", ["gpt2", "modern", "llama"])
def test_llama_cpp_computes_the_logits_of_an_export(recipe, tmp_path):
    torch.manual_seed(0)
    shape = parse_recipe(recipe).shape(64, 64, 50257)
    model = GPT(GPTConfig(n_layer=2, n_head=2, **shape)).eval()
    for p in model.parameters():
        p.data.normal_(std=0.1).add_(1.0 if p.ndim == 1 else 0.0)  # all count, none is zero
    save_pretrained(model, tmp_path / "hf")
    save_tokenizer(load_tokenizer("gpt2"), tmp_path / "hf", 64)
    llama, gguf = Path(os.environ["LLAMA_CPP"]).resolve(), tmp_path / "model.gguf"
    convert = llama / "vendor/llama.cpp/convert_hf_to_gguf.py"
    args = [tmp_path / "hf", "--outtype", "f32", "--outfile", gguf]
    subprocess.run([sys.executable, convert, *args], check=True)
    idx = torch.randint(0, 50257, (1, 32))
    command = [llama / ".venv/bin/python", "-c", READ, gguf, json.dumps(idx[0].tolist())]
    theirs = torch.tensor(json.loads(subprocess.check_output(command)))
    with torch.no_grad():
        ours = model(idx)[0, :, :50257]
    assert (ours - theirs).abs().max() < 5e-4 * ours.abs().max()
