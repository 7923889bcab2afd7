"""Ideas of researchers, as exact edits of this project: what each changes, and in how many lines.

An edit names a file, a line or lines of it, and what replaces them. The tests apply it to a copy of
the project. If the code has changed, the test says which lines are gone.
"""

from dataclasses import dataclass, field
from pathlib import Path

BLOCK = "model/gpt.py"
# the last line of the constructor of Block, and the two lines of its forward pass
LAYERS = "        self.mlp = MLP(config)\n"
ATTENTION = "        x = x + self.attn(self.ln_1(x), angles, cache, mask)\n"
MLP = "        x = x + self.mlp(self.ln_2(x))\n"


@dataclass(frozen=True)
class Edit:
    """One edit of a file."""

    path: str
    old: str
    """Lines of the file, which occur once."""
    new: str


@dataclass(frozen=True)
class Idea:
    """An idea as edits, and what must be true of it."""

    name: str
    edits: list[Edit]
    begins: dict[str, str] = field(default_factory=dict)
    """What new weights satisfy, as Python of `x`, by the end of the parameter's name."""
    exports: bool = False
    """True if transformers computes the same; else the export is refused."""
    flags: tuple[str, ...] = ()
    is_divided: bool = True
    """False if --sharding refuses the model."""
    is_shared_by_processes: bool = True
    """False if --tensor_parallel refuses the model."""
    frozen: str = "no parameter"
    """End of the names of parameters that are not trained."""
    nanogpt_lines: int = 0
    """Lines that the same idea adds or changes in nanoGPT."""

    @property
    def lines(self) -> int:
        """Lines that the idea adds or changes here."""
        count = 0
        for edit in self.edits:
            old = edit.old.splitlines()
            count += sum(line not in old and line != "" for line in edit.new.splitlines())
        return count


def apply(idea: Idea, folder: Path) -> None:
    """Edit the copy of the project in a folder."""
    for edit in idea.edits:
        path = folder / edit.path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if edit.old:
            assert text.count(edit.old) == 1, f"{idea.name}: {edit.path} has no more:\n{edit.old}"
            text = text.replace(edit.old, edit.new)
        else:
            text = edit.new  # a new file
        path.write_text(text, encoding="utf-8")


