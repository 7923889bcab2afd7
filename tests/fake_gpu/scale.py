"""Count what one rank of up to 1,024 holds, sends and opens, without a GPU: print the table of
docs/SCALING.md, less than a minute a row.

    FAKE_GPUS=8 FAKE_MB=200000 bash RUN_SH python tests/fake_gpu/scale.py | grep '^|'

RUN_SH starts a command on a null CUDA device: PyTorch's CUDA build with a libcuda that allocates
host memory and whose kernels do nothing. FAKE_MB is above a GPU's memory, to count what does not
fit. Each row is train.py itself, compiled, in a process of its own, on shards that this script
makes, and saves nothing, as nobody answers. Memory that nobody writes costs the host none, so that
a rank of 175B parameters fits. Figures are those of the last step, seconds those of this machine.
"""

import ctypes
import multiprocessing
import os
import sys
import tempfile
import time
from functools import partialmethod
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import ret_work
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train
import training.run
from data.manifest import Manifest, ShardEntry, write_manifest
from recipes import parse_recipe
from training.forecast.memory import Hardware, forecast_memory
from training.parallel import data_parallel

# flags, and tokens of a micro-batch
MODELS = {
    "124M": ("--micro_batch_size 16", 16 * 1024),
    "1558M": ("--micro_batch_size 8 --model_type gpt2-xl", 8 * 1024),
    "7B": (
        "--micro_batch_size 2 --block_size 2048 --recipe llama,n_inner=11008 --n_layer 32 "
        "--n_head 32 --n_embd 4096",
        2 * 2048,
    ),
    "13B": ("--micro_batch_size 4 --model_type gpt3-13b", 4 * 2048),
    "175B": ("--micro_batch_size 4 --model_type gpt3-175b", 4 * 2048),
}
# model, --sharding, --activation_checkpointing, processes, rank, --tensor_parallel, --shard_across
ROWS = """124M none none 8 0 1 -
124M none cheap 8 0 1 -
124M none cheap 1024 1023 1 -
124M zero1 cheap 1024 0 1 8
1558M none cheap 1024 0 1 -
1558M zero1 cheap 1024 0 1 8
1558M zero2 cheap 8 0 1 8
1558M zero2 cheap 64 63 1 8
1558M zero2 cheap 1024 0 1 8
1558M zero2 cheap 1024 1023 1 8
1558M zero3 block 1024 0 1 8
7B zero1 block 1024 0 1 8
7B zero2 cheap 1024 0 1 8
7B zero2 block 1024 0 1 8
7B zero3 cheap 1024 0 1 8
7B zero3 block 1024 1023 1 8
13B zero3 block 1024 0 8 8
175B zero3 block 1024 0 8 1024
175B zero3 block 1024 1023 8 1024"""
KINDS = ("allreduce", "all_gather_single", "reduce_scatter_single")  # of collectives in a step
COLUMNS = (
    "model, --sharding, --activation_checkpointing, processes, rank, --tensor_parallel, "
    "--shard_across, s to start, shards opened, host syncs, all-reduce, all-gather, "
    "reduce-scatter, peak GB, forecast GB"
).split(", ")
calls: list[tuple[str, int]] = []  # (kind of collective, bytes of the whole tensors) of a step


class FakeGroup(dist.ProcessGroup):
    """Process group of ranks that exist in name alone. It counts its collectives, and says that
    they are done; PyTorch's own fake group has no results for DDP's reducer."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def collective(self, kind, outputs, inputs, *options):
        tensors = tree_leaves(outputs)
        if kind == "allgather":  # by which DDP compares the shapes of all ranks
            for tensor in tensors:
                tensor.copy_(inputs[0])
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if kind == "reduce_scatter_single":
            num_bytes *= self.size()  # of its input
        calls.append((kind, num_bytes))
        return ret_work(outputs)


for kind in (*KINDS, "allgather", "broadcast", "all_gather_single_coalesced"):
    setattr(FakeGroup, kind, partialmethod(FakeGroup.collective, kind))
# This group sends nothing, so a model that it divides has another loss.
data_parallel.refuse_wrong_division = lambda *arguments: None
dist.Backend.register_backend("counted", FakeGroup, devices=["cpu", "cuda"])


def make_shards(folder):
    """Write 1,000 small shards and their manifest."""
    shards: list[ShardEntry] = []
    for index in range(1000):
        split = "train" if index else "val"
        name = f"{split}_{index:06d}.npy"
        np.save(folder / name, np.zeros(3000, np.uint16))
        shards.append(ShardEntry(name, split, 3000, sha256=name))
    write_manifest(folder, Manifest(tokenizer="gpt2", vocab_size=50257, shards=shards))


def print_row(cells):
    """Print a row of the table in Markdown."""
    print("|", " | ".join(cells), "|", flush=True)


def measure(row, folder):
    """Run train.py as a row of the table says, print the row, and end this process."""
    cells = row.split()
    model_name, sharding, checkpointing, world_size, rank, tensor_parallel, shard_across = cells
    os.environ |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": "8", "RANK": rank}
    os.environ |= {"LOCAL_RANK": f"{int(rank) % 8}", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    store = dist.HashStore()
    dist.init_process_group("counted", store=store, rank=int(rank), world_size=int(world_size))
    flags, tokens = MODELS[model_name]
    # two micro-steps; DDP times its first ten steps, and waits for it
    flags += (
        f" --total_batch_size {2 * tokens * int(world_size) // int(tensor_parallel)} "
        f"--max_steps 12 --sharding {sharding} --tensor_parallel {tensor_parallel} "
        f"--activation_checkpointing {checkpointing} --data_dir {folder} --eval_every 0 "
        f"--checkpoint_dir {folder}/{os.getpid()} --sample_every 0"
    )
    if shard_across != "-":
        flags += f" --shard_across {shard_across}"
    sys.argv = ["train.py", *flags.split()]
    opened: list[str] = []
    sys.addaudithook(lambda event, args: event == "open" and opened.append(f"{args[0]}"))
    count_syncs = ctypes.CDLL(None).fakecuda_count
    train_step = train.train_step
    start = time.perf_counter()

    def counted_step(run, model, *arguments):
        if run.progress.step == 0:
            cells.append(f"{time.perf_counter() - start:.1f}")
            cells.append(f"{sum(path.endswith('.npy') for path in opened)}")
        calls.clear()
        torch.cuda.reset_peak_memory_stats()
        syncs_before = count_syncs(1)
        result = train_step(run, model, *arguments)
        config = run.options
        if run.progress.step + 1 < config.max_steps:
            return result

        cells.append(f"{count_syncs(1) - syncs_before}")
        for kind in KINDS:
            sizes = [num_bytes for called, num_bytes in calls if called == kind]
            cells.append(f"{len(sizes)}: {sum(sizes) / 1e9:.2f} GB")
        shape = getattr(model, "module", model).config  # DDP wraps the model
        forecast = forecast_memory(config, parse_recipe(config.recipe), shape, Hardware.of(config))
        for num_bytes in (torch.cuda.max_memory_allocated(), sum(forecast.values())):
            cells.append(f"{num_bytes / 1e9:.2f}")
        print_row(cells)
        os._exit(0)

    train.train_step = counted_step
    train.Saver.save = lambda *arguments, **changes: None
    training.run.check_space = lambda *arguments: None
    train.main()


def main():
    print_row(COLUMNS)
    print_row(["---"] * len(COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        make_shards(Path(folder))
        for row in sys.argv[1:] or ROWS.splitlines():
            process = multiprocessing.Process(target=measure, args=(row, folder))
            process.start()
            process.join()


if __name__ == "__main__":
    main()
