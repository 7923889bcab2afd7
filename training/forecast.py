"""What a run will need, before it runs: bytes of memory by part, and time at a stated speed.

Everything is arithmetic on a model's shape. C is its width, H its heads and K those of keys, I the
width inside the MLP, V the rows of the embedding, `e` the bytes of the dtype of matrix products.
Sizes are of tensors; docs/SCALING.md holds them against measured peaks, for GPT-2. Dropout's masks
are not counted.
"""

from dataclasses import dataclass

from model.config import GPTConfig
from model.functional import FEW_QUERIES
from model.loss import CHUNK_BYTES, PART_BYTES, SUM_BYTES, rows_within

MFU = 0.40  # llm.c's 124M on eight H100: 140 ms for 524,288 tokens (modded-nanogpt, 2024-10-13)
GPU, PEAK_FLOPS = "H100", 989e12  # dense bfloat16, NVIDIA's data sheet
DOLLARS_PER_GPU_HOUR = 2.50
GPUS_PER_MACHINE = 8
HEAP_LIMIT = 2**25  # glibc maps larger tensors one by one; smaller ones share a heap
HEAP_HOLES = 1.25  # times gradients and two moments is lost there: fitted, docs/SCALING.md


@dataclass(frozen=True)
class Memory:
    """Bytes of one process by part, at the worst moment of each."""

    weights: int
    """float32, this process's share."""
    gathered: int
    """Copies for compute: all-gathered, or autocast's in bfloat16."""
    gradients: int
    optimizer: int
    """float32: two moments, of Muon's matrices one."""
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


