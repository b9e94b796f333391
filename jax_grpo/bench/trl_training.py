"""TRL's `GRPOTrainer` trains what a config of ours trains: its start, prompts in their order, reward, schedule and stop rule.

`prepare` writes what a process of TRL's needs, with JAX; `train` is that process, without it. TRL is left as it comes but for what
it has no setting for: learning rates by optimiser step, completions that end where the task's stop rule ends them, and, for the
peer `TRL-positions`, positions that do not count padding.
"""

import functools
import json
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.bench.harness import torch_device
from jax_grpo.bench.machine import finished
from jax_grpo.bench.trl_settings import NotTheSame, require_same, trl_settings
from jax_grpo.config import Config
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import Prompt, Task, TrainerState, checked_score, total_reward
from jax_grpo.tasks.stop import StopRule

PEERS = ("TRL", "TRL-positions")
START, GIVEN, WEIGHTS = "start", "given.pickle", "weights"  # in the folder that `prepare` and `train` share


class Given(NamedTuple):
    """What TRL's process is given beside the start: everything in the order in which our run has it."""

    config: Config
    prompts: list[Prompt]  # of all iterations
    rates: list[float]  # by optimiser step


def prepare(config: Config, folder: Path) -> None:
    """Writes the start as a Hugging Face folder and `Given`, from the same objects that `jax_grpo.train` makes of the config."""
    from jax_grpo.export.tokenizer import save_for_transformers
    from jax_grpo.model.weights import save_hf
    from jax_grpo.optimiser import schedule
    from jax_grpo.trainer import Trainer

    require_same(config)
    trainer = Trainer(config.with_micro_batches(1))
    architecture = trainer.policy.architecture
    save_hf(folder / START, architecture, trainer.state.params, trainer.tokenizer)
    save_for_transformers(trainer.tokenizer, folder / START, architecture.max_position_embeddings)
    prompts = [prompt for iteration in range(config.iterations) for prompt in trainer.draws.in_order(iteration)[1]]
    trainer.task.close()
    rate = schedule(config.update, config.optimizer_steps())
    rates = [np.asarray(rate(step)).item() for step in range(config.iterations * config.update.epochs)]
    (folder / GIVEN).write_bytes(pickle.dumps(Given(config, prompts, rates)))


