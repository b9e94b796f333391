"""GRPO training: `python -m jax_grpo.train --config configs/quickstart.yaml`.

One iteration: prompts -> rollout -> rewards -> group advantages -> old and reference log-probabilities, once -> mu epochs of
minibatch updates (`trainer`) -> metrics and samples; then the rollouts are discarded. This file owns all input and output of a
run and reads top to bottom as its story.
"""

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_grpo.batch import record
from jax_grpo.config import Config, ConfigError, check_files, load_config, parse_cli
from jax_grpo.config.files import weights_directory
from jax_grpo.evaluate.during_training import Evaluation, Evaluator
from jax_grpo.memory.fit import DeviceOutOfMemory, choose_micro_batches, explain_out_of_memory
from jax_grpo.mesh import processes
from jax_grpo.model.weights import save_hf
from jax_grpo.policy.named import adapter_of
from jax_grpo.policy.peft_files import save_adapters
from jax_grpo.prompts.dataset import Heldout, describe_rows, heldout_rows
from jax_grpo.prompts.given import with_dataset
from jax_grpo.report.console import Console
from jax_grpo.report.health import HealthLog
from jax_grpo.report.log import MetricsError, MetricsLog, Silent
from jax_grpo.report.records import outcome, read_records, sample_rows
from jax_grpo.run import resume as continuing
from jax_grpo.run.checkpoints import EVALUATED, MEASURED, Checkpoints, Origin
from jax_grpo.run.files import CheckpointError
from jax_grpo.run.folder import locked_folder, record_finish, record_start
from jax_grpo.system import compilation
from jax_grpo.system.devices import ImpossibleRate
from jax_grpo.system.memory import give_back_early
from jax_grpo.system.phases import Phases, Watchdog
from jax_grpo.system.process import StopSignals
from jax_grpo.system.progress import progress_bar
from jax_grpo.system.terminal import printable_lines
from jax_grpo.system.whole_files import write_whole
from jax_grpo.tasks.base import Task, TaskError, applicable
from jax_grpo.tasks.checked import made_prompt
from jax_grpo.trainer import NonFiniteUpdates, Trainer, task_of_run

RUN_ERRORS = (
    CheckpointError,
    DeviceOutOfMemory,
    ImpossibleRate,
    MetricsError,
    NonFiniteUpdates,
    processes.ProcessLost,
    TaskError,
)


def make_evaluator(trainer: Trainer, heldout: Heldout | None) -> Evaluator | None:
    """Of the held-out positions; None where there are none."""
    if heldout is None:
        return None
    prompts = [made_prompt(trainer.task, row, index, heldout=True) for index, row in enumerate(heldout.rows)]
    return Evaluator(trainer.policy, trainer.task, prompts, trainer.config, trainer.task_policy, trainer.layout)