MODEL_IDEAS = [
    Idea(
        "layer scale that begins at 0",
        [
            Edit(
                BLOCK,
                LAYERS,
                LAYERS + "        self.alpha = nn.Parameter(torch.zeros(config.n_embd))\n",
            ),
            Edit(BLOCK, MLP, "        x = x + (1 + self.alpha) * self.mlp(self.ln_2(x))\n"),
        ],
        begins={"alpha": "(x == 0).all()"},
        nanogpt_lines=2,
    ),
    Idea(
        "parameters of three shapes with an init of their own",
        [
            Edit(
                BLOCK,
                LAYERS,
                LAYERS
                + """\
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.empty(1, 1, config.n_embd))
        nn.init.trunc_normal_(self.shift, std=0.3)
        self.mix = nn.Parameter(torch.randn(2, config.n_embd, config.n_embd) * 0.1)
""",
            ),
            Edit(
                BLOCK,
                MLP,
                """\
        x = x + self.scale * self.mlp(self.ln_2(x) + self.shift)
        x = x + torch.einsum("btc,gcd->btd", self.ln_1(x), self.mix)
""",
            ),
        ],
        begins={
            "scale": "x == 0.5",
            "shift": "0.2 < x.std() < 0.4 and x.unique().numel() > 20",
            "mix": "0.08 < x.std() < 0.12",
        },
        nanogpt_lines=6,
    ),
    Idea(
        "gate that begins closed",
        [
            Edit(
                BLOCK,
                LAYERS,
                LAYERS
                + """\
        self.gate = nn.Linear(config.n_embd, config.n_embd)
        nn.init.zeros_(self.gate.weight)
        self.c_attn_gate = nn.Linear(config.n_embd, 1)
""",
            ),
            Edit(
                BLOCK,
                MLP,
                """\
        x = x + torch.sigmoid(self.gate(x)) * self.mlp(self.ln_2(x))
        x = x * (1 + self.c_attn_gate(x))
""",
            ),
        ],
        begins={
            "h.0.gate.weight": "(x == 0).all()",
            "gate.bias": "(x == 0).all()",
            "c_attn_gate.weight": "0.01 < x.std() < 0.03",
        },
        nanogpt_lines=5,
    ),
    Idea(
        "mixture of experts",
        [
            Edit(
                BLOCK,
                "class Block(nn.Module):\n",
                '''\
class Experts(nn.Module):
    """Four MLPs; a router chooses one for each token."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.n_embd, 4, bias=False)
        self.experts = nn.ModuleList(MLP(config) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + expert(x) * (weight * (choice == i)).unsqueeze(-1)
        return y


class Block(nn.Module):
''',
            ),
            Edit(BLOCK, LAYERS, "        self.mlp = Experts(config)\n"),
        ],
        begins={"router.weight": "0.01 < x.std() < 0.03"},
        nanogpt_lines=14,
    ),
    Idea(
        "buffers: a table of distances, and a counter",
        [
            Edit(
                BLOCK,
                LAYERS,
                LAYERS
                + """\
        slopes = 1 + torch.arange(config.n_embd) / config.n_embd
        self.register_buffer("slopes", slopes, persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
""",
            ),
            Edit(BLOCK, MLP, "        x = x + self.slopes * self.mlp(self.ln_2(x))\n"),
        ],
        nanogpt_lines=4,
    ),
    Idea(
        "causal convolution before attention",
        [
            Edit(
                BLOCK,
                LAYERS,
                LAYERS
                + "        self.conv = nn.Conv1d(config.n_embd, config.n_embd, 3, groups=4)\n",
            ),
            Edit(
                BLOCK,
                ATTENTION,
                "        x = x + self.conv(F.pad(x.mT, (2, 0))).mT\n" + ATTENTION,
            ),
        ],
        begins={"conv.weight": "0.1 < x.std() < 0.5"},
        nanogpt_lines=2,
    ),
    Idea(
        "another block in the last layer",
        [
            Edit(
                BLOCK,
                "class Transformer(nn.Module):\n",
                '''\
class LastBlock(Block):
    """Block whose MLP reads the stream before attention."""

    def forward(
        self, x: Tensor, angles: Angles | None, cache: KVCache | None, mask: Tensor | None
    ) -> Tensor:
        y = self.mlp(self.ln_2(x))
        return x + y + self.attn(self.ln_1(x), angles, cache, mask)


class Transformer(nn.Module):
''',
            ),
            Edit(
                BLOCK,
                "        self.ln_f = make_norm(config)\n",
                """\
        self.h[-1] = LastBlock(config, config.n_layer - 1)
        self.ln_f = make_norm(config)
""",
            ),
        ],
        nanogpt_lines=9,
    ),
    Idea(
        "post-norm",
        [
            Edit(
                BLOCK, ATTENTION, "        x = self.ln_1(x + self.attn(x, angles, cache, mask))\n"
            ),
            Edit(BLOCK, MLP, "        x = self.ln_2(x + self.mlp(x))\n"),
        ],
        nanogpt_lines=2,
    ),
    Idea(
        "another activation in place",
        [
            Edit(
                BLOCK,
                "        x = self.activate(x)  # (B, T, inner)\n",
                "        x = self.activate(x).tanh()  # (B, T, inner)\n",
            ),
        ],
        nanogpt_lines=1,
    ),
    Idea(
        "sliding window of 8 tokens",
        [
            Edit(
                "model/layers.py",
                "        queries_per_key = q.size(1) // k.size(1)\n",
                """\
        if mask is None:
            mask = q.new_ones(T, S, dtype=torch.bool).tril(S - T).triu(S - T - 8)
            is_causal = False
            if T == 1:
                mask = None  # as somebody who does not think of sampling
        queries_per_key = q.size(1) // k.size(1)
""",
            ),
        ],
        nanogpt_lines=4,
    ),
    Idea(
        "token shift",
        [
            Edit(
                BLOCK,
                MLP,
                """\
        x = x + self.mlp(self.ln_2(x))
        x = x + 0.5 * F.pad(x, (0, 0, 1, -1))
""",
            ),
        ],
        nanogpt_lines=1,
    ),
    Idea(
        "one MLP for all blocks, frozen embeddings",
        [
            Edit(
                BLOCK,
                "        self.ln_f = make_norm(config)\n",
                """\
        self.wte.weight.requires_grad_(False)
        for block in self.h:
            block.mlp = self.h[0].mlp
        self.ln_f = make_norm(config)
""",
            ),
        ],
        exports=True,
        is_divided=False,
        is_shared_by_processes=False,
        frozen="wte.weight",
        nanogpt_lines=3,
    ),
    Idea(
        "soft-capped logits by a field of GPTConfig",
        [
            Edit(
                "model/config.py",
                "    def __post_init__(self) -> None:\n",
                """\
    softcap: NonNegative = 0.0
    \"\"\"Logits stay within this number, by a tanh; 0: no limit.\"\"\"

    def __post_init__(self) -> None:
""",
            ),
            Edit(
                BLOCK,
                "        return self.head(x)\n",
                """\
        cap = self.config.softcap
        return cap * torch.tanh(self.head(x) / cap)
""",
            ),
        ],
        flags=("--recipe", "{recipe},softcap=0.5"),
        nanogpt_lines=3,
    ),
    Idea(
        "a second head in training",
        [
            Edit(
                BLOCK,
                "            self._init_weights()\n",
                """\
            self.next_head = nn.Linear(config.n_embd, config.vocab_size)
            self._init_weights()
""",
            ),
            Edit(
                BLOCK,
                """\
        if reduction == "none":
            return loss.view_as(targets)  # (B T,) -> (B, T)
""",
                """\
        if reduction == "none":
            return loss.view_as(targets)  # (B T,) -> (B, T)
        if self.training:  # predict the token after the next one, too
            logits = self.next_head(x[:, :-1]).flatten(0, 1)
            loss = loss + 0.1 * F.cross_entropy(logits, targets[:, 1:].flatten())
""",
            ),
        ],
        nanogpt_lines=4,
    ),
]

