"""A config trained by `jax_grpo` and by TRL, one after the other: held-out scores against iterations and against seconds.

    python docs/experiments/time_to_score.py --config configs/quickstart.yaml --every 20 --seeds 0 --out docs/results/time_to_score

Both begin with the same weights, read the same prompts in the same order, and have the same reward and settings (`trl_settings`,
which refuses what TRL has no counterpart of). Seconds are of training alone, compiling included; both clocks stand still while
weights are saved or evaluated. Our evaluator scores all weights on the same held-out positions. Each run is its own process, and
TRL's is three, `STEP FOLDER PEER`: only `prepare` and `evaluate` compute with JAX. TRL is left as it comes but for what it has
no setting for: learning rates by optimiser step, completions that end where the task's stop rule ends them, and, for the peer
`TRL-positions`, positions that do not count padding. Not part of the package.
"""

import argparse
import json
import os
import pickle
import shlex
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jax_grpo.bench import variants
from jax_grpo.bench.curves import Run, RunFailed, curve, finished, first_reached, summary
from jax_grpo.bench.machine import machine, same_settings, saved, selected
from jax_grpo.bench.problems import peer_parts
from jax_grpo.bench.runner import QUIET, torch_device
from jax_grpo.bench.trl_settings import NotTheSame, trl_settings
from jax_grpo.config import Config, ConfigError, load_config, require_all_trained
from jax_grpo.model.tokenizer import Tokenizer, tokenizer_of
from jax_grpo.system.markdown import table
from jax_grpo.system.process import child_record
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import Prompt, Task, TrainerState, total_reward
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tasks.stop import StopRule

OURS, PEERS = "jax_grpo", ("TRL", POSITIONS := "TRL-positions")
SCORE = "eval/sampled/reward"
START_TOLERANCE = 1e-5  # between scores of the same weights
PACKAGES = ("jax_grpo", "jax", "jaxlib", "flax", "optax", "torch", "transformers", "trl", "accelerate")
# Of our run beside what the config says: nothing that is no part of training, and no program that was compiled before.
TRAINING_ALONE = shlex.split(
    "--logging.tensorboard false --logging.samples_every 0 --checkpoint.every 0 --checkpoint.keep_best 0 --compilation_cache null"
)
# In the folder that the steps share.
CONFIG, START, INPUTS, WEIGHTS = "config.json", "start", "inputs.pickle", "weights"


def trained(peer: str, config: Config, metric: str) -> Run:
    """A run as `variants.measured` has it, of a metric of the evaluations; also each iteration's mean reward and length.

    Raises:
        RunFailed: one of its processes ended with an error.
    """
    record: dict[str, Any] = {"entropy": None}
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        (Path(folder) / CONFIG).write_text(config.model_dump_json())
        for step in STEPS:
            record |= child_record([sys.executable, __file__, step, folder, peer], os.environ | QUIET)
            if "error" in record:
                raise RunFailed(f"{step}: {record['error']}")
    record["points"] = [[at, scores[metric]] for at, scores in zip(record.pop("saved"), record["scores"], strict=True)]
    return record | {"seconds": record["clock"][-1]}


def prepare(config: Config, folder: Path, peer: str) -> dict[str, Any]:
    """Writes what TRL's process needs, from the same objects that `jax_grpo.train` makes of the config.

    The start as a Hugging Face folder; the prompts of all iterations and the rates of all optimiser steps, in the order of our run.
    """
    from jax_grpo.model.weights import save_hf
    from jax_grpo.optimiser import schedule
    from jax_grpo.trainer import Trainer

    trainer = Trainer(config.with_micro_batches(1))
    save_hf(folder / START, trainer.policy.architecture, trainer.state.params, trainer.tokenizer)
    prompts = [prompt for iteration in range(config.iterations) for prompt in trainer.prompts.in_order(iteration)[1]]
    trainer.task.close()
    rate = schedule(config.update, config.optimizer_steps())
    rates = [np.asarray(rate(step)).item() for step in range(config.iterations * config.update.epochs)]
    (folder / INPUTS).write_bytes(pickle.dumps((prompts, rates)))
    return {}


def train(config: Config, folder: Path, peer: str) -> dict[str, Any]:
    """Trains with TRL and saves weights where our run evaluates its own (`saved`), with the seconds of training before (`clock`).

    The clock stands still while weights are saved. `rewards` are each iteration's mean, in the order of iterations.

    Raises:
        NotTheSame: TRL asked other prompts than those that ours would, or stepped by another learning rate.
    """
    import time_to_score_trl as of_trl

    from jax_grpo.bench import trl_peer

    prompts, rates = pickle.loads((folder / INPUTS).read_bytes())
    task, (start_state,) = make_task(config.task), {prompt.start_state for prompt in prompts}  # the policy task has one
    reward, clock = Reward(task, config, prompts), of_trl.Clock(folder / WEIGHTS, config.evaluation.every)
    arguments = trl_peer.GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=torch_device() == "cpu", shuffle_dataset=False, disable_dropout=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, report_to=[], **trl_settings(config),
    )  # fmt: skip
    trainer = of_trl.StoppingTrainer(
        rates=rates, stop=Stop(task.stop_rule, tokenizer_of(config.model), start_state), model=str(folder / START),
        args=arguments, processing_class=trl_peer.tokenizer_in(folder / START), reward_funcs=reward, callbacks=[clock],
        train_dataset=trl_peer.dataset([prompt.text for prompt in prompts]),
    )  # fmt: skip
    if peer == POSITIONS:
        trl_peer.change_models(trainer, of_trl.count_real_tokens)
    try:
        trainer.train()
    finally:
        task.close()
    if len(clock.rates) != len(rates) or not np.allclose(clock.rates, rates, rtol=1e-9, atol=0):
        raise NotTheSame(f"TRL's learning rates were {clock.rates[:3]}...; expected {rates[:3]}...")
    about = {"rewards": reward.means, "completion_lengths": reward.lengths}
    return {"saved": clock.iterations, "clock": clock.seconds, **about}


