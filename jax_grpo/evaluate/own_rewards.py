"""A run's held-out prompts, scored by its task's own rewards: `python -m jax_grpo.evaluate RUN`, for a task without suites too.

What `during_training` measures, of the newest checkpoint or of the one that is named, with intervals.
"""

import contextlib
from pathlib import Path

import numpy as np

from jax_grpo.config import load_config
from jax_grpo.config.files import is_checkpoint
from jax_grpo.config.model import ModelConfig
from jax_grpo.evaluate import MODES, EvaluationError
from jax_grpo.evaluate.during_training import Evaluator
from jax_grpo.evaluate.statistics import Estimate, cluster_bootstrap_mean
from jax_grpo.model.tokenizer import tokenizer_of
from jax_grpo.policy.named import load_policy
from jax_grpo.prompts.dataset import heldout_rows
from jax_grpo.run.files import RUN_PARTS, complete, read_manifest, require_parts
from jax_grpo.run.resume import CHECKPOINTS
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import held_out_values
from jax_grpo.tasks.checked import made_prompt
from jax_grpo.tasks.episodes import EpisodicTask


def table_of(run: str) -> tuple[str, list[str], list[list[str]]]:
    """Title, heads of columns, and a row for the reward and each of its components: means with 95 % intervals, by mode.

    Raises:
        EvaluationError: there is no such run, nothing is held out, or Python gave its task; also what reading a run raises.
    """
    place, saved = Path(run), complete(Path(run) / CHECKPOINTS)
    if not is_checkpoint(place):
        if not saved:
            raise EvaluationError(
                f"RUN {run}: no checkpoint; expected a run's folder with one in {CHECKPOINTS}, or a checkpoint"
            )
        place = saved[-1]
    require_parts(place, content := read_manifest(place), RUN_PARTS)
    if (given := content["identity"].get("task")) is not None:
        raise EvaluationError(f"RUN {run}: Python gave its task, {given}; expected a run whose config names its task")
    config = load_config(content["config"])
    tokenizer, dtype = tokenizer_of(config.model), config.model.compute_dtype
    model = ModelConfig(weights=str(place), tokenizer=tokenizer, compute_dtype=dtype)
    config = config.model_copy(update={"model": model, "mesh": type(config.mesh)()})
    with contextlib.closing(make_task(config.task, tokenizer=tokenizer)) as task:
        if isinstance(task, EpisodicTask) and task.asks is not None:
            raise EvaluationError(
                f"RUN {run}: its task {task.name!r} asks a policy between turns; expected one that asks none"
            )
        heldout = heldout_rows(config, task.read(config.prompts, config.seed, config.compilation_cache), task.read)
        if heldout is None:
            raise EvaluationError(f"RUN {run}: its evaluation.positions is 0; expected a run with held-out prompts")
        prompts = [made_prompt(task, row, index, heldout=True) for index, row in enumerate(heldout.rows)]
        policy = load_policy(model, config.seed, config.context())
        evaluator, rows, texts = Evaluator(policy, task, prompts, config), {}, np.array([one.text for one in prompts])
        for mode in MODES:
            scores = evaluator.scores(mode, policy.params, content["iteration"])[1]
            for name, (values, own) in held_out_values(scores, prompts, task.component_weights).items():
                # A prompt that is there twice has one greedy answer.
                estimate = cluster_bootstrap_mean(values.tolist(), texts[own].tolist(), config.seed)
                rows.setdefault(name, {})[mode] = _shown(estimate)
    title = f"{place}, iteration {content['iteration']}: {len(prompts)} held-out prompts, mean and 95 % interval"
    head = ["", "greedy", f"sampled at {config.rollout.temperature:g}"]
    return title, head, [[name, *(own.get(mode, "-") for mode in MODES)] for name, own in rows.items()]


def _shown(one: Estimate) -> str:
    """An estimate as a cell of the table."""
    return f"{one.value:.3f}" + ("" if one.low is None else f" [{one.low:.3f}, {one.high:.3f}]")
