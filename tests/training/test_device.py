"""What a device computes; on a GPU by `pytest -n 0 tests/training/test_device.py --device cuda`."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import gap, script, train_args

from config import TrainOptions
from model import chunked_loss, loss
from model.execution import Execution, execute
from model.gpt import GPT
from recipes import parse_recipe
from training.parallel.data_parallel import wrap
from utils.devices import autocast, pick_device
from utils.distributed import Process

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64}


@pytest.fixture
def device(request):
    return pick_device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def chunks_of_logits(monkeypatch):
    monkeypatch.setattr(loss, "PLAIN_BYTES", 2**17)
    for name in ("LOGITS_BYTES", "LOGITS_BYTES_ON_CPU"):
        monkeypatch.setattr(chunked_loss, name, 2**17)


def models(recipe, device, **options):
    """Return a model in float64 on the CPU, and its copy made ready to train on a device."""
    config = TrainOptions(**SMALL).model_config(parse_recipe(recipe), 1009)
    generator = torch.Generator().manual_seed(0)
    exact = GPT(config).to("cpu")
    for p in exact.parameters():
        p.data = 0.1 * torch.randn(p.shape, generator=generator, device="cpu") + (p.dim() < 2)
    model = GPT(config)
    execute(model, Execution(**options))
    model.load_state_dict(exact.state_dict())
    model.to(device)
    return exact.double(), model


def exact_loss(model):
    """Return the loss of the batch by PyTorch."""
    idx, targets = batch()
    return F.cross_entropy(model(idx).flatten(0, 1), targets.flatten(), ignore_index=-1)


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1009, (2, 4, 64), generator=generator, device="cpu")
    tokens[1, :, ::7] = -1  # targets that do not count
    return tokens


@pytest.mark.parametrize("dtype, far", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["gpt2", "modern", "llama"])
def test_loss_and_gradients_are_those_of_float64(device, recipe, compiled, dtype, far):
    if compiled and device.type == "cpu":
        pytest.skip("compiling takes minutes on a CPU")
    exact, model = models(recipe, device, compiled=compiled)
    with autocast(device, dtype, keep_weights=False):
        loss = model(*batch().to(device))
    loss.backward()
    expected = exact_loss(exact)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=far / 10)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert (ours.grad.cpu().double() - theirs.grad).norm() < far * theirs.grad.norm()


def test_a_run_is_that_of_the_cpu_and_resumes(shards, trained, device, tmp_path):
    if device.type == "cpu":
        pytest.skip("tests/training/test_train.py shows it, to the bit")
    flags = ("--device", device, "--dtype", "bfloat16", "--save_every", 10, "--keep_last", 2)
    script(*train_args(shards, tmp_path / "whole", 20, *flags))
    tenth = tmp_path / "whole/checkpoints/model_step_000010.pt"
    script(*train_args(shards, tmp_path / "resumed", 20, *flags, "--resume", tenth))
    for run in ("whole", "resumed"):  # a GPU adds in another order each time
        assert gap(tmp_path / run, trained) < 1e-2


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
def test_a_sharded_model_computes_the_same(device, sharding, tmp_path):
    exact, model = models("gpt2", device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        weights = {name: x.float() for name, x in exact.state_dict().items()}
        wrapped = wrap(model.to("meta"), weights, Process(0, 1, device), sharding)
        loss = wrapped(*batch().to(device)).item()
    finally:
        dist.destroy_process_group()
    assert loss == pytest.approx(exact_loss(exact).item(), rel=1e-6)
