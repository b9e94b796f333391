"""Settings of earlier versions: which went and what has their place, and what a config that such a version resolved says today.

Resolved configs are in run folders and checkpoints, and have every key.
"""

from collections.abc import Mapping
from typing import Any

from jax_grpo.config.objectives import OBJECTIVES
from jax_grpo.config.tasks import TaskConfig, settings_class, task_of

# Two numbers that are one setting now.
PAIRS = {
    "kl.beta_bounds": ("kl.beta_min", "kl.beta_max"),
    "update.betas": ("update.beta1", "update.beta2"),
    "objective.entropy_bounds": ("objective.entropy_coefficient_min", "objective.entropy_coefficient_max"),
    "objective.cov_bounds": ("objective.cov_low", "objective.cov_high"),
    "objective.tau": ("objective.tau_pos", "objective.tau_neg"),
    "objective.power": ("objective.vespo_k_pos", "objective.vespo_k_neg"),
    "objective.decay": ("objective.vespo_lambda_pos", "objective.vespo_lambda_neg"),
}
RETIRED = {
    "model.adapter.dropout": "it could only be 0; leave it out",
    "model.remat_keeps": "give model.remat: keep_matmuls",
    "prompts.selfplay_games": "give prompts.source: selfplay:GAMES",
    "prompts.format": "a file's suffix says what it is; rename the file",
    "mesh.processes": "give mesh.process as NUMBER/COUNT, such as 0/2",
    "rollout.compaction": "it changes no token and is always on; leave it out",
    "checkpoint.best_is": "give checkpoint.best_metric with a - before it where the smallest is best",
    **{old: f"give {new}, a list of the two" for new, pair in PAIRS.items() for old in pair},
}
# No one objective has all of these: who wrote them together was a version in which each objective had every key.
FLAT = {"epsilon_low", "delta", "tau_pos"}
FLAT_TASK = {"best_for_black", "length_cap"}  # and no one task these
DEFAULTS = {key: field.default for kind in OBJECTIVES.values() for key, field in kind.model_fields.items()}


def current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings, those that an earlier version resolved in today's keys, without those of other tasks and objectives."""
    task, objective, model = values.get("task"), values.get("objective"), values.get("model")
    if (
        isinstance(model, Mapping)
        and isinstance(adapter := model.get("adapter"), Mapping)
        and adapter.get("dropout") == 0
    ):
        adapter = {key: value for key, value in adapter.items() if key != "dropout"}
        values = {**values, "model": {**model, "adapter": adapter}}
    if isinstance(task, Mapping) and task.keys() >= FLAT_TASK:
        values = {**values, "task": _of_its_own(task)}
    if not isinstance(objective, Mapping) or not objective.keys() >= FLAT:
        return values
    now = {name: dict(part) if isinstance(part, Mapping) else part for name, part in values.items()}

    def taken(key: str, default: Any = None) -> Any:
        section, _, name = key.partition(".")
        return now.get(section, {}).pop(name, default)

    for key, pair in PAIRS.items():
        section, _, name = key.partition(".")
        numbers = [taken(old) for old in pair]
        if None not in numbers:
            now[section][name] = numbers
    if taken("model.remat_keeps") == "matmuls" and now["model"].get("remat"):
        now["model"]["remat"] = "keep_matmuls"
    games, prompts = taken("prompts.selfplay_games", 200), now.get("prompts", {})
    if prompts.get("source") == "selfplay" and games != 200:
        prompts["source"] = f"selfplay:{games}"
    if taken("checkpoint.best_is") == "smallest" and now["checkpoint"].get("best_metric"):
        now["checkpoint"]["best_metric"] = f"-{now['checkpoint']['best_metric']}"
    taken("rollout.compaction")
    if now.get("prompts", {}).get("format") == "auto":
        taken("prompts.format")
    if (processes := taken("mesh.processes")) is not None:
        now["mesh"]["process"] = f"{now['mesh']['process']}/{processes}"
    own = OBJECTIVES[now["objective"]["name"]].model_fields
    for key, value in list(now["objective"].items()):
        same = value == DEFAULTS.get(key, object()) or (isinstance(value, list) and tuple(value) == DEFAULTS.get(key))
        if key not in own and same:
            del now["objective"][key]
    return now


def _of_its_own(task: Mapping[str, Any]) -> dict[str, Any]:
    """The section `task` of a version in which it had the settings of every task, with those of the tasks that it names."""
    parts = {name: part for name, part in (task.get("mixture") or {}).items() if part}
    named = {part.get("task", name) for name, part in parts.items()} if parts else {task.get("name", "policy")}
    own = {key for name in named if ":" not in name for key in settings_class(name).model_fields}
    section = {key: value for key, value in task.items() if key in TaskConfig.model_fields or key in own}
    try:
        return task_of(**section).model_dump()
    except ValueError:  # somebody changed it since: the config's checks say what is wrong, and where
        return section
