"""What is compiled and sent on GPUs, at full size, without one: fake tensors have shapes and no
memory, the fake process group has ranks and no network."""

from collections import Counter

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from conftest import slow, train_options
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from test_counts import GatedBlock
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from model import chunked_loss
from model.config import GPTConfig
from model.execution import Execution, compile_static, execute
from model.gpt import GPT, Block
from model.initial_weights import build_without_weights, new_model
from model.loss import has_fast_loss
from recipes import parse_recipe
from training.forecast.blocks import measure_blocks
from training.forecast.memory import Hardware, forecast_memory
from training.optimizers import make_optimizers
from training.parallel import data_parallel as parallel
from training.parallel.data_parallel import sync_gradients
from utils.devices import autocast
from utils.distributed import Process

CPU, GPU = torch.device("cpu"), torch.device("cuda")
VOCABULARY = 50257


@pytest.fixture
def compile_with(monkeypatch):
    """Make torch.compile use another backend; nothing that was compiled before is taken."""

    def patch(backend):
        torch._dynamo.reset()
        compile_ = torch.compile
        monkeypatch.setattr(torch, "compile", lambda f, **kw: compile_(f, backend=backend, **kw))
        return backend

    with torch._dynamo.config.patch(error_on_recompile=True, optimize_ddp=True):
        yield patch


@pytest.fixture
def fake_ranks():
    """Start a process group of ranks that exist in name alone; this one is rank 0."""
    store = FakeStore()
    yield lambda size: dist.init_process_group("fake", store=store, rank=0, world_size=size)
    dist.destroy_process_group()


@pytest.fixture
def loss_of_gpus(monkeypatch):
    """Compute the loss of CPU tensors as on a GPU."""
    for name in ("LOGITS_BYTES", "MATMUL_BYTES", "SOFTMAX_BYTES"):
        monkeypatch.setattr(chunked_loss, f"{name}_ON_CPU", getattr(chunked_loss, name))


class Graphs:
    """Backend that keeps the graphs of the forward and backward pass as the compiler cuts them."""

    def __init__(self):
        self.forward, self.backward = [], []

    def __call__(self, graph, inputs):
        def keep(graphs):
            def compile_(graph, _):
                graphs.append(graph)
                return make_boxed_func(graph.forward)

            return compile_

        return aot_autograd(
            fw_compiler=keep(self.forward),
            bw_compiler=keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )(graph, inputs)