def train(
    config: Config | str | Path | Mapping[str, Any],
    *,
    task: Task | None = None,
    rewards: Sequence[Callable[..., Any]] | None = None,
    dataset: Iterable[Mapping[str, Any]] | None = None,
    resume: str | None = None,
    restart: bool = False,
    argv: Sequence[str] | None = None,
) -> Path:
    """Runs a training to its end or a stop signal; returns its folder: metrics, config, checkpoints, weights, pictures.

    `config` may also be the path of a YAML file, or nested settings (`load_config`).

    A `task` of your own takes the place of the one that the config names, whose section is then left out; `rewards` are functions
    for `task.name: prompts` without `task.rewards_from`; `dataset` has rows of prompts, as a list of dicts or a
    `datasets.Dataset`, in the place of `prompts.source`: they are written into the run folder.

    `resume` is `auto`, or the checkpoint or run folder to continue from; `restart` begins again where a run is. `argv` are the
    command line's arguments, for `run.json` and the command that continues; None when called from Python.

    With `mesh.coordinator`, of several processes, each of them calls it; process 0 alone writes, but for checkpoints.
    """
    config = _configured(config, dataset)
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(processes.connected(config.mesh))  # before JAX looks for a device
        writes = processes.is_first()
        run_dir = cleanup.enter_context(locked_folder(config.run_dir)) if writes else Path(config.run_dir)
        stop = cleanup.enter_context(StopSignals())
        # Where it begins; nothing is changed yet, since the model or the data may refuse to continue.
        ranked = config.checkpoint.model_copy(
            update={"best_metric": config.checkpoint.best_metric or config.best_metric()}
        )
        checkpoints = Checkpoints(run_dir / continuing.CHECKPOINTS, ranked)
        origin = continuing.find_origin(resume, restart, run_dir, checkpoints, print)
        first = origin.iteration if origin else 0
        compilation.keep_programs(config.compilation_cache)
        if config.update.micro_batches == "auto":
            config = _with_micro_batches(config, task, rewards, origin)
        changes = continuing.require_same_run(origin, config) if origin else []

        # What it trains, on which data.
        with progress_bar(shown=writes and config.logging.progress, transient=True) as bars:
            bars.add_task("reading the model and the prompts", total=None)
            trainer = Trainer(config, task, rewards)
            cleanup.callback(trainer.task.close)  # an engine's process would outlive a run that ends early
            trainer.task.require_weights(config.model.weights)
            heldout = heldout_rows(config, trainer.positions, trainer.task.read)
            evaluator = make_evaluator(trainer, heldout)
            if origin:
                trainer.restore(origin)
        if origin:
            changes += continuing.changed_code(origin, trainer.identity)

        # Nothing refuses it any more: the folder becomes this run's.
        logs = _begin(trainer, origin, checkpoints, argv) if writes else (Silent(), Silent())
        with logs[0] as log, logs[1] as console, checkpoints:
            device = jax.devices()[0].device_kind
            console.note(f"{config.model.weights or 'random weights'}, {device}, run folder {run_dir}")
            console.note(describe_rows(trainer.positions, heldout, trainer.task.noun))
            if origin:
                changed = f"; changed since: {', '.join(changes)}" if changes else ""
                console.note(f"continuing after iteration {first} from {origin.path}{changed}")
            for caution in config.cautions():
                console.warning(f"caution: {caution}")
            milestones = Milestones(trainer, evaluator, log, console, checkpoints, origin)
            done = run_iterations(milestones, stop if processes.count() == 1 else processes.Agreed(stop))
            if done < config.iterations:
                resuming = f"continue with\n    {continuing.command(argv)}"
                console.note(f"stopped after iteration {done} of {config.iterations}; {resuming}")
                return run_dir

        params = processes.gathered(trainer.state.params)
        if writes:
            _end(milestones, params, argv)
        return run_dir


def _configured(config: Config | str | Path | Mapping[str, Any], dataset: Iterable[Mapping[str, Any]] | None) -> Config:
    if isinstance(config, Config):
        if dataset is not None:
            raise ConfigError("dataset: a Config has its prompts.source already; give a dictionary, or a YAML file")
        return config
    config = load_config(config) if dataset is None else with_dataset(config, dataset)
    check_files(config)
    return config


def _with_micro_batches(
    config: Config, task: Task | None, rewards: Sequence[Callable[..., Any]] | None, origin: Origin | None
) -> Config:
    """The config with a number for `auto`, which compiles programs: bad code and bad data of the user's are reported before."""
    before = origin.content["config"] if origin else None
    own = task_of_run(config, task, rewards)
    with contextlib.nullcontext() if task is not None else contextlib.closing(own):
        own.require_weights(config.model.weights)
        own.read(config.prompts, config.seed, config.compilation_cache)
        return choose_micro_batches(config, print, before=before, task=own)


def save_trained(trainer: Trainer, folder: Path, params: Any) -> None:
    """Writes what was trained as others read it: a whole model in Hugging Face's format, or adapters in PEFT's."""
    config, own = trainer.config.model, trainer.task.model_settings()
    source = None if config.weights is None else weights_directory(config.weights)
    if (adapter := adapter_of(config.adapter)) is None:
        save_hf(folder, trainer.policy.architecture, params, trainer.tokenizer, own, source)
        return
    save_adapters(
        folder,
        trainer.policy.architecture,
        adapter,
        params,
        base=str(source),
        base_hash=trainer.identity["base"],
        base_dtype=config.base_dtype,
        tokenizer=trainer.tokenizer,
        more=own,
    )


