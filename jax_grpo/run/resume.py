"""Where a run continues: the command line's `--resume`, the checkpoint it stands for, and whether the config still fits it.

Resuming is exact because everything random is a function of (seed, iteration, prompt, sample): a checkpoint's position is the
iteration and the number of the next prompt. Knows no arrays: `checkpoints` reads those.
"""

import argparse
import fnmatch
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_grpo.config import Config, earlier
from jax_grpo.config.loading import flat
from jax_grpo.config.sections import FILE_FORMATS, is_built_in
from jax_grpo.mesh import processes
from jax_grpo.run import files
from jax_grpo.run.checkpoints import Checkpoints, Origin, Say, load, newest_sound
from jax_grpo.run.files import CheckpointError
from jax_grpo.run.folder import read_record, require_no_finished_run

PROGRAM = "python -m jax_grpo.train"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"

OPTIONS = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
OPTIONS.add_argument(
    "--resume", metavar="auto|PATH",
    help="continue: from the newest sound checkpoint of run_dir if there is one, or from a checkpoint or run folder",
)  # fmt: skip
OPTIONS.add_argument("--restart", action="store_true", help="begin again where a run is, removing its checkpoints")

# Settings that a state depends on (`*` for any name), with why another value cannot continue it.
FIXED = {
    "seed": "every prompt and sample is drawn from it",
    "model.tokenizer": "the model's tokens are its",
    "model.vocab_size model.num_layers model.hidden_size model.max_position_embeddings": "the parameters have its size",
    "model.num_heads": "the parameters' meaning depends on it",
    "model.param_dtype": "the parameters are stored in it",
    "model.adapter": "the saved parameters are adapters, or all there are",
    "model.adapter.rank": "the adapters have its size",
    "model.adapter.alpha model.adapter.rank_stabilised": "the adapters' meaning depends on it",
    "model.adapter.targets": "the adapters are of these linear maps",
    "model.adapter.weights": "the reference is what it began with",
    "task.name task.*prompt_style task.mixture.*.task": "the prompts are its",  # of the task, or of a part of its mixture
    "task.*illegal_fraction task.*guess_numbers task.mixture.*.share": "the prompts depend on it",
    "prompts.split": "the order of prompts is that of its positions",
    "prompts.per_iteration": "the position in the order of prompts is counted in it",
    "prompts.curriculum.passed": "the pass rates of prompts are part of the saved state, and are counted by it",
    "kl.beta": "the coefficient, adapted or not, is part of the saved state",
}
# Settings with which a state has more in it than without, whatever their values are.
PART_OF_THE_STATE = {
    "kl.reference_every": "a reference that moves is part of the saved state",
    "objective.entropy_target": "the coefficient that it moves is part of the saved state",
}
ABSENT = "(not set)"
SET_BACK = "Set it back to continue this run; for a new run from these weights, set model.weights to the checkpoint"


def find_origin(resume: str | None, restart: bool, run_dir: Path, checkpoints: Checkpoints, say: Say) -> Origin | None:
    """The checkpoint to continue from, every byte of it verified, or None to begin at the beginning. Changes nothing.

    `resume` is `auto`, a checkpoint, or a folder of a run or of checkpoints, whose newest sound one it is. Of several processes
    the first looks, and the others read the checkpoint that it names.

    Raises:
        CheckpointError: `resume` names no undamaged checkpoint of a run; or an unfinished run would be overwritten.
        RunFolderError: a finished run would be overwritten.
    """
    origin = _find_origin(resume, restart, run_dir, checkpoints, say) if processes.is_first() else None
    if origin is not None:
        files.require_parts(origin.path, origin.content, files.RUN_PARTS)
        files.require_parts(origin.path, origin.content["identity"], {"positions": str})
    path = processes.exchanged(origin and str(origin.path))[0]
    return origin if processes.is_first() or path is None else load(Path(path))


def _find_origin(resume: str | None, restart: bool, run_dir: Path, checkpoints: Checkpoints, say: Say) -> Origin | None:
    if not isinstance(resume, str | Path | None):
        raise CheckpointError(f"resume is {resume!r}; expected 'auto', or the folder of a run or a checkpoint")
    if resume is not None and restart:
        raise CheckpointError("--resume and --restart contradict each other; give one")
    other_folder = "choose another run_dir, or begin again in this one with --restart (in Python restart=True)"
    if resume == "auto":
        if (origin := newest_sound(checkpoints.folder, say)) is None:
            require_no_finished_run(run_dir, f"there is no checkpoint to continue from; {other_folder}")
            say(f"--resume auto: no checkpoint in {checkpoints.folder}; beginning at iteration 0")
        return origin
    saved, source = files.complete(checkpoints.folder), Path(resume).absolute() if resume else None
    inside = source is not None and source.is_relative_to(run_dir.absolute())
    if not inside and not restart:
        if saved and read_record(run_dir)["finished"] is None:
            raise CheckpointError(
                f"{run_dir} holds an unfinished run, saved at iteration {int(saved[-1].name)}: continue it with --resume auto, "
                f"begin again with --restart (its checkpoints are removed), or choose another run_dir; in Python resume='auto' or "
                f"restart=True"
            )
        longer = " (with more iterations it is continued by --resume auto)" if saved else ""
        require_no_finished_run(run_dir, f"{other_folder}{longer}")
    if source is None:
        return None
    if files.is_checkpoint(source):
        return load(source)
    for folder in (source / CHECKPOINTS, source):
        if (origin := newest_sound(folder, say)) is not None:
            return origin
    raise CheckpointError(
        f"--resume {resume}: not a checkpoint and no folder with checkpoints; expected `auto`, a run folder, or a folder such "
        f"as runs/NAME/{CHECKPOINTS}/{files.folder_name(50)}"
    )


