"""TRL's names of settings (`GRPOConfig` of TRL 1.16), taken where they mean the same; elsewhere an error says what differs.

Knows our dotted keys and nothing of files. docs/trl_differences.md has what differs behind equal settings.
"""

from collections.abc import Mapping
from typing import Any

from jax_grpo.config.loading import OtherNames

SAME = {
    "output_dir": "run_dir",
    "reward_funcs": "task.rewards_from",
    "reward_weights": "task.reward_weights",
    "gradient_checkpointing": "model.remat",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    **{name: f"rollout.{name}" for name in ("temperature", "top_k", "top_p", "min_p")},
    "scale_rewards": "advantage.scale",
    "epsilon": "objective.epsilon_low",
    **{name: f"objective.{name}" for name in ("epsilon_high", "delta")},
    "importance_sampling_level": "objective.importance_level",
    "entropy_coef": "objective.entropy_coefficient",
    "beta": "kl.beta",
    "use_bias_correction_kl": "kl.importance_corrected",
    "num_iterations": "update.epochs",
    **{name: f"update.{name}" for name in ("learning_rate", "weight_decay", "max_grad_norm")},
    "adam_epsilon": "update.epsilon",
}
# Two names of TRL's that are the two numbers of one setting, with the setting's default.
PAIRS = {
    "objective.tau": (("sapo_temperature_pos", "sapo_temperature_neg"), (1.0, 1.05)),
    "objective.power": (("vespo_k_pos", "vespo_k_neg"), (2.0, 3.0)),
    "objective.decay": (("vespo_lambda_pos", "vespo_lambda_neg"), (3.0, 2.0)),
    "update.betas": (("adam_beta1", "adam_beta2"), (0.9, 0.95)),
}
PAIRED = {name for names, _ in PAIRS.values() for name in names}
# `loss_type`: the loss of a token, and how those of a batch become one number.
LOSS_TYPES = {name: ("clip", name) for name in ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")}
LOSS_TYPES |= {"cispo": ("cispo", "dapo"), "sapo": ("sapo", "grpo"), "vespo": ("vespo", "dapo")}
BATCH, PARTS, GENERATION = "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"
VALUES = {("scale_rewards", True): "group", ("scale_rewards", False): "none", ("min_p", None): 0.0, ("top_k", None): 0}
DIFFERENT = {
    "max_prompt_length": "TRL cuts a longer prompt; here prompts.max_prompt_tokens refuses it",
    "repetition_penalty": "TRL counts the prompt's tokens as seen; rollout.repetition_penalty those of the completion alone",
    "mask_truncated_completions": (
        "TRL calls every completion cut that does not end with end-of-text; objective.mask_truncated those at their cap"
    ),
    "top_entropy_quantile": (
        "TRL takes the quantile of each micro-batch; objective.entropy_quantile, 1 minus it, is of the optimiser batch"
    ),
    "warmup_steps": "TRL's first step has rate 0; with update.warmup_steps it already learns",
    "warmup_ratio": "update.warmup_steps is a number of steps, of which the first already learns",
    "lr_scheduler_type": "update.schedule is constant or cosine, both after a warm-up",
    "max_steps": "TRL counts optimiser steps; iterations counts rollouts, with update.epochs * update.minibatches steps each",
    "num_train_epochs": "TRL counts passes over the data; iterations counts rollouts of prompts.per_iteration prompts",
    "generation_batch_size": "TRL counts completions; prompts.per_iteration counts prompts",
    "save_steps": "TRL counts optimiser steps; checkpoint.every counts iterations",
    "bf16": "give model.compute_dtype: bfloat16",
    "fp16": "float16 is not computed in; give model.compute_dtype: bfloat16",
    "optim": "the optimiser is AdamW, with the settings of update",
    "logging_steps": "every iteration is logged",
    "use_vllm": "the trainer generates by itself, with the weights that it trains",
    "shuffle_dataset": "prompts always come in an order of the seed",
    **dict.fromkeys(
        ("disable_dropout", "lora_dropout"), "nothing is ever dropped: one policy samples, is scored and is trained"
    ),
    "resume_from_checkpoint": "a run is continued by --resume auto",
}
# Settings of TRL's scripts that stand elsewhere here, with other values: where.
ELSEWHERE = {
    "model_name_or_path": "model.weights, a folder or hub:OWNER/NAME",
    "model_revision": "model.weights, hub:OWNER/NAME@REVISION",
    **dict.fromkeys(
        ("dtype", "torch_dtype"), "model.param_dtype of what is trained and model.compute_dtype of the arithmetic"
    ),
    "attn_implementation": "model.attention",
    **dict.fromkeys(("use_peft", "peft_config"), "model.adapter, a section of its own"),
    "lora_r": "model.adapter.rank",
    "lora_alpha": "model.adapter.alpha",
    "lora_target_modules": "model.adapter.targets",
    "use_rslora": "model.adapter.rank_stabilised",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "model.adapter.base_dtype: int8"),
    **dict.fromkeys(("dataset_name", "train_dataset"), "prompts.source, a file or a folder that `datasets` saved"),
    "eval_dataset": "evaluation.source",
    "eval_steps": "evaluation.every, in iterations",
    **dict.fromkeys(("sync_ref_model", "ref_model_sync_steps"), "kl.reference_every, in optimiser steps"),
    "ref_model_mixup_alpha": "kl.reference_mix",
    "multi_objective_aggregation": "advantage.components",
    **dict.fromkeys(("use_adaptive_entropy", "entropy_target"), "objective.entropy_target"),
    "entropy_coef_delta": "objective.entropy_step",
    **dict.fromkeys(("entropy_coef_min", "entropy_coef_max"), "objective.entropy_bounds, the lower and the upper one"),
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
        "objective.mismatch_cap",
    ),
    "vllm_importance_sampling_clip_min": "objective.mismatch_floor",
    "vllm_importance_sampling_mode": "objective.mismatch_mode",
    "use_liger_kernel": "lm_head.implementation: chunked, or pallas on a GPU",
    "log_completions": "logging.samples_every, in iterations",
    "num_completions_to_print": "logging.samples",
    "report_to": "logging.wandb and logging.tensorboard",
    "save_total_limit": "checkpoint.keep_last",
    "metric_for_best_model": "checkpoint.best_metric",
    "greater_is_better": "checkpoint.best_metric, with a - before the name of one whose smallest value is the best",
}
TAKEN = frozenset({*SAME, *PAIRED, "loss_type", BATCH, PARTS, GENERATION})


