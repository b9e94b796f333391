"""What an iteration tells: one number a name, from its scored completions, its optimiser steps and its clock."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_grpo.batch import Batch
from jax_grpo.config import Config
from jax_grpo.model import flops
from jax_grpo.model.gpt2 import GPT2Config
from jax_grpo.objective import beyond_guardrail
from jax_grpo.programs import phase_flops
from jax_grpo.report.records import distinct_share, episode_shares
from jax_grpo.scored import Scored
from jax_grpo.scored.refill import Filled, counts
from jax_grpo.system.devices import device_peak
from jax_grpo.system.memory import peak_memory
from jax_grpo.tasks.base import applicable

MEANS = ("loss", "policy_loss", "grad_norm")
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

    return {name: value(name) for name in steps[-1] if name != "empty"}


def of_iteration(
    config: Config,
    architecture: GPT2Config,
    scored: Scored,
    batch: Batch,
    flat_B: np.ndarray,
    steps: Sequence[Mapping[str, Any]],
    seconds: dict[str, float],
    total: float,
    filled: Filled,
) -> dict[str, float]:
    """Metrics of an iteration, in the order in which they are written.

    Args:
        flat_B: which rows of the batch have no signal.
        steps: what each optimiser step returned, on the host.
        seconds: of each phase; `total` of all.
        filled: what refill drew; no rounds without it.
    """
    lengths_B, rounds = scored.lengths_B, filled.rounds
    stopped_B = np.asarray(scored.rollout.stopped_PG).reshape(-1)
    group = config.rollout.group_size
    out = over_steps(steps)
    out.setdefault("kl/mean", 0.0)
    out.setdefault("kl/p95", 0.0)
    kl = out["kl/mean"]
    out["kl/beyond_guardrail"] = kl if math.isnan(kl) else float(beyond_guardrail(kl, config.kl))
    out["reward/mean"], out["reward/std"] = float(scored.rewards_B.mean()), float(scored.rewards_B.std())
    for name, values in applicable(scored.components, scored.prompts).items():
        out[f"reward/{name}/mean"], out[f"reward/{name}/std"] = float(values.mean()), float(values.std())
        if name.endswith("legal"):
            out["legal_move_rate"] = float(values.mean())
    out |= {f"log/{name}": float(np.mean(values)) for name, values in scored.logged.metrics.items()}
    out["groups_without_signal"] = int(flat_B.reshape(-1, group).all(-1).sum())
    out |= {} if config.rollout.refill is None else counts(filled, config.rollout.refill)
    out["completion_length/mean"] = float(lengths_B.mean())
    out["truncated_fraction"] = float(1 - stopped_B.mean())
    out["completions/distinct"] = distinct_share(scored.completions, group)
    if scored.episodes is not None and config.windows().turns > 1:
        out |= episode_shares(scored.episodes)
    # An empty step moves nothing: the first that has tokens is the first on fresh completions.
    out["ratio/first_deviation"] = next((float(s["ratio/deviation"]) for s in steps if not s["empty"]), math.nan)
    out |= {f"time/{name}": value for name, value in seconds.items()} | {"time/iteration": total} | peak_memory()
    # Without refill scoring ran beside the rewards: its own time is not known, at most the two phases'.
    spans = seconds if rounds else seconds | {"score": seconds["score"] + seconds["reward"]}
    if config.rollout.refill is not None and config.rollout.refill.ahead:  # so did generating
        spans = spans | {"rollout": seconds["rollout"] + seconds["reward"]}
    peak = device_peak(jax.devices()[0].device_kind, config.model.compute_dtype)
    peak = None if peak is None else peak * config.mesh.devices
    work = phase_flops(config, architecture, batch, len(steps), filled.generated)
    out |= flops.rates(work, spans, peak)
    out["tokens_per_second"] = float((filled.tokens or lengths_B.sum()) / spans["rollout"])
    return out
