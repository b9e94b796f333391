"""A run's config in TRL's words: `GRPOConfig`'s settings that mean the same, or a refusal that lists what has none.

Imports neither TRL nor JAX, so that a config is refused before anything is started. Where both have a setting and mean something
else by it, docs/trl_differences.md says what; those that act in a whole run are in `differences`.
"""

from collections.abc import Iterator
from typing import Any

from jax_grpo.bench.problems import peer_parts
from jax_grpo.config import Config, trl_names
from jax_grpo.config.loading import flat, settings

# What TRL calls our token loss and aggregation.
LOSS_TYPES = {ours: theirs for theirs, ours in trl_names.LOSS_TYPES.items()}
# Settings of which TRL has our default and no other value, by the reason.
DEFAULT_ALONE = {
    "TRL's master weights are float32": "model.param_dtype",
    "only plain sampling is the same in both": "rollout.top_k rollout.top_p rollout.min_p",
    "transformers counts the prompt's tokens too": "rollout.repetition_penalty",
    "TRL has none": "prompts.curriculum rollout.refill advantage.pass_at_k advantage.clip kl.guardrail",
    "TRL has the group's mean": "advantage.baseline",
    "TRL is given the weighted sum as one reward": "advantage.components",
    "TRL takes the quantile of each micro-batch": "objective.entropy_quantile",
    "TRL calls every completion cut that does not end with end-of-text": "objective.mask_truncated",
    "TRL is given the task's reward alone": "objective.overlong_penalty",
    "TRL corrects vLLM's samples alone": "objective.mismatch_cap objective.mismatch_floor objective.mismatch_mode",
    "TRL has the plain k3 only": "kl.estimator",
    "TRL has no other": "kl.reference_dtype",
    "TRL's beta is constant": "kl.adaptive",
    "TRL mixes completions, not groups, and divides by the tokens of all steps": "update.minibatches",
    "TRL is run on one device": "mesh.data mesh.fsdp mesh.tensor",
    "TRL is run as one process": "mesh.coordinator",
    "PyTorch's AdamW has no other": "update.first_moment_dtype",
}
DEFAULTS = {key: field.default for key, field in settings(Config)}
# Values that TRL has too, by setting, and why no other one.
ONLY = {key: ((DEFAULTS[key],), why) for why, keys in DEFAULT_ALONE.items() for key in keys.split()} | {
    "task.name": (("policy",), "the reward that TRL is given is the policy task's"),
    "model.compute_dtype": (("float32", "bfloat16"), "TRL trains in no other"),
    "advantage.scale": (("none", "group", "batch"), "TRL has no other"),
}
OF_A_LOSS = ("objective.", "kl.estimator")  # beginnings of those that a single loss depends on


class NotTheSame(ValueError):
    """The config has settings that TRL cannot be given; the message lists them."""


def value_of(config: Config, key: str) -> Any:
    """A setting by its dotted name."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _refusals(config: Config, whole_run: bool) -> Iterator[str]:
    for key, (values, why) in ONLY.items():
        if (value := value_of(config, key)) not in values and (whole_run or key.startswith(OF_A_LOSS)):
            yield f"{key} {value}: {why}; expected {' or '.join(map(str, values))}"
    objective, parts = config.objective, peer_parts(config)
    if (objective.name, objective.aggregation) not in LOSS_TYPES:
        known = ", ".join(f"{name} with {aggregation}" for name, aggregation in LOSS_TYPES)
        yield f"objective.name {objective.name} with objective.aggregation {objective.aggregation}: expected {known}"
    elif objective.aggregation == "bnpo" and parts > 1:
        yield f"objective.aggregation bnpo: TRL takes it of each of the {parts} micro-batches; expected another one"


def trl_settings(config: Config, *, whole_run: bool = True) -> dict[str, Any]:
    """Keywords of `GRPOConfig`, for a whole run or for its loss alone.

    Not among them: the schedule and what ends a completion, which docs/experiments/time_to_score.py gives TRL itself.

    Raises:
        NotTheSame: TRL cannot be given this config; lists every setting without a counterpart, its value and what was expected.
    """
    if refusals := list(_refusals(config, whole_run)):
        raise NotTheSame("TRL cannot be given this config: " + "; ".join(refusals))
    parts = peer_parts(config)
    own = flat(config.model_dump(include={"rollout", "objective", "kl", "update"}))
    same = {name: own[key] for name, key in trl_names.SAME.items() if key in own.keys() - ONLY.keys()}
    for key, (names, _) in trl_names.PAIRS.items():
        same |= zip(names, own.get(key, ()), strict=False)
    return same | {
        trl_names.BATCH: config.prompts.per_iteration * config.rollout.group_size // parts,
        trl_names.PARTS: parts,
        trl_names.GENERATION: parts,
        "max_steps": config.iterations * config.update.epochs,
        "scale_rewards": config.advantage.scale,
        "loss_type": LOSS_TYPES[config.objective.name, config.objective.aggregation],
        "use_adaptive_entropy": config.objective.entropy_target is not None,
        "entropy_target": config.objective.entropy_target or 0.0,
        "entropy_coef_delta": config.objective.entropy_step,
        "entropy_coef_min": config.objective.entropy_bounds[0],
        "entropy_coef_max": config.objective.entropy_bounds[1],
        "sync_ref_model": config.kl.reference_every is not None,
        "ref_model_sync_steps": config.kl.reference_every or 1,
        "ref_model_mixup_alpha": config.kl.reference_mix,
        "gradient_checkpointing": bool(config.model.remat),
        "bf16": config.model.compute_dtype == "bfloat16",
        "seed": config.seed,
    }