class NotTheSame(ValueError):
    """A name of TRL's cannot be taken: `name`, and a sentence that says why."""

    def __init__(self, name: str, why: str):
        super().__init__(f"{name} is TRL's, and not the same here: {why}")
        self.name = name


def own_settings(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Our keys, each with TRL's name and the value that follows from what is `given` by TRL's names.

    `settings` are those that are given by our own names, in their sections.

    Raises:
        NotTheSame: see there.
    """
    own: dict[str, tuple[str, Any]] = {}
    for name, value in given.items():
        if name in ELSEWHERE:
            raise NotTheSame(name, f"its place is {ELSEWHERE[name]}")
        if name in DIFFERENT:
            raise NotTheSame(name, DIFFERENT[name])
        if name in SAME and not (value is None and name in ("epsilon_high", "delta")):  # None: as `epsilon`; none
            plain = value is None or isinstance(value, bool)
            own[SAME[name]] = name, VALUES.get((name, value), value) if plain else value
    for key, (names, defaults) in PAIRS.items():
        if there := [name for name in names if name in given]:
            own[key] = there[0], [given.get(name, default) for name, default in zip(names, defaults, strict=True)]
    if "epsilon" in given and given.get("epsilon_high") is None and _given(settings, "objective.epsilon_high") is None:
        own["objective.epsilon_high"] = "epsilon", given["epsilon"]
    if "loss_type" in given:
        loss = given["loss_type"]
        if not isinstance(loss, str) or loss not in LOSS_TYPES:
            raise NotTheSame("loss_type", f"it is {loss!r}; expected {', '.join(LOSS_TYPES)}")
        name, aggregation = LOSS_TYPES[loss]
        own |= {"objective.name": ("loss_type", name), "objective.aggregation": ("loss_type", aggregation)}
    return own


def own_batch(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """`own_settings` of TRL's three numbers of a batch: prompts of an iteration, and parts of its step."""
    counts = {name: given[name] for name in (BATCH, PARTS, GENERATION) if given.get(name) is not None}
    if not counts:
        return {}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise NotTheSame(name, f"it is {count!r}; expected a whole number of at least 1")
    if BATCH not in counts:
        why = f"it cuts a batch of prompts.per_iteration (update.micro_batches), and in TRL it multiplies {BATCH}: give that too"
        raise NotTheSame(next(iter(counts)), why)
    parts = counts.get(PARTS, 1)
    if counts.get(GENERATION, parts) != parts:
        why = f"TRL's steps mix completions of a group; here update.minibatches keeps groups whole: expected {PARTS}, {parts}"
        raise NotTheSame(GENERATION, why)
    group = _given(settings, "rollout.group_size") or 8
    completions = counts[BATCH] * parts * (_given(settings, "mesh.data") or 1) * (_given(settings, "mesh.fsdp") or 1)
    if not isinstance(group, int) or group < 1 or completions % group:
        raise NotTheSame(BATCH, f"a step has {completions} completions, which are no whole groups of {group}")
    own: dict[str, tuple[str, Any]] = {"prompts.per_iteration": (BATCH, completions // group)}
    return own | ({"update.micro_batches": (PARTS, parts)} if PARTS in counts else {})


def _given(settings: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return settings[section].get(name) if isinstance(settings.get(section), Mapping) else None


NAMES = OtherNames({*TAKEN, *DIFFERENT, *ELSEWHERE}, (own_settings, own_batch))
