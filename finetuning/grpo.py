"""GRPO (Shao et al. 2024): learn from sampled completions, compared within groups of one prompt.

A step takes `batch_size` prompts, samples `group_size` completions of each, and makes one optimizer
step from them. The completions of a step have indices: number i belongs to prompt i // group_size.
Each process samples some of the completions, so a group can be spread over several processes.

Shapes: N completions of a batch, T tokens of prompt and completion with padding.
"""

import time
from itertools import chain

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from config import SamplingConfig
from finetuning.completions import Completion, complete_questions
from finetuning.examples import Batch, Example, Question
from finetuning.methods import Method, PreparedStep, Sums, token_logprobs
from finetuning.rewards import RewardError, RewardFunction
from model.gpt import GPT
from utils.errors import UserError
from utils.seeds import hash_seed


class GroupRelativePolicy(Method):
    """GRPO: a completion becomes likelier if its reward is above the mean of its group, else less
    likely. The reference model, if there is one, adds a KL divergence to the loss. `examples` are
    Questions."""

    reward_function: RewardFunction  # never None: FinetuneOptions requires --reward for grpo

    def __post_init__(self) -> None:
        super().__post_init__()  # reads the questions
        # Trial call: a reward function that fails must end the run here, before --overwrite removes
        # the checkpoints of another run. The first question's right answer serves as a completion's
        # text; a reward model reads token ids instead, here only those of the prompt.
        question = self.examples[0]  # a Question; read_examples refuses a file without rows
        # token ids and a mask of those that count in the loss, here none
        example = Example.of_completion(question.prompt_ids, [])
        answer = str(question.row.get("answer", ""))  # a row may have a number there
        completion = Completion(question.row, answer, example, is_cut=False)
        # a micro-batch for each process, because the function may fail on one machine alone: then
        # set_rewards raises RewardError on all
        self.set_rewards([[completion]] * self.process.data_parallel)

    def to_example(self, row: dict) -> Question:
        return self.encoder.question(
            row,
            self.options.max_new_tokens,  # which must fit into the context after the prompt
            has_answer=self.options.reward == "exact",  # other rewards may not need an "answer"
        )

    def prepare(self, model: GPT, step: int, example_ids: np.ndarray) -> PreparedStep:
        """Sample and reward the completions of a step: `group_size` for each question whose index
        is in `example_ids` (batch_size,). Return the batches of this process. Every process must
        call it."""
        group_size = self.options.group_size
        # The random numbers of a completion depend only on seed, step and index, so that any number
        # of processes samples the same completions.
        seed = hash_seed(f"{self.options.seed} {step}")
        # temperature 1: the policy that learns is the one that samples, as policy_losses assumes
        sampling = SamplingConfig(self.options.max_new_tokens, temperature=1.0, seed=seed)
        # one Question per completion: 7, 7, 2, 2 for the examples 7 and 2 in groups of two
        questions = [self.examples[i] for i in np.repeat(example_ids, group_size)]
        start_seconds = time.perf_counter()
        # [[Completion, ...], ...] of all processes; a resumed run samples the same ones again
        micro_batches = self.complete_and_reward(model, questions, sampling)
        rollout_seconds = time.perf_counter() - start_seconds
        completions = list(chain.from_iterable(micro_batches))  # of the step, group after group

        # float64 rounds the means over groups and over the step less
        rewards = torch.tensor(
            [completion.reward for completion in completions], dtype=torch.float64
        )
        rewards = rewards.view(-1, group_size)  # (batch_size, group_size)
        advantages = group_advantages(rewards).flatten().tolist()
        for completion, advantage in zip(completions, advantages, strict=True):
            completion.advantage = advantage  # make_batch copies it into Batch.advantages
        batches = [
            self.make_batch(micro_batch) for micro_batch in self.own_micro_batches(micro_batches)
        ]

        metrics = completion_metrics(completions, rewards)
        metrics["rollout_ms"] = 1000 * rollout_seconds  # of this process; part of the step's "ms"
        # text for samples.txt: the first group's prompt, then reward and text of each completion
        sample = f"prompt: {completions[0].row['prompt']!r}"
        for completion in completions[:group_size]:
            sample += f"\n{completion.reward:g}  {completion.text!r}"
        # `batches` are of this process. finetune.py divides their summed losses by `divisor`, the
        # number of completions of all processes: the sum over the processes is then the mean.
        return PreparedStep(batches, divisor=len(completions), metrics=metrics, sample=sample)

    def complete_and_reward(
        self, model: GPT, questions: list[Question], sampling: SamplingConfig
    ) -> list[list[Completion]]:
        """Return one completion per question, with its reward, in micro-batches. Each process
        samples and rewards some of them, and gets those of all: a group can be spread over several
        processes. Raise Stopped after a signal. Every process must call it."""

        def complete_micro_batch(indices: list[int]) -> list[Completion]:
            """Return the completions of a micro-batch, which has consecutive indices."""
            questions_here = [questions[index] for index in indices]
            # the index and the seed of a completion determine its random numbers
            return complete_questions(
                model, questions_here, self.encoder, sampling, self.process, first_index=indices[0]
            )

        # to_micro_batches makes lists of --micro_batch_size indices
        all_indices = list(range(len(questions)))
        micro_batches = self.process.map_across_processes(
            complete_micro_batch, self.to_micro_batches(all_indices)
        )
        self.set_rewards(micro_batches)  # in place
        return micro_batches

    def set_rewards(self, micro_batches: list[list[Completion]]) -> None:
        """Set the reward of each completion; each process rewards some micro-batches. Raise
        RewardError on every process if the function fails on one. Every process must call it."""
        # of this process, by the index of the micro-batch: {0: [1.0, 0.0, ...], 2: [...]}
        rewards_by_index: dict[int, list[float]] = {}
        try:
            # raise_on_all: a function may fail on one machine alone. without_timeout: it may take
            # longer than TIMEOUT, after which a collective of a waiting process would fail.
            with self.process.raise_on_all(), self.process.without_timeout():
                for index in self.own_micro_batches(list(range(len(micro_batches)))):
                    rewards_by_index[index] = self.reward_function(micro_batches[index])
        except UserError as error:
            raise RewardError(str(error)) from error  # finetune.py's loop catches it, to save
        for index, rewards in self.process.merge(rewards_by_index).items():  # of all processes
            for completion, reward in zip(micro_batches[index], rewards, strict=True):
                completion.reward = reward

    @torch.no_grad()
    def make_batch(self, completions: list[Completion]) -> Batch:
        """Return N completions as a batch, with their advantages, which `prepare` has set, and the
        log-probabilities of their tokens under the reference model, if there is one."""
        # idx and targets (N, T), last_columns (N,), on the device; the other fields are still None
        batch = super().make_batch([completion.example for completion in completions])
        advantages = torch.tensor([completion.advantage for completion in completions])
        batch.advantages = self.process.copy_to_device(advantages)  # (N,), float32
        if self.reference is not None:  # it is None with --kl 0
            with self.process.autocast(keep_weights=False):  # for one forward pass only
                batch.ref_logprobs = token_logprobs(self.reference, batch)  # (N, T)
        return batch

    def metric_sums(self, model: nn.Module, batch: Batch) -> Sums:
        # Each completion counts by its mean over tokens, so long ones do not weigh more.
        is_target = batch.targets >= 0  # (N, T): True if the next token is in the completion
        logprobs = token_logprobs(model, batch)  # (N, T), in nats; 0 where there is no target
        assert batch.advantages is not None  # make_batch sets it
        # (N, T): the value is -advantage, the gradient that of -advantage * logprob
        losses = policy_losses(logprobs, batch.advantages)
        sums: Sums = {}
        if batch.ref_logprobs is not None:
            kl = kl_estimate(logprobs, batch.ref_logprobs)  # (N, T), in nats
            sums["kl"] = mean_over_tokens(kl, is_target).sum()  # (N,) -> ()
            losses = losses + self.options.kl * kl
        sums["loss"] = mean_over_tokens(losses, is_target).sum()
        return sums

    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean reward of greedy completions, one per held-out question. There is no
        "loss", because GRPO's loss does not measure how good completions are."""
        sampling = SamplingConfig(self.options.max_new_tokens, temperature=0)  # greedy
        # of all processes: [[Completion, Completion, ...], ...]
        micro_batches = self.complete_and_reward(model, self.held_out, sampling)
        rewards = [completion.reward for completion in chain.from_iterable(micro_batches)]
        return {"reward": float(np.mean(rewards))}