def train(folder: Path, every: int, *, positions: bool) -> dict[str, Any]:
    """Trains with TRL and saves weights after every so many iterations; `points`: [iteration, seconds of training until then].

    The clock stands still while weights are saved. `rewards` are each iteration's mean, in the order of iterations.

    Raises:
        NotTheSame: TRL asked other prompts than those that ours would, or stepped by another learning rate.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig

    given: Given = pickle.loads((folder / GIVEN).read_bytes())
    config, task = given.config, make_task(given.config.task)
    tokenizer = AutoTokenizer.from_pretrained(folder / START, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    reward, clock = Reward(task, given), _clock(folder / WEIGHTS, config, every)
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=torch_device() == "cpu", shuffle_dataset=False, disable_dropout=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, report_to=[], **trl_settings(config),
    )  # fmt: skip
    texts = [prompt.text for prompt in given.prompts]
    trainer = _trainer_class()(
        rates=given.rates, stop=Stop(task.stop_rule, config.model.tokenizer, _start_state(given.prompts)),
        model=str(folder / START), args=arguments, processing_class=tokenizer, reward_funcs=reward, callbacks=[clock],
        train_dataset=Dataset.from_dict({"prompt": texts, "row": list(range(len(texts)))}),
    )  # fmt: skip
    for model in (trainer.model, trainer.ref_model) if positions else ():
        if model is not None:
            count_real_tokens(model)
    try:
        trainer.train()
    finally:
        task.close()
    if len(clock.rates) != len(given.rates) or not np.allclose(clock.rates, given.rates, rtol=1e-9, atol=0):
        raise NotTheSame(f"TRL's learning rates were {clock.rates[:3]}...; expected {given.rates[:3]}...")
    return {"points": clock.points, "rewards": reward.means, "completion_lengths": reward.lengths}


def _start_state(prompts: Sequence[Prompt]) -> int:
    """Of the stop rule, the same for all prompts of a style."""
    states = {prompt.start_state for prompt in prompts}
    assert len(states) == 1, "the policy task asks all prompts alike"
    return states.pop()


class Reward:
    """The task's reward as a function of TRL's, which also looks whether the prompts are those of our run's iteration."""

    __name__ = "reward"

    def __init__(self, task: Task, given: Given):
        self._task, self._given = task, given
        self.means: list[float] = []
        self.lengths: list[float] = []  # mean tokens of a completion

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], row: list[int], **_: Any
    ) -> list[float]:
        config, iteration = self._given.config, len(self.means)
        asked, group = config.prompts.per_iteration, config.rollout.group_size
        expected = np.repeat(np.arange(iteration * asked, (iteration + 1) * asked), group).tolist()
        if row != expected:
            raise NotTheSame(
                f"iteration {iteration}: TRL asked prompts {row[:3]}...; expected {expected[:3]}..., the order of our run"
            )
        prompts = [self._given.prompts[number] for number in row]
        texts = [
            self._task.stop_rule.truncate(text, prompt.start_state)[0]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        state = TrainerState(iteration, config.iterations)
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


def _trainer_class() -> type[Any]:
    """Made when it is asked for: TRL takes ten seconds to import."""
    import torch
    from transformers import StoppingCriteriaList
    from trl.trainer.grpo_trainer import GRPOTrainer

    class Trainer(GRPOTrainer):
        """TRL's, with our learning rates and a stop rule."""

        def __init__(self, *, rates: Sequence[float], stop: Stop, **given: Any):
            super().__init__(**given)
            self._rates, self._stop = rates, stop
            model: Any = self.model
            generate = model.generate

            @functools.wraps(generate)
            def generate_until_stop(*arguments: Any, **options: Any) -> Any:
                return generate(*arguments, stopping_criteria=StoppingCriteriaList([stop.criterion()]), **options)

            model.generate = generate_until_stop

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            of: Any = optimizer or self.optimizer
            peak, last = self.args.learning_rate, len(self._rates) - 1
            factor = lambda step: self._rates[min(step, last)] / peak  # noqa: E731 (asked once more after the last step)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(of, factor)
            return self.lr_scheduler

        def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
            completion_ids, logprobs = super()._generate_single_turn(*arguments, **options)
            return [self._stop.cut(ids) for ids in completion_ids], logprobs

    return Trainer


def count_real_tokens(model: Any) -> None:
    """Gives every forward pass that names no positions those that padding does not count for."""
    forward_of = model.forward  # not its class's: TRL has put its fused head on the model itself

    @functools.wraps(forward_of)  # `generate` looks at its arguments
    def forward(*args: Any, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        return forward_of(*args, attention_mask=attention_mask, position_ids=position_ids, **more)

    model.forward = forward


def _clock(weights: Path, config: Config, every: int) -> Any:
    """A callback that times the iterations, and saves the weights before the first, after every so many, and after the last."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.points: list[tuple[int, float]] = []
            self.rates: list[float] = []
            self._seconds = self._since = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            self._save(0, parts["model"])

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            self.rates.append(parts["optimizer"].param_groups[0]["lr"])

        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            iteration, rest = divmod(state.global_step, config.update.epochs)
            if rest == 0 and (iteration % every == 0 or iteration == config.iterations):
                finished(None)
                self._seconds += time.perf_counter() - self._since
                self._save(iteration, parts["model"])

        def _save(self, iteration: int, model: Any) -> None:
            model.save_pretrained(weights / f"{iteration:06d}")
            self.points.append((iteration, self._seconds))
            print(json.dumps({"iteration": iteration, "seconds": self._seconds}), flush=True)
            self._since = time.perf_counter()

    return Clock()