def abandon_others(origin: Origin | None, checkpoints: Checkpoints, say: Say) -> None:
    """Removes leftovers of a killed writer, and checkpoints after the origin; all of them if the run begins again.

    Called when nothing can refuse the run any more.
    """
    files.clear_leftovers(checkpoints.folder)
    own = origin is not None and origin.path.parent.absolute() == checkpoints.folder.absolute()
    dropped = checkpoints.drop_after(origin.iteration if origin and own else -1)
    if dropped and own:
        say(f"removed the checkpoints after it: {', '.join(path.name for path in dropped)}")


def require_same_run(origin: Origin, config: Config) -> list[str]:
    """The settings that differ from the checkpoint's, as `key: old -> new`; a CheckpointError names those that must not."""
    before, now = flat(earlier.current(origin.content["config"])), flat(config.model_dump())
    if _trained_on_a_whole_file(before):
        before["prompts.split"] = "all"  # whatever stood there
        if now["prompts.split"] != "all":
            raise CheckpointError(
                f"prompts.split is {now['prompts.split']!r}, but {origin.path} was made before files were split: it trains on "
                f"every position of {before['prompts.source']}, and its held-out positions were among them. Set prompts.split "
                "to all to continue it, and give others to ask as evaluation.source, or set evaluation.positions to 0"
            )
    if not any(key.startswith("model.adapter") for key in before):  # an earlier version, which had none
        before["model.adapter"] = None
    both = ((key, before.get(key, ABSENT), now.get(key, ABSENT)) for key in {**now, **before})
    changed = {key: (old, new) for key, old, new in both if old != new}
    reasons = {name: why for names, why in FIXED.items() for name in names.split()}
    fixed = {key: why for key in changed for name, why in reasons.items() if fnmatch.fnmatchcase(key, name)}
    fixed |= {key: why for key, why in PART_OF_THE_STATE.items() if (before.get(key) is None) != (now[key] is None)}
    base = "model.adapter.base_dtype"  # of other dtypes than int8 the base's hash says whether it is another
    if "int8" in changed.get(base, ()):
        fixed[base] = "int8 rounds the base to other values, which the adapters are of"
    if now["objective.entropy_target"] is not None and "objective.entropy_coefficient" in changed:
        fixed["objective.entropy_coefficient"] = PART_OF_THE_STATE["objective.entropy_target"]
    made = f"but {origin.path} was made with"
    if refused := [f"{key} is {changed[key][1]!r}, {made} {changed[key][0]!r}: {why}" for key, why in fixed.items()]:
        raise CheckpointError("\n".join([*refused, SET_BACK]))
    if origin.iteration > config.iterations:
        raise CheckpointError(
            f"iterations is {config.iterations}, but {origin.path} is after {origin.iteration}; raise it, or give an earlier one"
        )
    return [f"{key}: {old} -> {new}" for key, (old, new) in changed.items()]


def _trained_on_a_whole_file(before: Mapping[str, Any]) -> bool:
    """Whether a run's positions were a file's at a time when `prompts.split` did not apply to files."""
    source = before.get("prompts.source")
    if "evaluation.source" in before or source is None or is_built_in(source):
        return False
    named = before.get("prompts.format", "auto") != "auto" or Path(source).suffix.lower() in FILE_FORMATS
    return named and not Path(source).is_dir()


def require_same_data(origin: Origin, identity: Mapping[str, Any]) -> None:
    """Refuses, with a CheckpointError, a config whose names stand for another architecture, reference, data or task."""
    keys = dict.fromkeys(("architecture", "base", "reference"), "model.weights") | {"positions": "prompts.source"}
    for name, key in (keys | {"task": "train(task=...)"}).items():
        if (old := origin.content["identity"].get(name)) != (new := identity.get(name)):  # earlier versions name fewer
            raise CheckpointError(
                f"{key} holds something else than when {origin.path} was made: its {name} is {new}; it was {old}. It must be the "
                f"same to continue this run; put the old files back, or start a new run with model.weights set to the checkpoint"
            )


def changed_code(origin: Origin, identity: Mapping[str, Any]) -> list[str]:
    """The files of the user's tasks and rewards that are not as when the checkpoint was made; earlier versions name none."""
    before, now = origin.content["identity"].get("code", {}), identity["code"]
    return [f"the code of {name}" for name in {**before, **now} if before.get(name) != now.get(name)]


def bring_metrics(origin: Origin, run_dir: Path, say: Say) -> int:
    """Bytes of `metrics.jsonl` that belong to the checkpoint; copies the file when the checkpoint is another run's."""
    source = origin.path.absolute().parents[1] / METRICS
    if source.parent != run_dir.absolute():
        if not source.is_file():
            before = f"the metrics before iteration {origin.iteration}"
            say(f"warning: {source} does not exist; {before} are not in this run's file")
            return 0
        shutil.copyfile(source, run_dir / METRICS)
    return int(origin.content["metrics_bytes"])


def command(argv: Sequence[str] | None, iterations: int | None = None) -> str:
    """The command that continues the run: that which started it (`argv` None: a call from Python), with `--resume auto`.

    `iterations`, where given, is its new number of iterations.
    """
    if argv is None:
        return f"the same call of train, with resume='auto'{f' and iterations {iterations}' if iterations else ''}"
    settings = OPTIONS.parse_known_args(argv)[1]
    more = ["--iterations", str(iterations)] if iterations else []
    return f"{PROGRAM} {shlex.join([*settings, *more, '--resume', 'auto'])}"