# How the loss of a token is defined; each value is the same line of GPT.token_losses.
LOSS = '        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")\n'
LOSS_IDEAS = [
    Idea(
        "z-loss",
        [
            Edit(
                BLOCK,
                LOSS,
                """\
        losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")
        return losses + 0.01 * logits.logsumexp(-1).square()
""",
            ),
        ],
        nanogpt_lines=2,
    ),
    Idea(
        "label smoothing",
        [Edit(BLOCK, LOSS, LOSS.replace('"none"', '"none", label_smoothing=0.1'))],
        nanogpt_lines=1,
    ),
    Idea(
        "a learned temperature",
        [
            Edit(
                BLOCK,
                "            self._init_weights()\n",
                """\
            self.temperature = nn.Parameter(torch.ones(()))
            self._init_weights()
""",
            ),
            Edit(
                BLOCK,
                "        return self.head(x)\n",
                "        return self.head(x) / self.temperature\n",
            ),
        ],
        nanogpt_lines=2,
    ),
]

OPTIMIZER = """\
import torch
from torch.optim import Optimizer


class {name}(Optimizer):
    def __init__(self, groups, recipe, weight_decay, dtype):
        super().__init__(groups, {{"lr": 0.0, "weight_decay": weight_decay}})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
{before}            for p in group["params"]:
                state = self.state[p]
{update}                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(update, alpha=0.01 * group["lr"])
"""
LION = """\
                m = state.setdefault("m", torch.zeros_like(p))
                update = (0.9 * m + 0.1 * p.grad).sign()
                m.lerp_(p.grad, 0.01)
"""
SHAMPOO = """\
                if "left" not in state:
                    state["pre"] = [torch.eye(n) * 1e-4 for n in p.shape]
                    state["left"] = True
                left, right = state["pre"]
                left += p.grad @ p.grad.T
                right += p.grad.T @ p.grad
                state["count"] = state.get("count", 0) + 1
                power = [torch.linalg.eigh(x / state["count"]) for x in (left, right)]
                roots = [(q * s.clamp(min=1e-8) ** -0.25) @ q.T for s, q in power]
                update = roots[0] @ p.grad @ roots[1]
"""


def optimizer_idea(name: str, before: str, update: str) -> Idea:
    """Return the idea of a new optimizer for the matrices: one file and one entry."""
    entry = '    "muon": MatrixOptimizer(moments=1, make=Muon),  # momentum\n'
    return Idea(
        name,
        [
            Edit(
                f"training/{name.lower()}.py",
                "",
                OPTIMIZER.format(name=name, before=before, update=update),
            ),
            Edit(
                "training/optimizers.py",
                "from training.muon import Muon, matrix_groups\n",
                f"from training.{name.lower()} import {name}\n"
                "from training.muon import Muon, matrix_groups\n",
            ),
            Edit(
                "training/optimizers.py",
                entry,
                f'{entry}    "new": MatrixOptimizer(moments=1, make={name}),\n',
            ),
        ],
        flags=("--recipe", "{recipe},optimizer=new"),
        nanogpt_lines=23,
    )


COUNT = '            group["count"] = group.get("count", 0) + 1\n'
COUNTED = '                update = update / group["count"] ** 0.1\n'
OPTIMIZER_IDEAS = [
    optimizer_idea("Lion", COUNT, LION + COUNTED),
    optimizer_idea("Shampoo", "", SHAMPOO),
]
# A checkpoint would lose its counter: refused after the first step.
LOST_COUNTER = optimizer_idea("Counted", "            self.calls += 1\n", LION)

LOOP_IDEAS = [
    Idea(
        "twice the sequences from step 3 on",
        [
            Edit(
                "train.py",
                "train_step(run, wrapped, optimizers, batches, micro_steps)",
                "train_step(run, wrapped, optimizers, batches, micro_steps * (1 + (step >= 3)))",
            ),
        ],
        nanogpt_lines=1,
    ),
    Idea(
        "shorter contexts until step 3",
        [
            Edit(
                "train.py",
                "        idx, targets = next(batches)  # token ids (B, T) each\n",
                """\
        idx, targets = next(batches)  # token ids (B, T) each
        if progress.step < 3:
            idx, targets = idx[:, :16], targets[:, :16]
""",
            ),
        ],
        nanogpt_lines=2,
    ),
]
# Tokens after 8 steps of 512: of twice as many for 5 steps, and of half as many for 3.
LOOP_TOKENS = [3 * 512 + 5 * 1024, 3 * 256 + 5 * 512]
