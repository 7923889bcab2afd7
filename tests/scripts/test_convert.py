import hub
import pytest
import torch
from conftest import environment, losses, script, train_args, weights

from model.gpt import GPT
from model.huggingface import load_pretrained
from training.checkpoint import (
    join_float32,
    load_checkpoint,
    load_model,
    load_weights,
    model_config,
)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "out"
    path = trained / "checkpoints" / "model_last.pt"
    script("convert.py", "--checkpoint", path, "--out", folder)
    return folder


def test_out_and_back_keeps_every_bit(trained, exported, tmp_path):
    state = load_checkpoint(trained / "checkpoints" / "model_last.pt")
    script("convert.py", "--model", exported, "--out", tmp_path / "back.pt")
    back = load_checkpoint(tmp_path / "back.pt")
    assert back["tokenizer"] == "bytes" and back["model_config"] == state["model_config"]
    for name, high in state["model"].items():
        ours = join_float32(high, state["model_low"][name])
        theirs = join_float32(back["model"][name], back["model_low"][name])
        rows = 257 if name == "transformer.wte.weight" else len(ours)  # but the padding
        assert torch.equal(ours[:rows], theirs[:rows]), name


def test_a_converted_checkpoint_can_be_resumed(shards, exported, tmp_path):
    path = tmp_path / "checkpoints" / "model_last.pt"
    script("convert.py", "--model", exported, "--out", path)
    folders = [
        "--data_dir",
        shards,
        "--checkpoint_dir",
        path.parent,
        "--log_dir",
        tmp_path / "logs",
    ]
    options = ["--max_steps", 3, "--total_batch_size", 512, "--micro_batch_size", 4]
    script("train.py", *folders, "--resume", "auto", *options, "--sample_every", 0)
    assert sorted(losses(tmp_path)) == [1, 2, 3] and losses(tmp_path)[1] < 5


def test_the_folder_samples_as_the_checkpoint_does(trained, exported):
    args = ["sample.py", "--prompt", "Abc", "--temperature", 0, "--max_new_tokens", 20]
    path = trained / "checkpoints" / "model_last.pt"
    ours = script(*args, "--checkpoint", path).stdout  # from the bfloat16 half alone
    assert script(*args, "--model", exported).stdout[:8] == ours[:8]


def test_fine_tuning_starts_from_the_folder_s_weights(shards, trained, exported, tmp_path):
    shape = ["--n_layer", "--n_head", "--n_embd"]
    args = [str(a) for a in train_args(shards, tmp_path, 4, "--init_from", exported)]
    for flag in shape:  # the architecture comes from the folder
        del args[args.index(flag) : args.index(flag) + 2]
    script(*args)
    state = load_checkpoint(trained / "checkpoints" / "model_last.pt")
    model = GPT(model_config(state, trained))
    load_weights(model, state, exact=True)
    assert model.config == load_pretrained(exported).config
    first, last = losses(tmp_path)[1], losses(trained)[20]
    assert abs(first - last) < 0.2 and first < losses(trained)[1] - 0.5
    script(*args[: args.index("--init_from")], "--max_steps", 6, "--resume", "auto")
    assert sorted(losses(tmp_path)) == list(range(1, 7))


