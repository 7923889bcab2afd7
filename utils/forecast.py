"""What a run will need, before it runs: bytes of memory by part, and time at a stated speed.

Everything is arithmetic on plain values. N parameters of which R outside the blocks, L layers,
C width, H heads, V rows of the embedding, `e` bytes of the dtype of matrix products. Sizes are of
tensors; docs/SCALING.md holds them against measured peaks. Dropout's masks are not counted.
"""

from dataclasses import dataclass

from model.gpt import FEW_QUERIES
from model.loss import CHUNK_BYTES, PART_BYTES, rows_within

MFU = 0.40  # llm.c's 124M on eight H100: 140 ms for 524,288 tokens (modded-nanogpt, 2024-10-13)
GPU, PEAK_FLOPS = "H100", 989e12  # dense bfloat16, NVIDIA's data sheet
DOLLARS_PER_GPU_HOUR = 2.50
GPUS_PER_MACHINE = 8
HEAP_LIMIT = 2**25  # glibc maps larger tensors one by one; smaller ones share a heap
HEAP_HOLES = 1.25  # bytes lost there for each of gradients and optimizer: fitted, docs/SCALING.md


@dataclass(frozen=True)
class Memory:
    """Bytes of one process by part, at the worst moment of each."""

    weights: int
    """float32, this process's share."""
    gathered: int
    """Copies for compute: all-gathered, or autocast's in bfloat16."""
    gradients: int
    optimizer: int
    """AdamW's exp_avg and exp_avg_sq, float32."""
    activations: int
    """What forward keeps for backward, of one micro-batch."""
    work: int
    """Chunks of logits and the head's gradient, or one block's backward, whichever is more."""
    snapshot: int
    """Of weights and optimizer, on the main process's host until the file is written."""
    gathered_first: bool
    """What is saved is copied twice: gathered from shards or a GPU, then held by the writer."""
    gradients_last: bool
    """Gradients come to be only as activations go: one micro-step, and no buckets of DDP's."""
    holes: int
    """In malloc's heap, on a CPU."""

    @property
    def tensors(self) -> int:
        """The most that is alive at a time."""
        live = self.activations + self.work
        both = max(live, self.gradients) if self.gradients_last else live + self.gradients
        return self.weights + self.gathered + self.optimizer + both

    @property
    def peak(self) -> int:
        """Of training, without saving."""
        return self.tensors + self.holes

    def peak_with_saves(self, during: bool) -> int:
        """Where saving takes from the same memory, beside training or only at its end."""
        copies = 2 if self.gathered_first else 1
        end = self.weights + self.optimizer + copies * self.snapshot
        return max(self.peak + (self.snapshot if during else 0), end)


def parameters(n_layer: int, n_embd: int, block_size: int, rows: int) -> tuple[int, int]:
    """Parameters of the blocks' linear layers, and of the rest: embeddings and LayerNorms."""
    blocks = n_layer * (12 * n_embd**2 + 9 * n_embd)
    return blocks, (rows + block_size) * n_embd + n_layer * 4 * n_embd + 2 * n_embd


def block_activations(
    n_head: int, n_embd: int, e: int, checkpointing: str, attention_e: int
) -> int:
    """Bytes a token that autograd keeps of a block.

    float32: the inputs of both LayerNorms (2C), their means and deviations (4), logsumexp (H).
    In `e`: the inputs of the four linear layers (C, C, C, 4C), the GELU's input (4C).
    In the bytes of attention's dtype: q, k, v (3C), and its result (C) if that is not `e`.
    """
    if checkpointing == "block":
        return 4 * n_embd
    in_e = {"none": 11, "mlp": 7, "cheap": 5}[checkpointing]
    attention = (3 if attention_e == e else 4) * attention_e
    return 2 * 4 * n_embd + 4 * 4 + 4 * n_head + (in_e * e + attention) * n_embd


def activations(
    tokens: int,
    n_layer: int,
    n_head: int,
    n_embd: int,
    e: int,
    checkpointing: str,
    attention_e: int,
) -> int:
    """Bytes that one micro-batch of `tokens` keeps between forward and backward: the blocks, the
    last LayerNorm (its input in float32, mean, deviation), token ids and targets."""
    blocks = n_layer * block_activations(n_head, n_embd, e, checkpointing, attention_e)
    return tokens * (blocks + 4 * n_embd + 8 + 16)


