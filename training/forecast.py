"""Forecast of a run from its model's shape: bytes of memory by part, and time at a given MFU.

C channels, H heads, K key heads, D = C / H, I inner width of the MLP, V rows of the embedding;
`e` is the itemsize of the compute dtype. Tensors are counted, dropout's masks are not;
docs/SCALING.md compares the forecast with measured peaks.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from config import TrainConfig
from model import cpu, loss
from model.config import GPTConfig
from model.empty import empty_gpt
from model.loss import rows_within

MFU = 0.40  # llm.c's 124M on eight H100: 140 ms for 524,288 tokens (modded-nanogpt, 2024-10-13)
ASSUMED_GPU = "h100"  # of a device without a known peak
DOLLARS_PER_GPU_HOUR = 2.50
GPUS_PER_MACHINE = 8
HEAP_LIMIT = 2**25  # glibc maps larger tensors one by one; smaller ones share a heap
HEAP_HOLES = 1.25  # heap lost per byte of gradients and two moments: fitted, docs/SCALING.md


@dataclass(frozen=True)
class Memory:
    """Bytes of memory of one process, each part at its own peak."""

    weights: int
    """Float32 weights, this process's shard."""
    compute_weights: int
    """Weights for compute: all-gathered from shards, or cast by autocast."""
    gradients: int
    """Float32 gradients."""
    optimizer: int
    """Float32 moments: two for AdamW, one for Muon, and one number a row for NorMuon."""
    activations: int
    """Activations of one micro-batch that the backward pass needs."""
    work: int
    """Logits chunk and the head's gradients, or one block's backward pass, whichever is larger."""
    heap_holes: int
    """Fragmentation of glibc's heap on a CPU."""
    snapshot: int
    """Copy of weights and optimizer state on the main process's host, until a save is written."""
    peak: int
    """Device memory of training; on a CPU with saving, which takes from the same memory."""


@cache
def block_matrices(shape: GPTConfig) -> dict[str, torch.Size]:
    """Return the shapes of the weights of a block's linear layers."""
    block = empty_gpt(replace(shape, n_layer=1)).transformer.h[0]
    return {name: p.shape for name, p in block.named_parameters() if p.dim() == 2}


@cache
def count_parameters(shape: GPTConfig) -> tuple[int, int]:
    """Return the parameters of all blocks' linear layers, and of the rest with padding."""
    model = empty_gpt(shape)
    layers = [layer for block in model.transformer.h for layer in (block.attn, block.mlp)]
    blocks = sum(p.numel() for layer in layers for p in layer.parameters())
    return blocks, sum(p.numel() for p in model.parameters()) - blocks


def block_activations(
    shape: GPTConfig, e: int, checkpointing: str, device: str, window: int | None = None
) -> int:
    """Return the bytes per token that autograd keeps of one block, which attends to a window or to
    all tokens."""
    C, inner, H, swiglu = shape.n_embd, shape.inner, shape.n_head, shape.activation == "swiglu"
    qk = (H + shape.kv_heads) * shape.head_size
    qkv, fc = (block_matrices(shape)[f"{name}.weight"][0] for name in ("attn.c_attn", "mlp.c_fc"))
    window = min(window or shape.block_size, shape.block_size)
    windowed, grouped = window < shape.block_size, shape.kv_heads < H
    rotary_e, attention_e = (
        4 if device == "cpu" and tokens <= cpu.SHORT else e for tokens in (shape.block_size, window)
    )
    shifted = e * C * (shape.conv > 1 and device == "cuda")  # inputs of compiled convolutions
    # queries, keys and values in chunks of a window, keys and values twice, and the mask
    chunks = attention_e * (C + 4 * (C if grouped else qk - C) + 2 * window)
    if checkpointing == "block":  # the block's input in float32
        return 4 * C
    if checkpointing == "cheap":  # and the outputs of linear layers and attention, its logsumexp
        kept = chunks if windowed and device == "cuda" else 0  # the compiler keeps chunks
        return 4 * C + e * (qkv + C + fc + C) + attention_e * C + 4 * H + 9 * shifted + kept
    # float32: input of both norms (RMSNorm: output), mean and deviation (scale); logsumexp
    norms = 2 * (C + (2 if shape.norm == "layer" else 1)) + H
    norms += (H + shape.kv_heads) * shape.qk_norm
    norms += 2 * C * (shape.conv > 1)  # outputs of the convolutions
    # compute dtype: inputs of the linear layers, of the activation and of the gate's product
    linears = 3 * C + inner + fc + inner * swiglu
    if windowed:  # before the chunks q and k after RMSNorm; compiled also the output of c_attn
        attention = rotary_e * qk * shape.qk_norm + (e * qkv if device == "cuda" else 0) + chunks
    else:  # q and k after RMSNorm and after rotation; keys and values repeated for query heads;
        # the output of c_attn that values are a view of, or their upcast
        steps = shape.qk_norm + (shape.position == "rotary")
        values = qkv - qk if steps and attention_e != e else qkv
        values = (0 if steps else values) + 2 * C if grouped else values
        attention = attention_e * (steps * qk + values)
    before_cast = attention_e * C if attention_e != e else 0  # output of attention
    return 4 * norms + e * linears + attention + before_cast + shifted


