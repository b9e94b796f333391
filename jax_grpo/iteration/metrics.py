"""Metrics of an iteration: one number a name, from its samples, its optimiser steps and its clock."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_grpo.batch import Batch
from jax_grpo.config import Config
from jax_grpo.iteration.draw import Draw
from jax_grpo.iteration.refill import counts, tokens_of
from jax_grpo.iteration.reward import Samples
from jax_grpo.model.architecture import Architecture
from jax_grpo.objective import beyond_guardrail
from jax_grpo.programs import generated_work, phase_flops
from jax_grpo.report.records import distinct_share, episode_shares, repeated_share
from jax_grpo.system.devices import device_peak, rates
from jax_grpo.system.memory import peak_memory
from jax_grpo.tasks.base import Headline, applicable

MEANS = ("loss", "policy_loss", "grad_norm")
OF_A_STEP = ("empty", "nonfinite_in_a_row")  # what no iteration has
OF_THE_STATE = (
    *("beta", "learning_rate", "nonfinite", "empty_steps", "kl/before_move", "kl/after_move"),
    *("entropy_bonus/coefficient", "entropy_bonus/applied"),
)


def over_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """An iteration's metrics from those of its optimiser steps.

    Losses and the gradient norm are means; the ratio, clipping and KL of the last step tell how far the iteration went. A step
    without a token to train on has seen nothing and is left out of both; where all are such, the metric is NaN, not 0.
    """
    seen = [step for step in steps if not step["empty"]]

    def value(name: str) -> float:
        if name in OF_THE_STATE:
            return float(steps[-1][name])
        values = [float(step[name]) for step in seen] or [math.nan]
        return float(np.mean(values)) if name in MEANS else values[-1]

    return {name: value(name) for name in steps[-1] if name not in OF_A_STEP}


def unselected(rewards_PG: np.ndarray, picked: int) -> float:
    """Mean reward of an iteration's first draw without the groups at its beginning that were picked; NaN where all were.

    >>> unselected(np.array([[1.0, 1.0], [0.0, 0.5]]), 1)
    0.25
    """
    return float(rewards_PG[picked:].mean()) if picked < len(rewards_PG) else math.nan


def of_iteration(
    config: Config,
    architecture: Architecture,
    samples: Samples,
    batch: Batch,
    steps: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, float],
    draws: Sequence[Samples],
    unused: Draw | None = None,
    headlines: Sequence[Headline] = (),
) -> dict[str, float]:
    """Metrics of an iteration, in the order in which they are written.

    Args:
        steps: what each optimiser step returned, on the host.
        seconds: of each phase, and of the `iteration`.
        draws: all that were rewarded, which the samples are of; `unused` was generated and not needed.
        headlines: of the task.
    """
    lengths_B, refill = samples.lengths_B, config.rollout.refill
    stopped_B = np.asarray(samples.rollout.stopped_PG).reshape(-1)
    out = over_steps(steps)
    out.setdefault("kl/mean", 0.0)
    out.setdefault("kl/p95", 0.0)
    kl = out["kl/mean"]
    out["kl/beyond_guardrail"] = kl if math.isnan(kl) else float(beyond_guardrail(kl, config.kl))
    out["reward/mean"], out["reward/std"] = float(samples.rewards_B.mean()), float(samples.rewards_B.std())
    for name, values in applicable(samples.components, samples.prompts).items():
        out[f"reward/{name}/mean"], out[f"reward/{name}/std"] = float(values.mean()), float(values.std())
        for each in headlines:
            if name.rpartition("/")[2] == each.component:
                out[each.metric] = float(values.mean())
    out |= {f"log/{name}": float(np.mean(values)) for name, values in samples.logged.metrics.items()}
    out["groups_without_signal"] = int(samples.flat_P.sum())
    out |= {} if refill is None else counts(draws, unused, refill)
    out["completion_length/mean"] = float(lengths_B.mean())
    out["truncated_fraction"] = float(1 - stopped_B.mean())
    out["completions/distinct"] = distinct_share(samples.completions, config.rollout.group_size)
    if not math.isnan(repeated := repeated_share(samples.prompts, samples.completions)):
        out["completions/repeat_prompt"] = repeated
    if samples.episodes is not None and config.windows().turns > 1:
        out |= episode_shares(samples.episodes)
    # An empty step moves nothing: the first that has tokens is the first on fresh completions.
    out["ratio/first_deviation"] = next((float(s["ratio/deviation"]) for s in steps if not s["empty"]), math.nan)
    out |= {f"time/{name}": value for name, value in seconds.items()} | peak_memory()
    # Without refill scoring ran beside the rewards: its own time is not known, at most the two phases'.
    spans = dict(seconds) if refill else {**seconds, "score": seconds["score"] + seconds["reward"]}
    if refill is not None and refill.ahead:  # so did generating
        spans["rollout"] += seconds["reward"]
    peak = device_peak(jax.devices()[0].device_kind, config.model.compute_dtype)
    peak = None if peak is None else peak * config.mesh.devices
    generated = [*draws, *([] if unused is None else [unused])]
    works = [generated_work(one.tokens, one.rollout, architecture) for one in generated]
    out |= rates(phase_flops(config.learning(), architecture, batch, len(steps), works), spans, peak)
    out["tokens_per_second"] = tokens_of(generated) / spans["rollout"]
    return out
