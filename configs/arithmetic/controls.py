"""Controls of configs/arithmetic.yaml: rewards from which sums cannot be learnt (docs/arithmetic.md)."""

import random
import re

from jax_grpo.rewards import last_number


def shuffled(completions, answer, trainer_state, **columns):
    """The right rewards, dealt to the completions of the batch by chance."""
    rewards = last_number(completions, answer)
    random.Random(trainer_state.global_step).shuffle(rewards)
    return rewards


def format_only(completions, **columns):
    """1.0 for an answer that ends in a number, whichever it is: `The answer is 8.`"""
    return [float(re.search(r"\d\W*$", completion[0]["content"]) is not None) for completion in completions]
