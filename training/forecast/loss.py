"""Forecast of the loss of a new model from its size and its tokens, by published scaling laws.

The laws were fitted to models of at least some millions of parameters on at least 100M tokens of
the web. Far below, only their differences between sizes are of use: --minutes chooses by them.
"""

import math

from model.config import GPTConfig

FEWEST_FITTED_TOKENS = 100_000_000  # tokens of the shortest run that fitted_loss was fitted to
# Approach 3 of Hoffmann et al. 2022 ("Chinchilla"): the loss is LOWEST + A / N^ALPHA + B / D^BETA
# for N parameters and D tokens.
LOWEST, A, ALPHA, B, BETA = 1.69, 406.4, 0.34, 410.7, 0.28
# Mean number of bytes of text in one of these tokens: their MassiveText has 10.5 TB of text, which
# are 2.35T tokens (Rae et al. 2021).
FITTED_BYTES_PER_TOKEN = 4.5
# Most rows of the token embedding (and of an untied head) that count as parameters: rows of rare
# tokens learn little. With 12,000 of GPT-2's 50,257, 1 x 64 and 2 x 128 (layers, channels) differ
# as in four pairs of measured runs (docs/BENCHMARKS.md, machines A and H), to 0.2 nats.
COUNTED_ROWS = 12_000
# Muennighoff et al. 2023, section 5: after so many repeats of the text, or so many times the
# parameters that are best for it, the value of one more has fallen to 1 / e.
REPEATED_TOKENS, EXCESS_PARAMETERS = 15.4, 5.3
MOST_EPOCHS = 1 + 3 * REPEATED_TOKENS  # they have 95 % of what repeats can give


def fitted_loss(num_parameters: float, num_tokens: float) -> float:
    """Return the loss, in nats per GPT-2 token, that a model reaches after `num_tokens` tokens of
    C4, each read once. Formula: Muennighoff et al. 2023 (github.com/huggingface/datablations)."""
    return 1.87 + 521 / num_parameters**0.3527 + 1488 / num_tokens**0.3527


def compared_loss(num_parameters: float, num_tokens: float, text_tokens: float) -> float:
    """Return a loss by which runs compare that train in equal time on a text of `text_tokens`
    tokens: that of Hoffmann et al. 2022, where repeated tokens, and parameters beyond the best
    number for the part of the text that is read, count less and less (Muennighoff et al. 2023,
    equation 6). Both numbers of tokens are multiplied by token_worth; `num_parameters` counts at
    most COUNTED_ROWS rows of a table of tokens."""
    unique_tokens = min(num_tokens, text_tokens)  # tokens of the text that are read at all
    # The best number of parameters N for D = unique_tokens: of all with the same product N D the
    # loss is lowest where ALPHA A / N^ALPHA = BETA B / D^BETA.
    best_parameters = (ALPHA * A / (BETA * B) * unique_tokens**BETA) ** (1 / ALPHA)
    # After an excess of EXCESS_PARAMETERS (5.3) times the best number, or after REPEATED_TOKENS
    # (15.4) repeats of the text, one more parameter or token is worth 1 / e.
    effective_parameters = effective_number(num_parameters, best_parameters, EXCESS_PARAMETERS)
    effective_tokens = effective_number(num_tokens, unique_tokens, REPEATED_TOKENS)
    # the fit of Hoffmann et al. 2022, with the effective numbers as N and D
    return LOWEST + A / effective_parameters**ALPHA + B / effective_tokens**BETA


def token_worth(vocab_size: int) -> float:
    """Return how many tokens of the scaling law one token is worth: 0.22 for bytes, 1 for GPT-2's
    tokens and larger vocabularies, between them a power of `vocab_size`. A byte says less than a
    token, so models of bytes are to be smaller. The bytes per token of the text do not decide: code
    has half of those of novels, and wants models as large (docs/BENCHMARKS.md)."""
    gpt2_vocab_size = GPTConfig.vocab_size  # 50257
    # 0.285: the power with which a vocabulary of 256 bytes gets 1 / FITTED_BYTES_PER_TOKEN
    power = math.log(FITTED_BYTES_PER_TOKEN) / math.log(gpt2_vocab_size / 256)
    return min(1.0, (vocab_size / gpt2_vocab_size) ** power)


def effective_number(number: float, full: float, decay: float) -> float:
    """Return what a number is worth if only `full` of it counts fully. `full` is the tokens of the
    text that are read at all, or the parameters that are best for them. `decay` is in multiples of
    `full`: after so many, one more is worth 1 / e. 1 x 10^6 tokens that are read 16 times, with a
    decay of 15.4, are worth 10.6 x 10^6."""
    excess = max(0.0, number / full - 1)  # in multiples of `full`; 0 if all of the number counts
    return min(number, full) + full * decay * (1 - math.exp(-excess / decay))


def describe_loss(num_parameters: int, num_tokens: int) -> str:
    """Return a sentence about the loss to expect of this number of parameters and tokens, and about
    a better size for the same compute, which is about 6 x parameters x tokens."""
    fit = "the fit of Muennighoff et al. 2023"
    if num_tokens < FEWEST_FITTED_TOKENS:
        return (
            f"loss to expect: {fit} has no runs of under {FEWEST_FITTED_TOKENS / 1e6:.0f}M tokens"
        )
    loss = fitted_loss(num_parameters, num_tokens)
    text = f"loss to expect: about {loss:.2f}, by {fit}, for text like C4, read once, with AdamW"
    # For a fixed product of parameters and tokens, the loss is lowest where the two terms of the
    # fit are equal: 521 / parameters^a = 1488 / tokens^a, with a = 0.3527.
    best_parameters = (521 / 1488) ** (0.5 / 0.3527) * (num_parameters * num_tokens) ** 0.5
    best_tokens = num_parameters * num_tokens / best_parameters
    best_loss = fitted_loss(best_parameters, best_tokens)
    # Propose a size only if its loss is clearly lower and the fit covers its number of tokens.
    if loss - best_loss > 0.02 and best_tokens > FEWEST_FITTED_TOKENS:
        text += (
            f"; for the same compute it is lowest, {best_loss:.2f}, with "
            f"{best_parameters / 1e6:,.0f}M parameters and {best_tokens / 1e9:,.2f}B tokens"
        )
    return text