def test_mistakes_are_sentences(shards, trained, exported, tmp_path):
    last = trained / "checkpoints" / "model_last.pt"
    for args, message in (
        (["convert.py", "--out", tmp_path / "x"], "give one of"),
        (["convert.py", "--checkpoint", last, "--out", exported], "exists already; choose another"),
        (
            ["convert.py", "--checkpoint", last, "--out", "/dev/null/x"],
            "/dev/null/x could not be written whole: Not a directory; choose another --out",
        ),
        (["convert.py", "--model", exported, "--out", tmp_path / "x"], "must end in .pt"),
        (
            ["convert.py", "--model", tmp_path, "--out", tmp_path / "x.pt"],
            "cannot be loaded as GPT-2",
        ),
        (train_args(shards, tmp_path, 4, "--init_from", exported, "--n_layer", 3), "--n_layer 3"),
        (["sample.py", "--model", tmp_path / "none"], "is no folder"),
        (["sample.py", "--checkpoint", exported], f"folder by --model {exported}"),
        (
            ["convert.py", "--model", trained, "--out", tmp_path / "x.pt"],
            f"holds checkpoints: give it by --checkpoint {trained}",
        ),
        (["train.py", "--dry_run", "--init_from", tmp_path], "holds no checkpoint"),
        (["train.py", "--dry_run", "--hellaswag_data", tmp_path / "x"], "there is no file"),
        (["train.py", "--dry_run", "--init_from", exported, "--model_type", "gpt2-xl"], "gpt2-xl"),
    ):
        done = script(*args, code=2)
        assert message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_model_of_the_hub_is_downloaded_and_used(exported, tmp_path):
    files = {p.name: p.read_bytes() for p in exported.iterdir()} | {"flax_model.msgpack": b"no"}
    args = ["sample.py", "--prompt", "Abc", "--temperature", 0, "--max_new_tokens", 20]
    with hub.serve(files, "models/me/gpt") as (address, handler):
        env = {**environment(), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
        env["HF_HOME"] = str(tmp_path)
        out = script(*args, "--model", "me/gpt", env=env).stdout
        assert out == script(*args, "--model", exported).stdout
        assert not any("msgpack" in path for path in handler.asked)
        done = script(*args, "--model", "me/other", env=env, code=2)
        assert "me/other is no folder" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "recipe",
    [
        "gpt2",
        "modern",
        "modern,window_blocks=1",
        "llama",
        "modern,qk_norm=False,window=None,n_kv_head=1",
    ],
)
def test_each_kind_of_model_is_read_back_from_its_folder_by_every_script(shards, tmp_path, recipe):
    run, hf = tmp_path / "run", tmp_path / "hf"
    script(*train_args(shards, run, 5, "--recipe", recipe))
    last = run / "checkpoints" / "model_last.pt"
    script("convert.py", "--checkpoint", last, "--out", hf)
    script("convert.py", "--model", hf, "--out", tmp_path / "back.pt")
    before, after = weights(run), load_checkpoint(tmp_path / "back.pt")
    for name, x in before.items():
        rows = 257 if name.endswith(("wte.weight", "lm_head.weight")) else None  # without padding
        found = join_float32(after["model"][name], after["model_low"][name])
        assert torch.equal(found[:rows], x[:rows])
    ours = load_pretrained(hf)
    idx = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(idx), load_model(last, exact=True)[0](idx))
    script("sample.py", "--model", hf, "--max_new_tokens", 3)
    script("evaluate.py", "--model", hf, "--tasks", "val", "--data_dir", shards, "--device", "cpu")
    assert (hf / "evaluation.json").exists()
    for source in (hf, run) if recipe != "gpt2" else (hf, last, tmp_path / "back.pt"):
        args = train_args(shards, tmp_path / "tuned", 3, "--init_from", source, "--overwrite")
        done = script(*args, "--max_lr", 1e-4)
        assert "optimizer, schedule and step are new" in done.stdout
        first = losses(tmp_path / "tuned")[1]
        assert first < losses(run)[1] - 0.05 and abs(first - losses(run)[5]) < 0.3
    script(*args[: args.index("--init_from")], "--max_steps", 4, "--resume", "auto")
    assert sorted(losses(tmp_path / "tuned")) == [1, 2, 3, 4]
    script("train.py", "--dry_run", "--device", "cpu", "--init_from", last, "--block_size", 16)
    args = train_args(shards, tmp_path / "hf run", 2, "--init_from", hf)
    script(*args)  # and such a run can be resumed
    script(*args[: args.index("--init_from")], "--max_steps", 3, "--resume", "auto")


def test_two_sources_of_a_model_are_refused(trained, tmp_path):
    both = ["--checkpoint", trained, "--model", tmp_path]
    for command in (["sample.py", *both], ["evaluate.py", *both, "--tasks", "val"]):
        done = script(*command, code=2)
        assert "--checkpoint (of train.py) or --model (Hugging Face), not both" in done.stderr
