"""A run's config in TRL's words: `GRPOConfig`'s settings that mean the same, or a refusal that lists what has none.

Imports neither TRL nor JAX, so that a config is refused before anything is started. Where both have a setting and mean something
else by it, docs/trl_differences.md says what; those that act in a whole run are in `differences`.
"""

from collections.abc import Iterator
from typing import Any

from jax_grpo.bench.problems import PEER_ROWS
from jax_grpo.config import Config

# Our token loss and aggregation, and what TRL calls the two.
LOSS_TYPES = {("clip", name): name for name in ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")}
LOSS_TYPES |= {("cispo", "dapo"): "cispo", ("sapo", "grpo"): "sapo", ("vespo", "dapo"): "vespo"}
# Values that TRL has too, by setting, and why no other one.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "task.name": (("policy",), "the reward that TRL is given is the policy task's"),
    "model.compute_dtype": (("float32", "bfloat16"), "TRL trains in no other"),
    "model.param_dtype": (("float32",), "TRL's master weights are float32"),
    "rollout.top_k": ((0,), "only plain sampling is the same in both"),
    "rollout.top_p": ((1.0,), "only plain sampling is the same in both"),
    "rollout.min_p": ((0.0,), "only plain sampling is the same in both"),
    "rollout.repetition_penalty": ((1.0,), "transformers counts the prompt's tokens too"),
    "prompts.curriculum": ((None,), "TRL has none"),
    "rollout.refill": ((None,), "TRL has none"),
    "advantage.baseline": (("mean",), "TRL has the group's mean"),
    "advantage.pass_at_k": ((None,), "TRL has none"),
    "advantage.scale": (("none", "group", "batch"), "TRL has no other"),
    "advantage.clip": ((None,), "TRL has none"),
    "advantage.components": (("sum_first",), "TRL is given the weighted sum as one reward"),
    "objective.entropy_quantile": ((0.0,), "TRL takes the quantile of each micro-batch"),
    "objective.mask_truncated": ((False,), "TRL calls every completion cut that does not end with end-of-text"),
    "objective.overlong_penalty": ((None,), "TRL is given the task's reward alone"),
    "objective.mismatch_cap": ((None,), "TRL corrects vLLM's samples alone"),
    "objective.mismatch_floor": ((None,), "TRL corrects vLLM's samples alone"),
    "objective.mismatch_mode": (("token_truncate",), "TRL corrects vLLM's samples alone"),
    "kl.estimator": (("k3",), "TRL has no other"),
    "kl.reference_dtype": (("parameters",), "TRL has no other"),
    "kl.adaptive": ((False,), "TRL's beta is constant"),
    "kl.guardrail": (("log",), "TRL has none"),
    "update.minibatches": ((1,), "TRL mixes completions, not groups, and divides by the tokens of all steps"),
    "mesh.data": ((1,), "TRL is run on one device"),
    "mesh.fsdp": ((1,), "TRL is run on one device"),
    "mesh.tensor": ((1,), "TRL is run on one device"),
    "mesh.coordinator": ((None,), "TRL is run as one process"),
    "update.first_moment_dtype": (("parameters",), "PyTorch's AdamW has no other"),
}


class NotTheSame(ValueError):
    """The config has settings that TRL cannot be given; the message lists them."""


def value_of(config: Config, key: str) -> Any:
    """A setting by its dotted name."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def accumulated(config: Config) -> int:
    """Backward passes of TRL's optimiser step: the fewest of at most `PEER_ROWS` completions each."""
    rows = config.prompts.per_iteration * config.rollout.group_size
    return next(parts for parts in range(1, rows + 1) if rows % parts == 0 and rows <= parts * PEER_ROWS)


def _refusals(config: Config) -> Iterator[str]:
    for key, (values, why) in ONLY.items():
        if (value := value_of(config, key)) not in values:
            yield f"{key} {value}: {why}; expected {' or '.join(map(str, values))}"
    objective, parts = config.objective, accumulated(config)
    if (objective.name, objective.aggregation) not in LOSS_TYPES:
        known = ", ".join(f"{name} with {aggregation}" for name, aggregation in LOSS_TYPES)
        yield f"objective.name {objective.name} with objective.aggregation {objective.aggregation}: expected {known}"
    elif objective.aggregation == "bnpo" and parts > 1:
        yield f"objective.aggregation bnpo: TRL takes it of each of the {parts} micro-batches; expected another one"


def require_same(config: Config) -> None:
    """Refuses a config that TRL cannot be given.

    Raises:
        NotTheSame: lists every setting without a counterpart, its value and what was expected.
    """
    if refusals := list(_refusals(config)):
        raise NotTheSame("TRL cannot be given this config: " + "; ".join(refusals))


def trl_settings(config: Config) -> dict[str, Any]:
    """Keywords of `GRPOConfig`; not among them: the schedule and what ends a completion, which `trl_training` gives TRL itself.

    Raises:
        NotTheSame: see `require_same`.
    """
    require_same(config)
    objective, kl, update, rollout = config.objective, config.kl, config.update, config.rollout
    parts = accumulated(config)
    rows = config.prompts.per_iteration * rollout.group_size
    return {
        "per_device_train_batch_size": rows // parts,
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts,
        "num_generations": rollout.group_size,
        "num_iterations": update.epochs,
        "max_steps": config.iterations * update.epochs,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "scale_rewards": config.advantage.scale,
        "loss_type": LOSS_TYPES[objective.name, objective.aggregation],
        "importance_sampling_level": objective.importance_level,
        "epsilon": objective.epsilon_low,
        "epsilon_high": objective.epsilon_high,
        "delta": objective.delta,
        "sapo_temperature_pos": objective.tau_pos,
        "sapo_temperature_neg": objective.tau_neg,
        "vespo_k_pos": objective.vespo_k_pos,
        "vespo_lambda_pos": objective.vespo_lambda_pos,
        "vespo_k_neg": objective.vespo_k_neg,
        "vespo_lambda_neg": objective.vespo_lambda_neg,
        "entropy_coef": objective.entropy_coefficient,
        "use_adaptive_entropy": objective.entropy_target is not None,
        "entropy_target": objective.entropy_target or 0.0,
        "entropy_coef_delta": objective.entropy_step,
        "entropy_coef_min": objective.entropy_coefficient_min,
        "entropy_coef_max": objective.entropy_coefficient_max,
        "beta": kl.beta,
        "use_bias_correction_kl": kl.importance_corrected,
        "sync_ref_model": kl.reference_every is not None,
        "ref_model_sync_steps": kl.reference_every or 1,
        "ref_model_mixup_alpha": kl.reference_mix,
        "learning_rate": update.learning_rate,
        "weight_decay": update.weight_decay,
        "adam_beta1": update.beta1,
        "adam_beta2": update.beta2,
        "adam_epsilon": update.epsilon,
        "max_grad_norm": update.max_grad_norm,
        "gradient_checkpointing": config.model.remat,
        "bf16": config.model.compute_dtype == "bfloat16",
        "seed": config.seed,
    }


def differences(config: Config) -> list[str]:
    """What is not the same although both have the setting, one sentence each; see docs/trl_differences.md."""
    sentences = [
        "TRL's training pass counts the padding before a prompt as positions (peer TRL-positions: it does not)"
    ]
    if config.objective.has_bonus and accumulated(config) > 1:
        sentences.append("TRL's entropy bonus is a mean of each micro-batch's tokens, then over micro-batches")
    return sentences
