"""Verifiable tasks by their config name. A new task is one new file and one line here."""

from jax_grpo.tasks.environment import EnvironmentTask
from jax_grpo.tasks.policy import PolicyTask
from jax_grpo.tasks.toy import LengthTask

TASKS = {"policy": PolicyTask, "environment": EnvironmentTask, "length": LengthTask}
