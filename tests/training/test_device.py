"""What a device computes; on a GPU by `pytest -n 0 tests/training/test_device.py --device cuda`."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import losses, script, train_args
from torch.distributed.tensor import DTensor

from config import TrainConfig
from model import loss as loss_module
from model.execution import Execution
from model.gpt import GPT
from model.recipes import parse_recipe
from training.parallel import wrap
from utils.devices import autocast, pick_device
from utils.distributed import Process

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64}


@pytest.fixture
def device(request):
    return pick_device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def chunks_of_logits(monkeypatch):
    for name in ("LOGITS_BYTES", "LOGITS_BYTES_ON_CPU"):
        monkeypatch.setattr(loss_module, name, 2**17)


def models(recipe, device, **options):
    """Return a model in float64 on the CPU, and its copy made ready to train on a device."""
    config = TrainConfig(**SMALL).model_config(parse_recipe(recipe), 1009)
    generator = torch.Generator().manual_seed(0)
    exact = GPT(config).to("cpu")
    for p in exact.parameters():
        p.data = 0.1 * torch.randn(p.shape, generator=generator, device="cpu") + (p.dim() < 2)
    model = GPT(config, Execution(**options))
    model.load_state_dict(exact.state_dict())
    model.to(device)
    return exact.double(), model


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1009, (2, 4, 64), generator=generator, device="cpu")
    tokens[1, :, ::7] = -1  # targets that do not count
    return tokens


def relative_errors(model, loss, exact):
    """Return the relative error of the loss, and the largest of the gradients."""
    idx, targets = batch()
    exact_loss = F.cross_entropy(exact(idx).flatten(0, 1), targets.flatten(), ignore_index=-1)
    exact_loss.backward()
    errors = []
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        errors.append((grad.cpu().double() - theirs.grad).norm() / theirs.grad.norm())
    return abs(loss.item() / exact_loss.item() - 1), max(errors).item()


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["gpt2", "modern", "speedrun", "llama"])
def test_loss_and_gradients_are_those_of_float64(device, recipe, compiled, dtype, far):
    if compiled and device.type == "cpu":
        pytest.skip("compiling takes minutes on a CPU")
    exact, model = models(recipe, device, compiled=compiled)
    with autocast(device, dtype, keep_weights=False):
        loss = model(*batch().to(device))
    loss.backward()
    error, of_gradients = relative_errors(model, loss, exact)
    assert error < far / 10 and of_gradients < far


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
def test_a_sharded_model_computes_the_same(device, sharding, tmp_path):
    exact, model = models("gpt2", device)
    backend, store = "nccl" if device.type == "cuda" else "gloo", f"file://{tmp_path}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        loss = wrap(model, Process(0, 1, device), sharding, torch.float32)(*batch().to(device))
        loss.backward()
        error, of_gradients = relative_errors(model, loss, exact)
    finally:
        dist.destroy_process_group()
    assert error < 1e-6 and of_gradients < 1e-5


def test_a_run_is_that_of_the_cpu_and_resumes(shards, trained, device, tmp_path):
    if device.type == "cpu":
        pytest.skip("tests/training/test_train.py shows it, to the bit")
    whole, rest, far = tmp_path / "whole", tmp_path / "rest", 1e-2
    flags = ("--device", device, "--dtype", "bfloat16")
    script(*train_args(shards, whole, 20, *flags, "--save_every", 10, "--keep_last", 2))
    tenth = whole / "checkpoints/model_step_000010.pt"
    script(*train_args(shards, rest, 20, *flags, "--resume", tenth))
    found, resumed, expected = losses(whole), losses(rest), losses(trained)
    assert max(abs(found[n] - expected[n]) for n in expected) < far
    # a GPU adds in another order each time
    assert max(abs(found[n] - resumed[n]) for n in resumed) <= far


def test_forward_and_backward_do_not_wait_for_the_gpu(device):
    if device.type != "cuda":
        pytest.skip("a CPU does not run ahead")
    _, model = models("gpt2", device, compiled=True)
    idx, targets = batch().to(device)
    model(idx, targets).backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")  # a wait raises
    try:
        model(idx, targets).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad.isfinite().all() for p in model.parameters())