def evaluate(config: Config, folder: Path, peer: str) -> dict[str, Any]:
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


def differences(config: Config) -> list[str]:
    """What is not the same although both have the setting, one sentence each; see docs/trl_differences.md."""
    sentences = [
        "TRL's training pass counts the padding before a prompt as positions (peer TRL-positions: it does not)"
    ]
    if config.objective.has_bonus and peer_parts(config) > 1:
        sentences.append("TRL's entropy bonus is a mean of each micro-batch's tokens, then over micro-batches")
    return sentences


def require_same_start(ours: Run, peer: Run) -> None:
    """Holds the scores of a peer's weights before training to those of our run, where that has some.

    Raises:
        RunFailed: one is another.
    """
    other = peer["scores"][0]
    for key, value in ours["scores"][0].items() if "error" not in ours else ():
        if not abs(value - other.get(key, float("nan"))) <= START_TOLERANCE:
            values = f"{value} in our run and {other.get(key)} of TRL's weights"
            raise RunFailed(f"NotTheSame: before training {key} is {values}; expected one")


def same_score(record: dict[str, Any]) -> list[str]:
    """A table: of each peer's run the lower of its last score and ours, when each first reached it, and how many times as long."""
    rows, ours = [], finished(record, OURS)
    for peer in (name for name in record["variants"] if name != OURS):
        for seed, run in finished(record, peer).items():
            if seed not in ours:
                continue
            sides = [curve(ours[seed]), curve(run)]
            level = min(points[-1].score for points in sides)
            first, second = after = [first_reached(points, level) for points in sides]
            shown = [f"{at[1]:.1f} s (iteration {at[0]:.1f})" if at else "not" for at in after]
            ratio = f"{second[1] / first[1]:.2f}" if first and second else "-"
            rows.append((peer, seed, f"{level:.4f}", *shown, ratio))
    return table(("peer", "seed", "score reached by both", "ours after", "peer after", "peer / ours"), rows)


def arguments_of(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str], Config]:
    """The command's arguments, the settings of both sides as words, and the config; checked before anything is started."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    option = parser.add_argument
    option("--config", required=True, metavar="FILE", help="of the policy task; any setting can follow: --kl.beta 0.1")
    option("--every", type=int, default=20, metavar="E", help="iterations between evaluations (default: 20)")
    option("--seeds", default="0", help="with commas between, of both (default: 0)")
    option("--peers", default="TRL", help=f"of {', '.join(PEERS)} (default: TRL)")
    option("--score", default=SCORE, metavar="METRIC", help=f"of the evaluations (default: {SCORE})")
    option("--out", required=True, type=Path, metavar="DIR", help="time_to_score.json, .md and .png")
    arguments, words = parser.parse_known_args(argv)
    words += ["--evaluation.every", str(arguments.every)]
    try:
        config = load_config(arguments.config, words)
        require_all_trained(config, "this comparison")
        trl_settings(config)
    except (ConfigError, NotTheSame) as error:
        parser.error(str(error))
    arguments.peers = selected("--peers", arguments.peers, PEERS)
    arguments.seeds = variants.seeds_of(arguments.seeds, parser)
    if not 1 <= arguments.every <= config.iterations:
        parser.error(f"--every {arguments.every}: expected 1 to the {config.iterations} iterations")
    if not arguments.score.startswith(("eval/greedy/", "eval/sampled/")):
        parser.error(f"--score {arguments.score!r}: expected eval/greedy/... or eval/sampled/..., such as {SCORE}")
    if config.evaluation.positions == 0:
        parser.error("evaluation.positions is 0, so there is no score to reach; give --evaluation.positions 1000")
    return arguments, words, config


def main(argv: list[str] | None = None) -> None:
    """Makes the runs that the folder's record lacks, and writes it, a table and a picture."""
    arguments, words, config = arguments_of(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, score, names = arguments.out / "time_to_score.json", arguments.score, (OURS, *arguments.peers)
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]), "metric": score, "last": 1, "config": config.model_dump(mode="json"),
        "trl": trl_settings(config), "differences": differences(config), "machine": machine(),
        "versions": {name: metadata.version(name) for name in PACKAGES}, "variants": dict.fromkeys(names, words),
    }  # fmt: skip
    earlier = saved(file)
    same = same_settings(earlier, record, "metric", "config", "trl", "versions")
    record["runs"] = {name: finished(earlier, name) for name in names} if same else {}

    def make(name: str, seed: str) -> Run:
        of_seed = [*words, "--seed", seed]
        if name == OURS:
            with mock.patch.dict(os.environ):
                os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
                return variants.train(arguments.config, [*of_seed, *TRAINING_ALONE], score)
        run = trained(name, load_config(arguments.config, of_seed), score)
        require_same_start(record["runs"][OURS][seed], run)
        return run

    variants.make_runs(record, file, arguments.seeds, make)
    variants.conclude(record, file, "\n".join([summary(record), "", *same_score(record)]))


STEPS = {"prepare": prepare, "train": train, "evaluate": evaluate}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in STEPS:
        step, place, peer = sys.argv[1:]
        config = Config.model_validate_json((Path(place) / CONFIG).read_text())
        print(json.dumps(STEPS[step](config, Path(place), peer)))
    else:
        main()
