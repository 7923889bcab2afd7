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
from conftest import SHARED, script

from data.export_tokenizer import save_tokenizer
from data.file_tokenizer import read_tokenizer
from data.tokenizer import load_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import save_pretrained
from model.recipes import parse_recipe

READ = """
import json, sys
import llama_cpp
ids = json.loads(sys.argv[2])
model = llama_cpp.Llama(
    sys.argv[1], n_ctx=64, logits_all=True, type_k=0, type_v=0, n_gpu_layers=0, verbose=False
)
model.eval(ids)
told = model.tokenize(sys.argv[3].encode(), add_bos=False)
print(json.dumps([model.scores[: len(ids)].tolist(), told]))
"""
CONVERT = """
import sys
import conversion.base, convert_hf_to_gguf
pre = sys.argv.pop()
conversion.base.TextModel.get_vocab_base_pre = lambda *_: pre
convert_hf_to_gguf.main()
"""
TEXT = "Größe 1234: naïve x=1;\n\n  it's 中文"
OTHERS = {"n_kv_head": 1, "n_inner": 96, "tied": True, "rope_base": 5e5, "norm_eps": 1e-6}


@pytest.mark.slow
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="no LLAMA_CPP, see above")
@pytest.mark.skipif(not (SHARED / "tiktoken").is_dir(), reason="no GPT-2 vocabulary")
@pytest.mark.parametrize(
    ("recipe", "fields", "split"),
    [
        *(("gpt2", {}, None), ("modern", {}, None), ("llama", {}, None)),
        *(("gpt2", {}, "gpt2"), ("llama", OTHERS, "unicode"), ("modern", {}, "unicode")),
    ],
)
def test_llama_cpp_computes_the_logits_of_an_export(recipe, fields, split, tmp_path):
    """With GPT-2's tokenizer, or one of our own, cut as `split` says."""
    tokenizer = load_tokenizer("gpt2")
    if split:
        args = ["--input", SHARED / "data/tinyshakespeare.txt", "--vocab_size", 1000]
        own = ["--split", split, "--out", tmp_path / "tokenizer.json"]
        script("data/train_tokenizer.py", *args, *own)
        tokenizer = load_tokenizer(read_tokenizer(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    shape = parse_recipe(recipe).shape(64, 64, tokenizer.vocab_size) | fields
    model = GPT(GPTConfig(n_layer=2, n_head=2, **shape)).eval()
    for p in model.parameters():
        p.data.normal_(std=0.1).add_(1.0 if p.ndim == 1 else 0.0)  # all count, none is zero
    save_pretrained(model, tmp_path / "hf", tokenizer.eot)
    save_tokenizer(tokenizer, tmp_path / "hf", 64)
    llama, gguf = Path(os.environ["LLAMA_CPP"]).resolve(), tmp_path / "model.gguf"
    source = {"cwd": llama / "vendor/llama.cpp", "check": True}
    pre = "qwen35" if split == "unicode" else "gpt-2"
    args = [tmp_path / "hf", "--outtype", "f32", "--outfile", gguf, pre]
    subprocess.run([sys.executable, "-c", CONVERT, *args], **source)
    idx = torch.randint(0, tokenizer.vocab_size, (1, 32))
    command = [llama / ".venv/bin/python", "-c", READ, gguf, json.dumps(idx[0].tolist()), TEXT]
    logits, told = json.loads(subprocess.check_output(command))
    assert told == tokenizer.encode(TEXT).tolist()
    with torch.no_grad():
        ours = model(idx)[0]
    far = (ours - torch.tensor(logits)).abs().max() / ours.abs().max()
    print(f"{recipe}, {split}: {far:.1e} of the largest logit")
    assert far < 5e-4 and (ours.argmax(-1) == torch.tensor(logits).argmax(-1)).all()