def completion_metrics(completions: list[Completion], rewards: Tensor) -> dict[str, float]:
    """Return the metrics of a step's completions for the log; rewards (batch_size, group_size)."""
    is_equal = rewards == rewards[:, :1]  # (batch_size, group_size)
    # loss_mask is True for the tokens of the completion, and for the end token
    lengths = [completion.example.loss_mask.sum() for completion in completions]
    return {
        "reward": rewards.mean().item(),
        # share of groups whose rewards are all equal, from which nothing is learned but --kl
        "equal_rewards": is_equal.all(dim=1).double().mean().item(),
        "completion_tokens": float(np.mean(lengths)),
        # share of completions that reached --max_new_tokens before an end
        "cut": float(np.mean([completion.is_cut for completion in completions])),
    }


# the formulas


def group_advantages(rewards: Tensor) -> Tensor:
    """Return the advantages (groups, group_size) of rewards of the same shape: (reward - mean) /
    standard deviation within each group (Shao et al. 2024, section 4.1.2). A group of equal rewards
    gets 0."""
    mean = rewards.mean(dim=1, keepdim=True)  # (groups, 1)
    std = rewards.std(dim=1, keepdim=True)  # (groups, 1); divides by group_size - 1, as in trl
    advantages = (rewards - mean) / (std + 1e-4)  # 1e-4 as in trl
    # The mean of equal rewards can be rounded. Dividing that error by 1e-4 would give noise.
    is_equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return advantages.masked_fill(is_equal, 0.0)


def policy_losses(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return the policy gradient loss (N, T) of each token, for log-probabilities (N, T) and the
    advantages (N,) of the completions. Its value is -advantage; its gradient is the gradient of
    -advantage * logprob.

    This is equation 3 of Shao et al. 2024 for a single optimizer step per completion. The policy
    that learns is then the policy that sampled, so their ratio is 1 and never clipped.
    """
    # exp(x - x) is 1, but it has the derivative of x, because the second x is detached
    ratio = (logprobs - logprobs.detach()).exp()  # (N, T)
    return -advantages[:, None] * ratio  # all tokens of a completion have its advantage


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return an estimate (N, T) of the KL divergence from the reference model at each token, in
    nats: exp(ref - logprob) - (ref - logprob) - 1. It is unbiased and never negative (Shao et al.
    2024, equation 4)."""
    difference = ref_logprobs - logprobs  # log(reference / policy) of each token
    return difference.exp() - difference - 1


def mean_over_tokens(per_token: Tensor, is_target: Tensor) -> Tensor:
    """Return the mean (N,) of a value per token (N, T) over the targets of each completion."""
    # A mean over all tokens of the batch would give long completions more weight. The divisor is
    # never 0, because an empty completion still has its end token as a target.
    return (per_token * is_target).sum(1) / is_target.sum(1)
