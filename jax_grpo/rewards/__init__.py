"""Ready-made reward functions with the signature of TRL's: `task.rewards_from: jax_grpo.rewards:NAME`.

Each takes completions, texts or lists of messages, and columns of the data by their names. Knows nothing of tasks or models.
"""

from jax_grpo.rewards.countdown import countdown
from jax_grpo.rewards.formats import tagged_answer, think_format
from jax_grpo.rewards.mathematics import math_answer
from jax_grpo.rewards.numeric import gsm8k_answer, last_number

__all__ = ["countdown", "gsm8k_answer", "last_number", "math_answer", "tagged_answer", "think_format"]
