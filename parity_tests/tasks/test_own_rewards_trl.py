"""Reward functions as TRL's users write them give the advantages that TRL's own trainer makes of them on the same completions."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both import show
from trl_judge import trl_trainer  # noqa: F401 (a fixture)

from jax_grpo.advantages import combined_advantages, group_advantages
from jax_grpo.config.learning import AdvantageConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.tasks.base import Component, Prompt, total_reward
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tasks.rewards import RewardsTask
from torch_ref.advantages import component_advantages
from torch_ref.advantages import group_advantages as torch_group_advantages
from torch_ref.compare import difference

GROUPS = np.repeat([0, 1], 4)
ROWS = [
    {"prompt": "What is 2+2? ", "answer": "4", "kind": "sum"},
    {"prompt": "Say a long word: ", "answer": "", "kind": "word"},
]
COMPLETIONS = [
    "<answer>4</answer>", "<answer>5</answer>", "it is 4", "<answer> 4</answer> surely",
    "internationally", "a", "<answer></answer>", "aaaaaaaaaaaaaaaaaa",
]  # fmt: skip
IDS = [[3 + len(text) % 7] * len(text.split()) * 3 for text in COMPLETIONS]


# As a user of TRL writes them.
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def reward_num_unique_chars(completions, **kwargs):
    return [len(set(c)) for c in completions]


def format_reward_func(completions, **kwargs):
    pattern = r"^<answer>.*?</answer>$"
    return [1.0 if re.match(pattern, content) else 0.0 for content in completions]


def accuracy_reward_func(prompts, completions, answer, kind, log_metric=None, **kwargs):
    """About sums alone: None elsewhere."""
    rewards = []
    for completion, right, requested in zip(completions, answer, kind, strict=True):
        actual = re.search(r"(\d+)", completion)
        rewards.append(float(actual is not None and actual.group(1) == right) if requested == "sum" else None)
    log_metric("share_of_sums", np.mean([requested == "sum" for requested in kind]))
    return rewards


async def tokens_reward_func(completion_ids, trainer_state, **kwargs):
    return [len(ids) / (10 + trainer_state.global_step) for ids in completion_ids]


FUNCTIONS = [reward_len, reward_num_unique_chars, format_reward_func, accuracy_reward_func, tokens_reward_func]
WEIGHTS = [0.1, 0.5, 1.0, 2.0, 3.0]


def of_trl(trainer, functions, weights, **attributes) -> np.ndarray:
    """Advantages that TRL's trainer makes of the completions, which take the place of what it would generate."""
    inputs = [row for row in ROWS for _ in range(4)]
    prompt_ids = [[3, 4, 5]] * len(inputs)
    attributes |= {
        "_generate": lambda prompts: (prompt_ids, IDS, None, COMPLETIONS, None, {}, None, None),
        "reward_funcs": functions,
        "reward_func_names": [function.__name__ for function in functions],
        "reward_processing_classes": [None] * len(functions),
        "reward_weights": torch.tensor(weights),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in attributes.items():
            patch.setattr(trainer, name, value, raising=name != "async_loop")
        return trainer._generate_and_score_completions(inputs)["advantages"].numpy()


def ours(functions, weights) -> dict[str, Component]:
    """Components of our task on the same completions."""
    task = RewardsTask(task_of(name="prompts", reward_weights=weights), functions)
    columns = [{name: value for name, value in row.items() if name != "prompt"} for row in ROWS for _ in range(4)]
    prompts = [Prompt(row["prompt"], 0, columns=own) for row, own in zip(np.repeat(ROWS, 4), columns, strict=True)]
    try:
        return checked_score(task, prompts, COMPLETIONS, IDS)
    finally:
        task.close()


@pytest.mark.slow  # TRL takes ten seconds to import
@pytest.mark.parametrize("functions", [[0], [1], [2], [3, 0], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_advantages_of_the_same_functions_equal_trls(trainer, scale, functions):
    chosen, weights = [FUNCTIONS[i] for i in functions], [WEIGHTS[i] for i in functions]
    expected = of_trl(trainer, chosen, weights, scale_rewards=scale)
    _agree(chosen, weights, scale, expected)


@pytest.mark.slow
def test_coroutines_are_awaited_as_in_trl(trainer):
    import asyncio
    import threading

    loop = asyncio.new_event_loop()  # TRL makes one where a function is a coroutine as the trainer is made
    threading.Thread(target=loop.run_forever, daemon=True).start()
    expected = of_trl(trainer, FUNCTIONS, WEIGHTS, async_loop=loop)
    loop.call_soon_threadsafe(loop.stop)
    _agree(FUNCTIONS, WEIGHTS, "group", expected)


@pytest.mark.slow
def test_gdpo_of_the_same_functions_equals_trls_where_none_is_none(trainer):
    chosen, weights = FUNCTIONS[:3], WEIGHTS[:3]
    expected = of_trl(trainer, chosen, weights, multi_objective_aggregation="normalize_then_sum")
    components = np.stack([x.values_B for x in ours(chosen, weights).values()])
    config = AdvantageConfig(components="gdpo")
    components_KPG = jnp.asarray(components).reshape(len(weights), -1, 4)
    actual = combined_advantages(components_KPG, jnp.asarray(weights), config)[0].reshape(-1)
    reference = component_advantages(
        torch.from_numpy(components.T), weights, torch.from_numpy(GROUPS), components="gdpo"
    )
    for name, advantages in (("jax_grpo", actual), ("torch_ref", reference)):
        show(name, {"advantages": difference(name, advantages, expected)}, 1e-5)


@pytest.mark.slow
def test_trls_own_packaged_reward_runs_as_it_is(trainer):
    from trl.rewards import get_soft_overlong_punishment

    chosen = [get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=6)]
    expected = of_trl(trainer, chosen, [1.0], scale_rewards="group")
    assert np.abs(expected).max() > 0.5
    _agree(chosen, [1.0], "group", expected)


def _agree(functions, weights, scale: str, expected: np.ndarray) -> None:
    components = ours(functions, weights)
    rewards = total_reward(components, dict(zip(components, weights, strict=True)))
    actual = group_advantages(jnp.asarray(rewards).reshape(-1, 4), AdvantageConfig(scale=scale))[0].reshape(-1)
    reference = torch_group_advantages(torch.from_numpy(rewards), torch.from_numpy(GROUPS), scale=scale)
    for name, advantages in (("jax_grpo", actual), ("torch_ref", reference)):
        # float32: sums of five rewards of size 20 in another order, divided by their deviation
        show(name, {"advantages": difference(name, advantages, expected)}, 1e-5)
    assert np.abs(expected).max() > 0.1
