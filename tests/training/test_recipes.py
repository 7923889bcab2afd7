import json
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import launch, losses, script, torchrun, train_args, weights
from training.initial_model import build_model

from config import RECIPES, Recipe, TrainConfig, parse_recipe
from model.config import GPTConfig
from model.cpu import for_training
from model.gpt import GPT
from model.huggingface import save_pretrained
from model.layers import last_attended
from model.llama import config_from_hf, config_to_hf
from utils.errors import UserError
from utils.logger import read_metrics

MODERN = ("--recipe", "modern", "--max_lr", 0.02)


def test_a_recipe_is_changed_field_by_field():
    assert parse_recipe("gpt2") == Recipe()
    changed = parse_recipe("modern, qk_norm=False,n_kv_head=2,optimizer=adamw,max_lr=1")
    assert changed.model == {**RECIPES["modern"].model, "qk_norm": False, "n_kv_head": 2}
    assert (changed.optimizer, changed.max_lr) == ("adamw", 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modren", "there are gpt2, modern, speedrun, llama"),
        ("modern,qk_nrom=True", "did you mean qk_norm"),
        ("modern,n_embd=8", "has no 'n_embd'"),
        ("modern,max_lr=fast", "of type float"),
        ("modern,optimizer=sgd", "one of adamw, muon"),
        ("modern,schedule=wds", "one of cosine, linear, wsd"),
        ("gpt2,weight_decay=-1", "between 0"),
        ("gpt2,decay=1e999", "between 0 and 1"),
        ("gpt2,max_lr=" + "9" * 400, "of type float"),
        ("gpt2,max_lr={[]:1}", "of type float"),
    ],
)
def test_a_recipe_that_is_none_is_named(text, message):
    with pytest.raises(UserError, match=message):
        parse_recipe(text)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("llama,n_kv_head=2,n_inner=96,rope_base=500000.0,tied=True", "LlamaForCausalLM"),
        ("modern", "Qwen3ForCausalLM"),
        ("modern,n_kv_head=2,n_inner=96,tied=True", "Qwen3ForCausalLM"),
        ("modern,window_blocks=0.7", "Qwen3ForCausalLM"),
        ("modern,qk_norm=False,window=None,window_blocks=1", "LlamaForCausalLM"),
    ],
)
def test_transformers_gives_the_same_logits(recipe, name, tmp_path):
    torch.manual_seed(0)
    ours = GPT(GPTConfig(32, 257, 3, 4, 64, **parse_recipe(recipe).shape(32, 257))).eval()
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.2)  # gains too
    torch.nn.init.normal_(ours.transformer.wte.weight, std=0.003)  # where a norm's epsilon counts
    save_pretrained(ours, tmp_path)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert type(theirs).__name__ == name and not any(loading.values())
    x = torch.randint(0, 257, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs.eval()(x).logits, atol=1e-4, rtol=0)


def test_a_window_hides_older_tokens_from_the_first_half_of_the_blocks():
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    assert last_attended(causal, 4).sum(1).tolist() == [1, 2, 3, *[4] * 13]
    shape = parse_recipe("modern").shape(32, 257)
    assert shape["window"] == 4
    model = GPT(GPTConfig(16, 257, 2, 2, 32, **shape)).eval()
    first, hidden = model.transformer.h[0], []
    torch.nn.init.normal_(first.attn.c_proj.weight)
    first.register_forward_hook(lambda block, inputs, output: hidden.append(output[0, 11:]))
    x = torch.randint(0, 257, (1, 16))
    changed = torch.cat([(x[:, :8] + 1) % 257, x[:, 8:]], dim=1)
    assert not torch.allclose(model(x)[0, 11:], model(changed)[0, 11:])  # the second block sees all
    torch.testing.assert_close(*hidden)


@pytest.mark.parametrize("tokens", [8, 9, 50, 64])
@pytest.mark.parametrize("n_kv_head", [1, 2])
@pytest.mark.parametrize("prepare", [GPT.train, for_training])
def test_chunks_of_a_window_attend_as_its_mask_does(tokens, n_kv_head, prepare):
    shape = parse_recipe(f"modern,window=8,n_kv_head={n_kv_head}").shape(64, 257)
    torch.manual_seed(0)
    model = prepare(GPT(GPTConfig(64, 257, 4, 2, 32, **shape)))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x = torch.randint(0, 257, (3, tokens))
    causal = torch.ones(3, 1, tokens, tokens, dtype=torch.bool).tril()
    masked = model(x, mask=causal, positions=torch.arange(tokens).expand(3, tokens))
    for found, expected in ((model(x), masked), gradients_of(model, model(x), masked)):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("n_layer", "share", "count"), [(3, 0.5, 1), (49, 1 / 49, 1), (4, 1, 4)])