def _end(milestones: "Milestones", params: Any, argv: Sequence[str] | None) -> None:
    """Writes the weights and the pictures of a run that is complete, and says what it changed and what to do next."""
    from jax_grpo.report.curves import curves  # matplotlib, which is slow to import, is not needed before

    trainer, evaluator, config = milestones.trainer, milestones.evaluator, milestones.trainer.config
    run_dir, own = Path(config.run_dir), trainer.task
    save_trained(trainer, run_dir / "weights", params)
    records, pictures = read_records(run_dir / "metrics.jsonl"), [run_dir / "curves.png"]
    curves(records, pictures[0], own.headlines)
    if evaluator and milestones.evaluation:
        pictures += own.save_pictures(run_dir, evaluator.prompts, milestones.evaluation.completions["greedy"])
    record_finish(run_dir)
    print("saved:", ", ".join(str(path) for path in [run_dir / "weights", run_dir / "metrics.jsonl", *pictures]))
    completions = config.prompts.per_iteration * config.rollout.group_size
    print(outcome(records, completions, len(evaluator.prompts) if evaluator else 0))
    print("next:", *_next_commands(trainer, evaluator, argv), sep="\n    ")


def _next_commands(trainer: Trainer, evaluator: Evaluator | None, argv: Sequence[str] | None) -> list[str]:
    """What one does with a run: judge it, if that can be done, look at it, export it, train twice as long."""
    folder, task = shlex.quote(trainer.config.run_dir), trainer.task
    judged = [f"python -m jax_grpo.evaluate --weights {folder} --out {folder}/evaluation"] if task.has_suites else []
    if not judged and evaluator and trainer.identity["task"] is None and trainer.task_policy is None:
        judged = [f"python -m jax_grpo.evaluate {folder}"]
    return [
        *judged,
        f"python -m jax_grpo.report {folder} --out {folder}/report.html",
        f"python -m jax_grpo.export --weights {folder} --out {folder}/exported",
        continuing.command(argv, 2 * trainer.config.iterations),
    ]


def _begin(
    trainer: Trainer, origin: Origin | None, checkpoints: Checkpoints, argv: Sequence[str] | None
) -> tuple[MetricsLog, Console]:
    """Makes the folder that of the run that begins or continues; returns what writes its metrics and what shows them."""
    config, first = trainer.config, origin.iteration if origin else 0
    run_dir = Path(config.run_dir)
    metrics_bytes = continuing.bring_metrics(origin, run_dir, print) if origin else 0
    continuing.abandon_others(origin, checkpoints, print)
    write_whole(run_dir / "config.yaml", config.resolved_yaml())
    started_by = None if argv is None else f"{continuing.PROGRAM} {shlex.join(argv)}"
    record_start(run_dir, config.resolved_yaml(), started_by, first, config.update.parts)
    return MetricsLog(run_dir, config, metrics_bytes, first), Console(config, trainer.task, first)


@dataclasses.dataclass
class Milestones:
    """What is done with weights between two iterations: they are evaluated, then saved, so that their own score ranks them.

    A stop signal's weights are saved at once, and evaluated when the run continues. The metrics that belong to a checkpoint end
    before its evaluation: a run that continues makes that again, or, where it was of the end only, goes on without it.

    `done` counts iterations in all, `first` those of earlier processes; `evaluation` is of the weights after them, None while
    there is none.
    """

    trainer: Trainer
    evaluator: Evaluator | None
    log: MetricsLog | Silent
    console: Console | Silent
    checkpoints: Checkpoints
    origin: Origin | None

    def __post_init__(self) -> None:
        self.first = self.done = self.origin.iteration if self.origin else 0
        self.evaluation: Evaluation | None = None
        self._metrics: dict[str, float] = {}  # of the newest iteration
        self._position: int | None = None  # of the metrics file before the evaluation
        before = self.origin.content if self.origin else {"metrics": {}}
        self._measured = set(before.get(MEASURED, before["metrics"]))  # names of metrics so far

    def begin(self) -> None:
        """Evaluates the weights that the run begins or continues with, if it is their turn.

        Raises:
            CheckpointError: checkpoints are to be ranked by a held-out metric that there is not.
        """
        if not self._evaluates():
            return
        metrics = self._evaluate()
        if self.trainer.config.best_metric().startswith(EVALUATED):
            self.checkpoints.require_measured(self._measured)
        if self.origin:  # its checkpoint was saved before it was evaluated: by a stop signal, or by an earlier version
            self.checkpoints.add_metrics(self.done, metrics)

    def iteration_ends(self, metrics: dict[str, float], *, stopping: bool) -> None:
        """Counts an iteration; evaluates its weights and saves them if it is their turn. `stopping` waits for no evaluation."""
        self.done += 1
        self._metrics, self.evaluation, self._position = metrics, None, None
        self._measured.update(metrics)
        self.checkpoints.poll()
        if self._evaluates() and not stopping:
            try:
                self._evaluate()
            except Exception:
                self._save()  # the iterations themselves are sound
                raise
        every = self.trainer.config.checkpoint.every
        if every and self.done % every == 0:
            self._save()

    def end(self) -> None:
        """Saves what is not saved yet, and evaluates the last weights of a run that is complete."""
        if self.done > self.first:
            self._save()
        if self.done == self.trainer.config.iterations and self.evaluation is None and self._evaluates():
            self.checkpoints.add_metrics(self.done, self._evaluate())  # a signal came in the last iteration
        self.checkpoints.wait()

    def _evaluates(self) -> bool:
        config, every = self.trainer.config, self.trainer.config.evaluation.every
        turn = self.done in (0, config.iterations) or (every > 0 and self.done % every == 0)
        return self.evaluator is not None and turn

    def _evaluate(self) -> dict[str, float]:
        evaluator, phases = self.evaluator, Phases()
        assert evaluator is not None, "see `_evaluates`"
        self._position = self.log.position()
        with explain_out_of_memory(phases, self.trainer.config), self.console.under_way("held-out evaluation"):
            evaluation = phases.run("evaluation", lambda: evaluator(self.trainer.weights, self.done), wait=False)
        self.evaluation, metrics = evaluation, evaluation.metrics
        self.log.write({"iteration": self.done, **metrics})
        self.console.evaluation(self.done, metrics)
        self._measured.update(metrics)
        return metrics

    def _save(self) -> None:
        own = self._metrics | (self.evaluation.metrics if self.evaluation else {})
        position = self.log.position() if self._position is None else self._position
        manifest = self.trainer.manifest(self.done, position)
        self.checkpoints.save(self.done, self.trainer.saved(), manifest, own, self._measured)