def head_bytes(tokens: int, n_embd: int, rows: int, e: int, device: str) -> int:
    """Bytes alive in model/loss.py beside the activations, at the end of the forward pass.

    float32: the gradients of input and embedding. In `e`: a chunk's part of the latter; below
    float32 also copies of both; a chunk of logits, and the one before as it is made. Of those in a
    part of a chunk, three float32.
    """
    low = 0 if e == 4 else e * (rows + tokens) * n_embd
    chunk = min(tokens, rows_within(CHUNK_BYTES, device, e * rows))
    part = min(chunk, rows_within(PART_BYTES, device, 4 * rows))
    logits = rows * (e * min(tokens, 2 * chunk) + 12 * part)
    return 4 * (rows + tokens) * n_embd + e * rows * n_embd + low + logits


def backward_bytes(
    tokens: int, n_head: int, n_embd: int, rows: int, e: int, checkpointing: str, attention_e: int
) -> int:
    """Bytes alive beside the activations in the backward pass of the last block: the embedding's
    gradient, the gradients of the residual stream (2C, float32) and of the GELU's output and input
    (8C in `e`), and what is computed again."""
    again = block_activations(n_head, n_embd, e, "none", attention_e)
    again -= block_activations(n_head, n_embd, e, checkpointing, attention_e)
    return 4 * rows * n_embd + tokens * (8 * n_embd + 8 * e * n_embd + again)


def gathered_bytes(blocks: int, rest: int, n_layer: int, sharding: str, e: int) -> int:
    """Bytes of weights gathered from shards: the blocks in `e`, the rest in float32. zero3 has the
    block at work, the next, and the buffer that came in."""
    if sharding == "zero3":
        blocks = min(3, n_layer) * blocks // n_layer
    return e * blocks + 4 * rest


def heap_holes(tokens: int, n_layer: int, n_embd: int, e: int, shards: int) -> int:
    """Bytes that glibc's malloc holds beside the tensors: gradients and moments are laid where
    activations were freed, and the next activations no longer fit in between."""
    if tokens * n_embd * e >= HEAP_LIMIT:
        return 0
    matrices = (4 * size * n_embd**2 // shards for size in (3, 1, 4, 4))
    small = sum(size for size in matrices if size < HEAP_LIMIT)
    return int(HEAP_HOLES * n_layer * 3 * small)


def memory(
    *,
    n_layer: int,
    n_head: int,
    n_embd: int,
    block_size: int,
    rows: int,
    micro_batch_size: int,
    accumulation: int,
    world_size: int,
    shards: int,
    sharding: str,
    e: int,
    checkpointing: str,
    device: str,
) -> Memory:
    """Bytes of one of `world_size` processes, which divide their state `shards` ways."""
    blocks, rest = parameters(n_layer, n_embd, block_size, rows)
    total, tokens = blocks + rest, micro_batch_size * block_size
    sharded = sharding != "none" and world_size > 1
    share = total // shards if sharded else total
    # whole until the last micro-step, or in DDP's buckets
    whole = not sharded or (sharding == "zero1" and accumulation > 1)
    kept = {"none": 12, "mlp": 8, "cheap": 1, "block": 0}[checkpointing]  # of 12 C^2 a block
    attention_e = 4 if device == "cpu" and block_size <= FEW_QUERIES else e
    cast = 0 if e == 4 else e * blocks * kept // 12
    return Memory(
        weights=4 * share,
        gathered=gathered_bytes(blocks, rest, n_layer, sharding, e) if sharded else cast,
        gradients=4 * (total if whole else share),
        optimizer=8 * share,
        activations=activations(tokens, n_layer, n_head, n_embd, e, checkpointing, attention_e),
        work=max(
            head_bytes(tokens, n_embd, rows, e, device),
            backward_bytes(tokens, n_head, n_embd, rows, e, checkpointing, attention_e),
        ),
        snapshot=12 * total,
        gathered_first=sharded or device != "cpu",
        gradients_last=accumulation == 1 and (world_size == 1 or sharded),
        holes=heap_holes(tokens, n_layer, n_embd, e, total // share) if device == "cpu" else 0,
    )


def seconds(flops: float, world_size: int, peak_flops: float, checkpointing: str) -> float:
    """Time for a model's FLOPs on all processes at MFU, which does not count work done again."""
    return flops * (4 / 3 if checkpointing == "block" else 1) / (world_size * peak_flops * MFU)