def test_a_share_of_the_blocks_has_a_window(n_layer, share, count):
    config = GPTConfig(n_layer=n_layer, window=9, window_blocks=share)
    assert [config.window_of(i) for i in range(n_layer)] == [9] * count + [None] * (n_layer - count)
    rounded = replace(config, window_blocks=count / n_layer)
    assert rounded.differs_from({"window": 9, "window_blocks": share}) == []


@pytest.mark.parametrize("kinds", [None, ["full_attention", "sliding_attention"], 3, []])
def test_windows_in_other_blocks_than_the_first_are_refused(kinds):
    hf = config_to_hf(GPTConfig(16, 257, 2, 2, 32, **parse_recipe("modern").shape(16, 257)))
    assert config_from_hf(dict(hf)).window == 2
    with pytest.raises(UserError, match="layer_types"):
        config_from_hf(hf | {"layer_types": kinds})


def gradients_of(model, *outputs):
    weight = model.transformer.h[0].attn.c_attn.weight
    return [torch.autograd.grad(y.square().mean(), weight)[0] for y in outputs]


def test_a_model_that_transformers_has_no_class_for_is_named(tmp_path):
    model = GPT(GPTConfig(32, 257, 1, 4, 64, **parse_recipe("modern,norm=layer,bias=True").model))
    with pytest.raises(UserError, match="no LLaMA because of norm=layer, bias=True"):
        save_pretrained(model, tmp_path / "out")
    model = GPT(GPTConfig(32, 257, 1, 4, 64, tied=False))
    with pytest.raises(UserError, match="no GPT-2 because of tied=False, and no LLaMA because of"):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module", params=["modern", "speedrun,conv=3,ngram_rows=1000"])
def recipe(request):
    return ("--recipe", request.param, "--max_lr", 0.02)


@pytest.fixture(scope="module")
def trained(shards, recipe, tmp_path_factory):
    """20 steps of a recipe in one process, checkpoints at every fifth."""
    run = tmp_path_factory.mktemp("trained")
    script(*train_args(shards, run, 20, *recipe, "--save_every", 5, "--keep_last", 9))
    return run


def test_a_recipe_resumes_to_the_bit(shards, recipe, trained, tmp_path):
    tenth = trained / "checkpoints/model_step_000010.pt"
    script(*train_args(shards, tmp_path, 20, *recipe, "--resume", tenth))
    found, expected = losses(tmp_path), losses(trained)
    assert found == {step: loss for step, loss in expected.items() if step > 10}
    after, before = weights(tmp_path), weights(trained)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow
def test_a_recipe_goes_on_under_any_sharding_and_world_size(shards, recipe, trained, tmp_path):
    before, expected = trained, losses(trained)
    for step, processes, sharding in ((5, 4, "zero3"), (10, 2, "zero1"), (15, 4, "none")):
        run = tmp_path / sharding
        args = train_args(
            shards, run, 20, "--resume", before / f"checkpoints/model_step_{step:06d}.pt",
            *recipe, "--sharding", sharding,
            "--micro_batch_size", 2, "--save_every", 5, "--keep_last", 9,
        )  # fmt: skip
        torchrun(processes, *args)
        found = losses(run)
        assert min(found) == step + 1
        assert max(abs(found[s] - expected[s]) for s in found) < 1e-4
        before = run


@pytest.mark.slow
def test_a_recipe_on_two_machines_or_compiled_is_as_on_one(shards, recipe, trained, tmp_path):
    expected = losses(trained)
    small = (*recipe, "--micro_batch_size", 2)
    zero2 = train_args(shards, tmp_path / "two", 20, *small, "--sharding", "zero2")
    launch([zero2] * 4, local_world_size=2, codes=[0] * 4)
    compiled = (*recipe, "--use_torch_compile")
    script(*train_args(shards, tmp_path / "compiled", 20, *compiled))
    for run in (tmp_path / "two", tmp_path / "compiled"):
        found = losses(run)
        assert len(found) == 20 and max(abs(found[s] - expected[s]) for s in found) < 1e-4