def run_iterations(milestones: Milestones, stop: processes.Request) -> int:
    """Iterations after the origin's, until the last or a stop signal, all of them saved; returns how many are done in all."""
    trainer, log, console = milestones.trainer, milestones.log, milestones.console
    config, run_dir, writes = trainer.config, Path(trainer.config.run_dir), processes.is_first()
    health = HealthLog(run_dir, config, trainer.task.component_weights, console.warning) if writes else Silent()
    with Watchdog(console.note) as watchdog:
        milestones.begin()
        while (done := milestones.done) < config.iterations and not stop.requested:
            profiled = compilation.profiled(config.profile, run_dir, done) if writes else contextlib.nullcontext()
            compiles = done == milestones.first
            slow = console.under_way(f"iteration {done}, which compiles") if compiles else contextlib.nullcontext()
            with watchdog.iteration(done) as phases, profiled, slow:
                metrics, scored, batch = trainer.iterate(done, phases)
            log.write(metrics)
            components = applicable(scored.components, scored.prompts)
            shown = {f"reward/{name}": values for name, values in components.items()}
            if (curriculum := trainer.prompts.curriculum) is not None:
                shown["curriculum/rate"] = curriculum.rates()
            log.histograms(done, shown)
            if compiled := compilation.line(metrics):
                console.note(compiled)
            console.iteration(metrics)
            health(metrics)
            if config.logging.samples_every and done % config.logging.samples_every == 0:
                given = (scored.prompts, scored.completions, scored.rewards_B, scored.components)
                extras, advantages_B = scored.logged.extras, np.asarray(batch.advantages_B)
                rows = sample_rows(trainer.task, *given, config, extras, scored.episodes, advantages_B)
                console.samples(rows)
                log.samples(done, rows)
            if done < config.record_batches and writes:  # for `jax_grpo.replay`
                arrays = record(batch, scored.rewards_B, trainer.group_ids(), trainer.tokenizer.vocab_size)
                (run_dir / "batches").mkdir(exist_ok=True)
                np.savez(run_dir / "batches" / f"{done:06d}.npz", allow_pickle=False, **arrays)
            milestones.iteration_ends(metrics, stopping=stop.requested)
        milestones.end()
    return done


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    give_back_early()
    with processes.ending_at_once():
        try:
            options, rest = continuing.OPTIONS.parse_known_args(argv)
            config = parse_cli(rest, continuing.PROGRAM, [continuing.OPTIONS])
            train(config, resume=options.resume, restart=options.restart, argv=argv)
        except (*RUN_ERRORS, OSError, ValueError) as error:  # the project's input errors are ValueErrors
            of_jax = "JAX has removed its internal frames"  # from a traceback that nobody sees here
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()) if of_jax not in note)
            raise SystemExit(printable_lines(f"{type(error).__name__}: {error}{notes}")) from error


if __name__ == "__main__":
    main()