def head_bytes(tokens: int, n_embd: int, vocab: int, e: int, device: str) -> int:
    """Return the bytes that model/loss.py holds at the end of the forward pass: float32 gradients
    of input and embedding, their low-precision copies, a chunk of logits with two float32 tensors
    of its softmax, and a chunk of the embedding's gradient (twice in bfloat16 on a CPU)."""
    head = cpu.CPUHeadCrossEntropy if device == "cpu" else loss.HeadCrossEntropy
    rows = loss.chunk_rows(tokens, rows_within(head.logits_bytes, 4 * vocab))
    softmax_bytes = cpu.SOFTMAX_BYTES if device == "cpu" else head.logits_bytes
    softmax_rows = min(rows, rows_within(softmax_bytes, 4 * vocab))
    grad_rows = min(vocab, rows_within(head.matmul_bytes, e * n_embd))
    copies = e if e < 4 else 0
    grad_e = e + (4 if device == "cpu" and e < 4 else 0)
    return (
        (4 + copies) * (vocab + tokens) * n_embd
        + vocab * (e * rows + 8 * softmax_rows)
        + grad_e * grad_rows * n_embd
    )


def backward_bytes(shape: GPTConfig, tokens: int, e: int, checkpointing: str, device: str) -> int:
    """Return the bytes that the last block's backward pass holds: the embedding's gradient, float32
    gradients of the residual stream (2C), gradients of the activation function's output and input,
    and recomputed activations."""
    window = shape.window_of(shape.n_layer - 1)
    recomputed = block_activations(shape, e, "none", device, window)
    recomputed -= block_activations(shape, e, checkpointing, device, window)
    mlp = e * (shape.inner + block_matrices(shape)["mlp.c_fc.weight"][0])
    per_token = 8 * shape.n_embd + mlp + recomputed
    return 4 * shape.padded_vocab_size * shape.n_embd + tokens * per_token


def heap_holes(shape: GPTConfig, tokens: int, e: int, shards: int) -> int:
    """Return the bytes that glibc's heap loses to fragmentation: gradients are allocated where
    activations were freed, and the next activations do not fit between them."""
    if tokens * shape.n_embd * e >= HEAP_LIMIT:
        return 0
    sizes = (4 * matrix.numel() // shards for matrix in block_matrices(shape).values())
    return int(HEAP_HOLES * shape.n_layer * 3 * sum(n for n in sizes if n < HEAP_LIMIT))


def state_bytes(
    config: TrainConfig, shape: GPTConfig, e: int, shards: int, accumulation: int
) -> tuple[int, int, int, int, int]:
    """Return weights, weights for compute, gradients, optimizer and snapshot of a Memory, divided
    by `shards` processes; 1 where nothing is sharded."""
    L, sharding = shape.n_layer, config.sharding
    matrices = L * sum(matrix.numel() for matrix in block_matrices(shape).values())
    blocks, rest = count_parameters(shape)
    total = blocks + rest
    if shards > 1:  # zero3 gathers the current block, the next, and a buffer to receive it
        gathered = min(3, L) * blocks // L if sharding == "zero3" else blocks
        compute_weights = e * gathered + 4 * rest
    else:
        compute_weights = e * matrices if e < 4 and config.activation_checkpointing == "none" else 0
    whole_gradients = sharding == "zero1" and accumulation > 1
    gradients = 4 * (total if whole_gradients else total // shards)
    moments, recipe = 8 * total, config.resolved_recipe
    if recipe.optimizer == "muon":
        rows = L * sum(matrix[0] for matrix in block_matrices(shape).values())
        moments -= 4 * matrices - (4 * rows if recipe.normuon else 0)
    return 4 * (total // shards), compute_weights, gradients, moments // shards, 4 * total + moments


def forecast_memory(
    config: TrainConfig,
    shape: GPTConfig,
    device: str,
    dtype: torch.dtype,
    world_size: int,
    nodes: int = 1,
) -> Memory:
    """Return the memory of one of `world_size` processes on devices of type `device`. Sharding
    divides state among the processes of each of `nodes` machines."""
    e, checkpointing = dtype.itemsize, config.activation_checkpointing
    tokens = config.micro_batch_size * shape.block_size
    accumulation = config.sequences_per_step(world_size) // config.micro_batch_size // world_size
    sharded = config.sharding != "none" and world_size > 1
    shards = world_size // nodes
    weights, compute_weights, gradients, optimizer, snapshot = state_bytes(
        config, shape, e, shards if sharded else 1, accumulation
    )
    windows = [shape.window_of(layer) for layer in range(shape.n_layer)]
    per_token = sum(block_activations(shape, e, checkpointing, device, w) for w in windows)
    # the final norm's input and statistics; targets, ids of tokens and n-grams
    per_token += 4 * shape.n_embd + 8 + 8 + 8 * shape.ngrams
    activations = tokens * per_token
    work = max(
        head_bytes(tokens, shape.n_embd, shape.padded_vocab_size, e, device),
        backward_bytes(shape, tokens, e, checkpointing, device),
    )
    live = activations + work + gradients
    if accumulation == 1 and (world_size == 1 or sharded):  # gradients replace activations
        live = max(activations + work, gradients)
    peak, holes = weights + compute_weights + optimizer + live, 0
    if device == "cpu":
        holes = heap_holes(shape, tokens, e, shards if sharded else 1)
        intervals = (config.save_every, config.eval_every)
        saves_during = any(0 < every < config.max_steps for every in intervals)
        at_end = weights + optimizer + (2 if sharded else 1) * snapshot  # gathered, then copied
        peak = max(peak + holes + saves_during * snapshot, at_end)
    return Memory(
        weights, compute_weights, gradients, optimizer, activations, work, holes, snapshot, peak
    )


def training_seconds(flops: float, world_size: int, peak_flops: float, checkpointing: str) -> float:
    """Return the time of a model's FLOPs at MFU; recomputed blocks take a third more."""
    return flops * (4 / 3 if checkpointing == "block" else 1) / (world_size * peak_flops * MFU)