@pytest.mark.parametrize(
    ("sharding", "dtype", "far"),
    [
        ("zero2", "float32", 1e-4),
        pytest.param("none", "float32", 1e-4, marks=pytest.mark.slow),
        pytest.param("zero2", "bfloat16", 1e-2, marks=pytest.mark.slow),
        pytest.param("none", "bfloat16", 1e-2, marks=pytest.mark.slow),
    ],
)
def test_unequal_shares_step_alike(shards, tmp_path, sharding, dtype, far):
    """On three processes 32 rows are 11, 11 and 10, and two matrices of a kind 1, 1 and 0."""
    more = (*MODERN, "--total_batch_size", 768, "--save_every", 0, "--eval_every", 0)
    more = (*more, "--dtype", dtype)
    script(*train_args(shards, tmp_path / "one", 8, *more))
    torchrun(3, *train_args(shards, tmp_path / "three", 8, *more, "--sharding", sharding))
    found, expected = losses(tmp_path / "three"), losses(tmp_path / "one")
    assert len(found) == 8 and max(abs(found[s] - expected[s]) for s in found) < far


def test_scripts_take_a_checkpoint_of_a_recipe(shards, recipe, trained, tmp_path):
    best = trained / "checkpoints/model_best.pt"
    told = script(
        "sample.py", "--checkpoint", best, "--prompt", "A", "--max_new_tokens", 9, "--json"
    )
    assert json.loads(told.stdout)["text"]
    report = tmp_path / "scores.json"
    script(
        "evaluate.py",
        "--checkpoint",
        best,
        "--tasks",
        "val",
        "--val_tokens",
        4096,
        "--device",
        "cpu",
        "--out",
        report,
    )
    row = next(row for row in json.loads(report.read_text())["results"] if row["metric"] == "loss")
    assert row["value"] == pytest.approx(losses(trained, "val")[20], rel=1e-6)
    convert = ("convert.py", "--checkpoint", best, "--out", tmp_path / "hf")
    if "speedrun" in recipe[1]:
        assert "transformers has no class for this model" in script(*convert, code=2).stderr
        return
    script(*convert)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "qwen3"
    hf = ["--init_from", tmp_path / "hf", "--recipe", "llama"]
    done = script(*train_args(shards, tmp_path, 1, *hf), code=2)
    assert "--recipe llama:" in done.stderr and "hf is a modern" in done.stderr
    assert "which differs in qk_norm, activation, window; leave out --recipe" in done.stderr
    large = ["--init_from", best, "--model_type", "gpt2-xl"]
    done = script(*train_args(shards, tmp_path, 1, *large), code=2)
    assert "model_best.pt is of another size: n_layer 2, n_head 2, n_embd 32\n" in done.stderr
    min_lr = ["--init_from", best, "--min_lr", 0.002]  # above the max_lr of gpt2, not of modern
    done = script(*train_args(shards, tmp_path / "tuned", 1, *min_lr))
    assert "recipe modern" in done.stdout


def test_blocks_of_modern_begin_as_the_identity():
    model = build_model(
        TrainConfig(recipe="modern", n_layer=2, n_head=2, n_embd=32, block_size=16), None, 257
    )
    idx = torch.randint(0, 257, (2, 16))
    x = model.transformer.wte(idx)
    torch.testing.assert_close(model.hidden(idx), model.transformer.ln_f(x))


def test_another_optimizer_s_state_is_refused(shards, recipe, trained, tmp_path):
    args = train_args(shards, tmp_path, 20, "--resume", trained / "checkpoints/model_last.pt")
    done = script(*args, "--recipe", f"{recipe[1]},optimizer=adamw", code=2)
    assert "is of another optimizer" in done.stderr


def test_a_wsd_run_goes_on_as_if_it_had_been_longer(shards, tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    wsd = ("--schedule", "wsd", "--save_every", 0)
    script(*train_args(shards, a, 20, *wsd))
    assert read_metrics(a / "logs")["train"][-1]["lr"] < 1e-3
    stable = a / "checkpoints/model_stable.pt"
    script(*train_args(shards, b, 40, "--resume", stable))
    script(*train_args(shards, c, 40, *wsd))
    found, expected = losses(b), losses(c)
    assert min(found) == 17 and found == {s: x for s, x in expected.items() if s > 16}
    after, before = weights(b), weights(c)
    assert all(torch.equal(after[name], before[name]) for name in before)