@pytest.mark.parametrize(
    "recipe, checkpointing, block_class",
    [
        ("gpt2", "none", Block),
        ("modern", "cheap", Block),
        ("gpt2,tied=False", "cheap", GatedBlock),
        slow("modern", "none", Block),
    ],
)
def test_a_step_of_blocks_of_124M_has_one_graph_for_all_and_keeps_what_is_forecast(
    compile_with, loss_of_gpus, recipe, checkpointing, block_class, monkeypatch
):
    monkeypatch.setattr("model.gpt.Block", block_class)
    graphs, tokens = compile_with(Graphs()), 64 * 1024
    options = train_options(recipe=recipe, n_layer=3)
    shape = options.model_config(parse_recipe(recipe), VOCABULARY)
    has_fast_loss(build_without_weights(GPT, shape))  # true numbers; later ones are fake
    compiled_loss = compile_static(chunked_loss.cross_entropy_)
    monkeypatch.setattr(chunked_loss, "cross_entropy_by_rows_", compiled_loss)
    with FakeTensorMode():
        model = build_without_weights(GPT, shape)
        weights = {name: torch.empty(x.shape) for name, x in model.state_dict().items()}
        model.load_state_dict(weights, assign=True)
        execution = Execution(checkpointing, compiled=True)
        execute(model, execution)
        idx = torch.zeros(64, 1024, dtype=torch.long)
        with autocast(CPU, torch.bfloat16, keep_weights=False):
            nats = model(idx, idx)
        nats.backward()
    block, head = graphs.forward
    assert len(graphs.backward) == 1
    for graph in (block, head, *graphs.backward):  # a scatter would split the compiler's loops
        assert not [node for node in graph.graph.nodes if "scatter" in str(node.target)]
    (output,) = (node for node in block.graph.nodes if node.op == "output")
    saved = {}  # of what has a row for each token; the rest are weights
    for node in output.args[0][1:]:  # the first is the block's result, not kept
        x = node.meta["val"]
        if x.dim() > 1 and x.shape[0] in (64, 64 * 8, tokens):
            saved[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    kept = sum(saved.values()) / tokens
    blocks = measure_blocks(shape, execution, "cuda", torch.bfloat16)
    forecast = blocks[0].activation_bytes / 1024  # bytes per token
    assert kept == pytest.approx(forecast, rel=0.01)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_sharded_blocks_run_one_graph_in_every_layer_and_micro_step(
    compile_with, fake_ranks, sharding
):
    fake_ranks(8)
    counter, residual_dtypes = compile_with(CompileCounter()), set()
    model, weights = new_model(GPT, GPTConfig(16, 257, 3, 4, 64), seed=0)
    execute(model, Execution(compiled=True))
    wrapped = parallel.wrap(model, weights, Process(0, 8, CPU, torch.bfloat16), sharding)

    def note_dtype(module, inputs):
        residual_dtypes.add(inputs[0].dtype)

    model.transformer.ln_f.register_forward_pre_hook(note_dtype)
    idx = torch.randint(0, 257, (2, 16))
    for micro_step in range(6):  # two steps of three micro-steps
        with sync_gradients(wrapped, sharding, is_last=micro_step % 3 == 2):
            with autocast(CPU, torch.bfloat16, keep_weights=False):
                nats = wrapped(idx, idx)
            nats.backward()
        wrapped.zero_grad()
    assert counter.frame_count == 1 and residual_dtypes == {torch.float32}


class Collectives(TorchDispatchMode):
    """Number of collectives by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls[func._schema.name.removeprefix("c10d::").strip("_")] += 1
        return func(*args, **kwargs or {})


# blocks so wide that their gradients take more than anything else
WIDE = {"n_embd": 6144, "n_head": 48, "micro_batch_size": 1, "activation_checkpointing": "block"}


@pytest.mark.parametrize(
    "sharding, given",
    [
        ("zero1", {}),
        ("zero2", {}),
        ("zero3", WIDE),
        slow("zero3", {}),
        slow("zero1", WIDE | {"activation_checkpointing": "cheap"}),
        slow("zero3", WIDE | {"dtype": "float32", "recipe": "llama,n_kv_head=8"}),
    ],
)
def test_eight_machines_of_eight_send_and_hold_what_docs_scaling_says(
    fake_ranks, loss_of_gpus, monkeypatch, sharding, given
):
    fake_ranks(64)
    mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("replicate", "shard"))
    monkeypatch.setattr(parallel, "init_device_mesh", lambda *_, **__: mesh)
    accumulation, layers = 2, 4
    given = {"n_layer": layers, "micro_batch_size": 8, "dtype": "bfloat16", **given}
    batch = given["micro_batch_size"]
    total_batch_size = 64 * 1024 * batch * accumulation
    config = train_options(sharding=sharding, total_batch_size=total_batch_size, **given)
    dtype = getattr(torch, config.dtype)
    recipe = parse_recipe(config.recipe)
    shape = config.model_config(recipe, VOCABULARY)
    sent, memory = Collectives(), MemTracker()
    # fake weights are not drawn
    monkeypatch.setattr(parallel, "fill_model", lambda model, *_: model.to_empty(device="cpu"))
    with FakeTensorMode():
        model = build_without_weights(GPT, shape)
        execute(model, Execution(config.activation_checkpointing))
        parallel.wrap(model, {}, Process(0, 64, CPU, dtype, replicas=8), sharding)
        optimizers = make_optimizers(model, config, recipe, dtype)
        idx = torch.zeros(batch, 1024, dtype=torch.long)

        def step(before_forward=lambda: None):
            for micro_step in range(accumulation):
                before_forward()
                with sync_gradients(model, sharding, is_last=micro_step == accumulation - 1):
                    with autocast(CPU, dtype, keep_weights=False):
                        nats = model(idx, idx)
                    nats.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        step()  # makes the optimizer's state
        memory.track_external(model, *optimizers, idx)
        with memory, sent:
            step(memory.reset_mod_stats)

    once = layers + 1  # blocks, and the embeddings with the final norm
    scatters = 1 if sharding == "zero1" else accumulation
    gathers = layers * 2 * accumulation + 1 if sharding == "zero3" else once
    assert sent.calls == {
        "allgather_base": gathers, "reduce_scatter_base": once * scatters, "allreduce": once,
    }  # fmt: skip
    peak_flops = memory.get_tracker_snapshot("peak")[CPU]["Total"]
    forecast = forecast_memory(config, recipe, shape, Hardware(GPU, dtype, 0, 64, 8))
    assert peak_flops == pytest.approx(sum(forecast.values()), rel=0.1)