def matrices(shape: GPTConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of the weights of a block's linear layers."""
    C, gates = shape.n_embd, 2 if shape.activation == "swiglu" else 1
    return {
        "attn.c_attn": ((shape.n_head + 2 * shape.kv_heads) * shape.head_size, C),
        "attn.c_proj": (C, C),
        "mlp.c_fc": (gates * shape.inner, C),
        "mlp.c_proj": (C, shape.inner),
    }


def sizes(shape: GPTConfig) -> dict[str, int]:
    """Numbers in the weights of a block's linear layers."""
    return {name: rows * columns for name, (rows, columns) in matrices(shape).items()}


def parameters(shape: GPTConfig) -> tuple[int, int]:
    """Parameters of the blocks' linear layers, and of the rest: embeddings, head and norms."""
    biases = sum(rows for rows, _ in matrices(shape).values()) if shape.bias else 0
    blocks = shape.n_layer * (sum(sizes(shape).values()) + biases)
    tables = shape.padded_vocab_size * (1 if shape.tied else 2)
    tables += shape.block_size if shape.position == "learned" else 0
    vectors = 1 + (shape.norm == "layer" and shape.bias)
    return blocks, (tables + vectors * (2 * shape.n_layer + 1)) * shape.n_embd


def block_activations(shape: GPTConfig, e: int, checkpointing: str, attention_e: int) -> int:
    """Bytes a token that autograd keeps of a block.

    float32: the input of both norms, or the result (2C); their means and deviations; logsumexp (H).
    In `e`: the inputs of the four linear layers (C, C, C, I), the activation's input (I), or all
    that a gate is made of (3I). In the bytes of attention's dtype: q, k, v, also as they were
    before they turned (H + K), and of one length (H + K); its result (C) if that is not `e`.
    """
    C, inner, heads = shape.n_embd, shape.inner, shape.n_head + shape.kv_heads
    if checkpointing == "block":
        return 4 * C
    gated = shape.activation == "swiglu"
    into = 2 * inner if gated else inner  # the activation
    in_e = {
        "none": 3 * C + inner + (3 * inner if gated else inner),
        "mlp": 3 * C + into,
        "cheap": C + into,
    }[checkpointing]
    turned = (shape.position == "rotary") + shape.qk_norm
    attention = turned * heads * shape.head_size + (C if attention_e != e else 0)
    if shape.kv_heads < shape.n_head:
        attention += 2 * C  # keys and values, repeated for each head of queries
    if shape.kv_heads == shape.n_head or not turned:
        attention += (heads + shape.kv_heads) * shape.head_size
    scales = (8 if shape.norm == "layer" else 4) * 2 + 4 * heads * shape.qk_norm
    return 2 * 4 * C + scales + 4 * shape.n_head + in_e * e + attention * attention_e


def activations(shape: GPTConfig, tokens: int, e: int, checkpointing: str, attention_e: int) -> int:
    """Bytes that one micro-batch of `tokens` keeps between forward and backward: the blocks, the
    last norm (its input in float32, mean, deviation), token ids and targets."""
    blocks = shape.n_layer * block_activations(shape, e, checkpointing, attention_e)
    return tokens * (blocks + 4 * shape.n_embd + 8 + 16)


def head_bytes(tokens: int, n_embd: int, rows: int, e: int, device: str) -> int:
    """Bytes alive in model/loss.py beside the activations, at the end of the forward pass.

    float32: the gradients of input and embedding. In `e`: a chunk of logits, and below float32
    copies of input and embedding. Of a part of a chunk two float32; of a product that is added to
    the embedding's gradient one in `e` and, on a CPU, one float32.
    """
    low = 0 if e == 4 else e * (rows + tokens) * n_embd
    chunk = min(tokens, rows_within(CHUNK_BYTES, device, 4 * rows))
    part = min(chunk, rows_within(PART_BYTES, device, 4 * rows))
    added = min(rows, rows_within(SUM_BYTES, device, e * n_embd))
    wide = 4 if device == "cpu" and e < 4 else 0
    products = rows * (e * chunk + 8 * part) + added * (e + wide) * n_embd
    return 4 * (rows + tokens) * n_embd + low + products


def backward_bytes(
    shape: GPTConfig, tokens: int, e: int, checkpointing: str, attention_e: int
) -> int:
    """Bytes alive beside the activations in the backward pass of the last block: the head's
    gradient, the gradients of the residual stream (2C, float32) and of the activation's output and
    input (2I in `e`), and what is computed again."""
    again = block_activations(shape, e, "none", attention_e)
    again -= block_activations(shape, e, checkpointing, attention_e)
    inside = e * (shape.inner + matrices(shape)["mlp.c_fc"][0])
    return 4 * shape.padded_vocab_size * shape.n_embd + tokens * (8 * shape.n_embd + inside + again)


def gathered_bytes(blocks: int, rest: int, n_layer: int, sharding: str, e: int) -> int:
    """Bytes of weights gathered from shards: the blocks in `e`, the rest in float32. zero3 has the
    block at work, the next, and the buffer that came in."""
    if sharding == "zero3":
        blocks = min(3, n_layer) * blocks // n_layer
    return e * blocks + 4 * rest


def cast_bytes(shape: GPTConfig, e: int, checkpointing: str) -> int:
    """Bytes of the weights' copies in `e` that autograd keeps under autocast."""
    kept = {
        "none": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        "mlp": ("attn.c_attn", "attn.c_proj", "mlp.c_fc"),
        "cheap": ("attn.c_proj",),
        "block": (),
    }[checkpointing]
    return 0 if e == 4 else e * shape.n_layer * sum(sizes(shape)[name] for name in kept)


def heap_holes(shape: GPTConfig, tokens: int, e: int, shards: int) -> int:
    """Bytes that glibc's malloc holds beside the tensors: gradients are laid where activations were
    freed, and the next activations no longer fit in between."""
    if tokens * shape.n_embd * e >= HEAP_LIMIT:
        return 0
    shares = (4 * size // shards for size in sizes(shape).values())
    small = sum(share for share in shares if share < HEAP_LIMIT)
    return int(HEAP_HOLES * shape.n_layer * 3 * small)


def memory(
    shape: GPTConfig,
    *,
    muon: bool,
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
    blocks, rest = parameters(shape)
    total, tokens = blocks + rest, micro_batch_size * shape.block_size
    sharded = sharding != "none" and world_size > 1
    share = total // shards if sharded else total
    # whole until the last micro-step, or in DDP's buckets
    whole = not sharded or (sharding == "zero1" and accumulation > 1)
    attention_e = 4 if device == "cpu" and shape.block_size <= FEW_QUERIES else e
    of_muon = shape.n_layer * sum(sizes(shape).values())
    optimizer = 8 * total - (4 * of_muon if muon else 0)
    return Memory(
        weights=4 * share,
        gathered=gathered_bytes(blocks, rest, shape.n_layer, sharding, e)
        if sharded
        else cast_bytes(shape, e, checkpointing),
        gradients=4 * (total if whole else share),
        optimizer=optimizer // shards if sharded else optimizer,
        activations=activations(shape, tokens, e, checkpointing, attention_e),
        work=max(
            head_bytes(tokens, shape.n_embd, shape.padded_vocab_size, e, device),
            backward_bytes(shape, tokens, e, checkpointing, attention_e),
        ),
        snapshot=4 * total + optimizer,
        gathered_first=sharded or device != "cpu",
        gradients_last=accumulation == 1 and (world_size == 1 or sharded),
        holes=heap_holes(shape, tokens, e, total // share) if device == "cpu" else 0,
    )


def seconds(flops: float, world_size: int, peak_flops: float, checkpointing: str) -> float:
    """Time for a model's FLOPs on all processes at MFU, which does not count work done again."""
    return flops * (4 / 3 if checkpointing == "block" else 1) / (world_size * peak_flops * MFU)
