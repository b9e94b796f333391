"""TRL's `GRPOTrainer` trains what a config of ours trains: its start, prompts in their order, reward, schedule and stop rule.

    python -m jax_grpo.bench.trl_training STEP FOLDER PEER EVERY

is one of three steps in a process of its own, which prints its record: `prepare` and `evaluate` with JAX, `train` without. TRL is
left as it comes but for what it has no setting for: learning rates by optimiser step, completions that end where the task's stop
rule ends them, and, for the peer `TRL-positions`, positions that do not count padding.
"""

import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_grpo.bench.runner import torch_device
from jax_grpo.bench.trl_settings import NotTheSame, require_same, trl_settings
from jax_grpo.config import Config
from jax_grpo.model.tokenizer import Tokenizer, tokenizer_of
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import Prompt, Task, TrainerState, total_reward
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tasks.stop import StopRule

PEERS = ("TRL", POSITIONS := "TRL-positions")
CONFIG, START, INPUTS, WEIGHTS = (
    "config.json",
    "start",
    "inputs.pickle",
    "weights",
)  # in the folder that the steps share


def prepare(config: Config, folder: Path, peer: str, every: int) -> dict[str, Any]:
    """Writes what TRL's process needs, from the same objects that `jax_grpo.train` makes of the config.

    The start as a Hugging Face folder; the prompts of all iterations and the rates of all optimiser steps, in the order of our run.
    """
    from jax_grpo.model.weights import save_hf
    from jax_grpo.optimiser import schedule
    from jax_grpo.trainer import Trainer

    require_same(config)
    trainer = Trainer(config.with_micro_batches(1))
    save_hf(folder / START, trainer.policy.architecture, trainer.state.params, trainer.tokenizer)
    prompts = [prompt for iteration in range(config.iterations) for prompt in trainer.prompts.in_order(iteration)[1]]
    trainer.task.close()
    rate = schedule(config.update, config.optimizer_steps())
    rates = [np.asarray(rate(step)).item() for step in range(config.iterations * config.update.epochs)]
    (folder / INPUTS).write_bytes(pickle.dumps((prompts, rates)))
    return {}


def train(config: Config, folder: Path, peer: str, every: int) -> dict[str, Any]:
    """Trains with TRL and saves weights after every so many iterations (`saved`), with the seconds of training before (`clock`).

    The clock stands still while weights are saved. `rewards` are each iteration's mean, in the order of iterations.

    Raises:
        NotTheSame: TRL asked other prompts than those that ours would, or stepped by another learning rate.
    """
    from jax_grpo.bench import trl_peer

    prompts, rates = pickle.loads((folder / INPUTS).read_bytes())
    task, (start_state,) = make_task(config.task), {prompt.start_state for prompt in prompts}  # the policy task has one
    reward, clock = Reward(task, config, prompts), trl_peer.Clock(folder / WEIGHTS, every)
    arguments = trl_peer.GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=torch_device() == "cpu", shuffle_dataset=False, disable_dropout=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, report_to=[], **trl_settings(config),
    )  # fmt: skip
    trainer = trl_peer.StoppingTrainer(
        rates=rates, stop=Stop(task.stop_rule, tokenizer_of(config.model), start_state), model=str(folder / START),
        args=arguments, processing_class=trl_peer.tokenizer_in(folder / START), reward_funcs=reward, callbacks=[clock],
        train_dataset=trl_peer.dataset([prompt.text for prompt in prompts]),
    )  # fmt: skip
    if peer == POSITIONS:
        trl_peer.change_models(trainer, trl_peer.count_real_tokens)
    try:
        trainer.train()
    finally:
        task.close()
    if len(clock.rates) != len(rates) or not np.allclose(clock.rates, rates, rtol=1e-9, atol=0):
        raise NotTheSame(f"TRL's learning rates were {clock.rates[:3]}...; expected {rates[:3]}...")
    about = {"rewards": reward.means, "completion_lengths": reward.lengths}
    return {"saved": clock.iterations, "clock": clock.seconds, **about}


