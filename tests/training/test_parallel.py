import ctypes
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import script
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from config import TrainConfig, parse_recipe
from model import cpu
from model.config import GPTConfig
from model.gpt import GPT
from training.optim import make_optimizers
from training.parallel import (
    apply_activation_checkpointing,
    clip_grad_norm,
    compile_blocks,
    gather_state,
    load_optimizer_state,
    sync_gradients,
)
from utils import distributed
from utils.devices import autocast
from utils.distributed import Process
from utils.errors import UserError

CONFIG = GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8)
X = 37 * torch.arange(16).view(2, 8) % 64


def stepped(seed=0):
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    (optimizer,) = make_optimizers(model, TrainConfig())
    model(X, X).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("max_norm", [1e-3, 1e3, 0])
def test_gradients_are_clipped_as_by_pytorch(max_norm):
    (ours, _), (theirs, _) = stepped(), stepped()
    norm = clip_grad_norm(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or torch.inf)
    assert norm == expected > 1e-3
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def test_optimizer_state_by_name_carries_over():
    (a, a_optimizer), (b, b_optimizer) = stepped(0), stepped(1)
    b.load_state_dict(a.state_dict())
    _, state = gather_state(a, [a_optimizer])
    load_optimizer_state(b, [b_optimizer], state)
    for model, optimizer in ((a, a_optimizer), (b, b_optimizer)):
        model.zero_grad()
        model(X, X).backward()
        optimizer.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


def test_gathered_state_stays_as_it_was_while_training_goes_on():
    model, optimizer = stepped()
    weights, state = gather_state(model, [optimizer])
    before = {n: w.clone() for n, w in weights.items()}
    moments = {n: s["exp_avg"].clone() for n, s in state.items()}
    model(X, X).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], before[name])
        assert torch.equal(state[name]["exp_avg"], moments[name])
        assert not torch.equal(parameter, before[name])


def test_saving_before_the_first_update_leaves_the_optimizer_as_it_was():
    model = GPT(CONFIG)
    (optimizer,) = make_optimizers(model, TrainConfig())
    weights, state = gather_state(model, [optimizer])
    assert state == {} and not optimizer.state
    load_optimizer_state(model, [optimizer], state)
    assert set(weights) == set(dict(model.named_parameters())) and not optimizer.state


def test_the_state_of_another_optimizer_is_named():
    model, optimizer = stepped()
    _, state = gather_state(model, [optimizer])
    name = "transformer.ln_f.weight"
    state[name] = {"momentum_buffer": state[name]["exp_avg"]}
    with pytest.raises(UserError, match=f"{name} is of another optimizer"):
        load_optimizer_state(model, [optimizer], state)


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone, so that DDP and its hooks run in the test."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_reduced_on_the_last_micro_step_alone(one_process, compiled):
    reductions = []

    def count(state, bucket):
        reductions.append(step)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped = DistributedDataParallel(GPT(CONFIG))
    wrapped.register_comm_hook(None, count)
    module = torch.compile(wrapped, backend="aot_eager") if compiled else wrapped
    for step in range(8):  # two steps of four micro-steps, as train.py runs them
        with sync_gradients(wrapped, "none", last=step % 4 == 3):
            loss = module(X, X)
            loss.backward()
    assert set(reductions) == {3, 7}


@pytest.mark.parametrize("what", ["cheap", "block"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_activations_give_the_same_gradients(what, dropout):
    config = replace(CONFIG, dropout=dropout)
    torch.manual_seed(0)
    plain = GPT(config)
    again = GPT(config)
    again.load_state_dict(plain.state_dict())
    apply_activation_checkpointing(again, what)
    for model in (plain, again):
        torch.manual_seed(1)
        model(X, X).backward()
    for p, q in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def kept(what, *, compiled=False):
    """Bytes that autograd keeps of a forward pass, but for the parameters; and the gradients."""
    torch.manual_seed(0)
    model = GPT(replace(CONFIG, n_layer=3, n_embd=64))
    apply_activation_checkpointing(model, what, compiled=compiled)
    own = {p.data_ptr() for p in model.parameters()}
    sizes = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.compiler.reset()  # it would take what was compiled of another model of the same shape
    if compiled:  # split into forward and backward as for C++, which is not made
        with pytest.MonkeyPatch.context() as patch:
            split = partial(torch.compile, backend="aot_eager_decomp_partition")
            patch.setattr(torch, "compile", split)
            compile_blocks(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(X, X)
    loss.backward()
    return sum(sizes.values()), [p.grad for p in model.parameters()]


def test_recomputing_blocks_keeps_their_inputs_alone():  # test_forecast.py counts for "cheap"
    none, block = (kept(what)[0] for what in ("none", "block"))
    assert block < 0.4 * none


def test_compiled_recomputation_is_of_the_newest_model_alone():
    for mode, banned in (("cheap", False), ("none", True), ("cheap", False), ("block", True)):
        apply_activation_checkpointing(GPT(CONFIG), mode, compiled=True)
        assert torch._functorch.config.ban_recompute_used_far_apart is banned


def test_a_compiled_step_keeps_less_where_it_may_recompute():
    names = ("used_far_apart", "long_fusible_chains", "materialized_backward")
    with torch._functorch.config.patch({f"ban_recompute_{name}": True for name in names}):
        (none, plain), (cheap, again) = (kept(what, compiled=True) for what in ("none", "cheap"))
    assert cheap < 0.85 * none
    torch.testing.assert_close(again, plain)
    torch.testing.assert_close(again, kept("none")[1])


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc's malloc")
def test_memory_that_was_freed_is_not_zeroed_again():
    code = (
        "import resource, torch\n"
        "from utils import malloc\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(5): torch.ones(2**22)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "malloc.map_large_tensors(); faults(); print(faults())\n"
        "malloc.reuse_freed_memory(); faults(); faults(); print(faults())\n"
    )
    apart, shared = map(int, script("-c", code).stdout.split())
    pages = 5 * 2**24 // 4096
    assert apart > 0.9 * pages and shared < 0.1 * pages


def test_processes_cannot_share_one_device(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "pick_device", lambda name, rank: torch.device("mps"))
    with pytest.raises(UserError, match="2 processes cannot share"):
        distributed.start("mps")


def test_what_holds_on_one_process_holds_on_all_of_one():
    process = Process(0, 0, 1, torch.device("cpu"))
    assert process.all_agree(True) and not process.all_agree(False)


def small(recipe):
    torch.manual_seed(0)
    return GPT(GPTConfig(16, 257, 2, 2, 32, **parse_recipe(recipe).shape(16, 257)))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("what", ["cheap", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ("gpt2", "modern", "speedrun,conv=3", "llama,n_kv_head=1"))
def test_what_is_computed_again_changes_no_gradient(fast, what, dtype, recipe):
    found, flops = {}, {}
    idx = torch.randint(0, 257, (2, 16))
    for again in ("none", what):
        model = small(recipe)
        if fast:
            cpu.for_training(model)
        apply_activation_checkpointing(model, again)
        with FlopCounterMode(display=False) as counter:
            with autocast(torch.device("cpu"), dtype, keep_weights=False):
                loss = model(idx, idx)
            loss.backward()
        found[again] = {name: p.grad for name, p in model.named_parameters()}
        flops[again] = counter.get_total_flops()
    for name, grad in found["none"].items():
        assert torch.equal(grad, found[what][name]), name
    if what == "block":
        assert flops[what] > flops["none"]
    else:  # no matrix product is done twice
        assert flops[what] == flops["none"]