def evaluate(config: Config, folder: Path, peer: str, every: int) -> dict[str, Any]:
    """`scores` of every folder of weights, in the order of iterations, as a run's own evaluation makes them."""
    from jax_grpo.policy.named import load_policy
    from jax_grpo.prompts.dataset import heldout_rows
    from jax_grpo.train import make_evaluator
    from jax_grpo.trainer import Trainer

    trainer = Trainer(config.with_micro_batches(1))
    evaluator = make_evaluator(trainer, heldout_rows(config, trainer.positions, trainer.task.read))
    assert evaluator is not None, "a config without held-out positions is refused"
    scores = []
    for weights in sorted((folder / WEIGHTS).iterdir()):
        model = config.model.model_copy(update={"weights": str(weights)})
        params = load_policy(model, config.seed, config.context()).params
        scores.append(evaluator(params, int(weights.name)).metrics)
    trainer.task.close()
    return {"scores": scores}


class Reward:
    """The task's reward as a function of TRL's, which also looks whether the prompts are those of our run's iteration."""

    __name__ = "reward"

    def __init__(self, task: Task, config: Config, prompts: Sequence[Prompt]):
        self._task, self._config, self._prompts = task, config, prompts
        self.means: list[float] = []
        self.lengths: list[float] = []  # mean tokens of a completion

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], row: list[int], **_: Any
    ) -> list[float]:
        iteration, count = len(self.means), self._config.prompts.per_iteration
        numbers = np.arange(iteration * count, (iteration + 1) * count)
        expected = np.repeat(numbers, self._config.rollout.group_size).tolist()
        if row != expected:
            raise NotTheSame(
                f"iteration {iteration}: TRL asked prompts {row[:3]}...; expected {expected[:3]}..., the order of our run"
            )
        prompts = [self._prompts[number] for number in row]
        texts = [
            self._task.stop_rule.truncate(text, prompt.start_state)[0]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        state = TrainerState(iteration, self._config.iterations)
        components = checked_score(self._task, prompts, texts, completion_ids, state)
        rewards_B = total_reward(components, self._task.component_weights)
        self.means.append(float(rewards_B.mean()))
        self.lengths.append(float(np.mean([len(ids) for ids in completion_ids])))
        return rewards_B.tolist()


class Stop:
    """The task's stop rule for `transformers`: which rows have ended, and completions cut after the token that ended them."""

    def __init__(self, rule: StopRule, tokenizer: str, start_state: int):
        self._accept, self._start_state = rule.accept, start_state
        self._table_SV = rule.token_table(Tokenizer.load(tokenizer))

    def criterion(self) -> Any:
        """A `StoppingCriteria` of one call of `generate`."""
        import torch

        table_SV, state_B = torch.from_numpy(self._table_SV).to(torch_device()), None

        def ended(input_ids: Any, scores: Any, **_: Any) -> Any:
            nonlocal state_B
            state_B = torch.full_like(input_ids[:, 0], self._start_state) if state_B is None else state_B
            state_B = table_SV[state_B, input_ids[:, -1]].long()
            return state_B == self._accept

        return ended

    def cut(self, ids: Sequence[int]) -> list[int]:
        """The completion up to the token that ends it, which belongs to it, as in our rollout."""
        state = self._start_state
        for count, token in enumerate(ids, start=1):
            state = self._table_SV[state, token]
            if state == self._accept:
                return list(ids[:count])
        return list(ids)


STEPS = {"prepare": prepare, "train": train, "evaluate": evaluate}

if __name__ == "__main__":
    step, place, peer, every = sys.argv[1:]
    config = Config.model_validate(json.loads((Path(place) / CONFIG).read_text()))
    print(json.dumps(STEPS[step](config, Path(place), peer, int(every))))
