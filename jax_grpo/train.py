"""GRPO training: `python -m jax_grpo.train --config configs/quickstart.yaml`.

One iteration: prompts -> rollout -> rewards -> group advantages -> old and reference log-probabilities, once -> mu epochs of
minibatch updates (`trainer`) -> metrics and samples; then the rollouts are discarded. This file owns all input and output of a
run and reads top to bottom as its story.
"""

import contextlib
import dataclasses
import shlex
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_grpo.batch import record
from jax_grpo.config import Config, ConfigError, parse_cli
from jax_grpo.config.tasks import OWN_SIDE
from jax_grpo.evaluate.during_training import Evaluation, Evaluator
from jax_grpo.memory.fit import DeviceOutOfMemory, choose_micro_batches, explain_out_of_memory
from jax_grpo.mesh import processes
from jax_grpo.model.flops import ImpossibleRate
from jax_grpo.model.named import find_style, said_of_style
from jax_grpo.model.weights import save_hf
from jax_grpo.positions.dataset import Heldout, heldout_positions, told
from jax_grpo.report.console import Console
from jax_grpo.report.health import HealthLog
from jax_grpo.report.log import MetricsError, MetricsLog
from jax_grpo.report.records import sample_rows
from jax_grpo.report.silent import Silent
from jax_grpo.rollout.episodes import ObservationTooLong
from jax_grpo.run import resume as continuing
from jax_grpo.run.checkpoints import EVALUATED, MEASURED, Checkpoints, Origin
from jax_grpo.run.files import CheckpointError
from jax_grpo.run.folder import locked_folder, record_finish, record_start, write_whole
from jax_grpo.run.shared_checkpoints import SharedCheckpoints
from jax_grpo.system import compilation
from jax_grpo.system.memory import give_back_early
from jax_grpo.system.phases import Phases, Watchdog
from jax_grpo.system.process import StopSignals
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import RewardError, Task, applicable
from jax_grpo.tasks.engine import EngineError
from jax_grpo.trainer import NonFiniteUpdates, Trainer

RUN_ERRORS = (
    CheckpointError,
    DeviceOutOfMemory,
    EngineError,
    ImpossibleRate,
    MetricsError,
    NonFiniteUpdates,
    ObservationTooLong,
    processes.ProcessLost,
    RewardError,
)


def make_evaluator(trainer: Trainer, heldout: Heldout | None) -> Evaluator | None:
    """Of the held-out positions; None where there are none."""
    if heldout is None:
        return None
    prompts = [trainer.task.prompt(position, index) for index, position in enumerate(heldout.positions)]
    return Evaluator(trainer.policy, trainer.task, prompts, trainer.config, trainer.partner, trainer.layout)


def _require_taught_style(config: Config) -> None:
    """Refuses to ask a model for moves in a way that it was not taught, and would answer as if Black's pieces were White's."""
    weights, style = config.model.weights, config.task.prompt_style
    asks_moves = {"policy", "game"} & set(config.task.mixture.parts if config.task.mixture else [config.task.name])
    if asks_moves and weights is not None and style != OWN_SIDE and find_style(weights) == OWN_SIDE:
        raise ConfigError(
            f"task.prompt_style is {style!r}, but {weights} was taught to see every position from the mover's side; expected "
            f"task.prompt_style: {OWN_SIDE}"
        )


def train(
    config: Config,
    *,
    task: Task | None = None,
    rewards: Sequence[Callable[..., Any]] | None = None,
    resume: str | None = None,
    restart: bool = False,
    argv: Sequence[str] | None = None,
) -> Path:
    """Runs a training to its end or a stop signal; returns its folder: metrics, config, checkpoints, weights, pictures.

    A `task` of your own takes the place of the one that the config names, whose section is then left out; `rewards` are functions
    for `task.name: prompts`, in the place of `task.rewards_from`. `resume` is `auto`, or the checkpoint or run folder to continue
    from; `restart` begins again where an unfinished run is. `argv` are the command line's arguments, for `run.json` and the command
    that continues; None when called from Python.

    With `mesh.coordinator`, of several processes, each of them calls it; process 0 alone writes, but for checkpoints.
    """
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(processes.connected(config.mesh))  # before JAX is asked for a device
        writes = processes.is_first()
        run_dir = cleanup.enter_context(locked_folder(config.run_dir)) if writes else Path(config.run_dir)
        stop = cleanup.enter_context(StopSignals())
        # Where it begins; nothing is changed yet, since the model or the data may refuse to continue.
        kind = Checkpoints if processes.count() == 1 else SharedCheckpoints
        checkpoints = kind(run_dir / continuing.CHECKPOINTS, config.checkpoint)
        origin = continuing.find_shared_origin(resume, restart, run_dir, checkpoints, print)
        first = origin.iteration if origin else 0
        compilation.keep_programs(config.compilation_cache)
        _require_taught_style(config)
        if task is None and rewards is None:
            if config.update.micro_batches == "auto":
                # Finding them compiles: bad code and bad data of the user's are told before.
                with contextlib.closing(make_task(config.task, tokenizer=config.model.tokenizer)) as own:
                    own.read(config.prompts, config.seed, config.compilation_cache)
            config = choose_micro_batches(config, print, before=origin.content["config"] if origin else None)
        changes = continuing.require_same_run(origin, config) if origin else []

        # What it trains, on which data.
        trainer = Trainer(config, task, rewards)
        cleanup.callback(trainer.task.close)  # an engine's process would outlive a run that ends early
        heldout = heldout_positions(config, trainer.positions, trainer.task.read)
        evaluator = make_evaluator(trainer, heldout)
        if origin:
            trainer.restore(origin)
            changes += continuing.changed_code(origin, trainer.identity)

        # Nothing refuses it any more: the folder becomes this run's.
        logs = _begin(config, run_dir, origin, checkpoints, argv) if writes else (Silent(), Silent())
        with logs[0] as log, logs[1] as console, checkpoints:
            device = jax.devices()[0].device_kind
            console.note(f"{config.model.weights or 'random weights'}, {device}, run folder {run_dir}")
            console.note(told(trainer.positions, heldout))
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

        params, taught = processes.gathered(trainer.state.params), said_of_style(config.task.prompt_style)
        if not writes:
            return run_dir
        save_hf(run_dir / "weights", trainer.policy.architecture, params, trainer.tokenizer, taught)
        from jax_grpo.report.curves import save_all  # matplotlib, which is slow to import, is not needed before

        answers = []
        if evaluator and milestones.evaluation:
            answers = milestones.evaluation.moves(evaluator.prompts, config.task.prompt_style)
        pictures = save_all(run_dir, answers)
        record_finish(run_dir)
        print("saved:", ", ".join(str(path) for path in [run_dir / "weights", run_dir / "metrics.jsonl", *pictures]))
        return run_dir


def _begin(
    config: Config, run_dir: Path, origin: Origin | None, checkpoints: Checkpoints, argv: Sequence[str] | None
) -> tuple[MetricsLog, Console]:
    """Makes the folder that of the run that begins or continues; what it is written and told with."""
    first = origin.iteration if origin else 0
    metrics_bytes = continuing.bring_metrics(origin, run_dir, print) if origin else 0
    continuing.abandon_others(origin, checkpoints, print)
    write_whole(run_dir / "config.yaml", config.resolved_yaml())
    started_by = None if argv is None else f"{continuing.PROGRAM} {shlex.join(argv)}"
    record_start(run_dir, config.resolved_yaml(), started_by, first, config.update.parts)
    return MetricsLog(run_dir, config, metrics_bytes, first), Console(config, first)


@dataclasses.dataclass
class Milestones:
    """What is done with weights between two iterations: they are evaluated, then saved, so that their own score ranks them.

    A stop signal's weights are saved at once, and evaluated when the run continues. The metrics that belong to a checkpoint end
    before its evaluation: a run that continues makes that again, or, where it was of the end only, goes on without it.

    `done` counts iterations in all; `evaluation` is of the weights after them, None while there is none.
    """

    trainer: Trainer
    evaluator: Evaluator | None
    log: MetricsLog | Silent
    console: Console | Silent
    checkpoints: Checkpoints
    origin: Origin | None

    def __post_init__(self) -> None:
        self._first = self.done = self.origin.iteration if self.origin else 0
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
        if self.trainer.config.checkpoint.best_metric.startswith(EVALUATED):
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
        if self.checkpoints.due(self.done):
            self._save()

    def end(self) -> None:
        """Saves what is not saved yet, and evaluates the last weights of a run that is complete."""
        if self.done > self._first:
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
        with explain_out_of_memory(phases, self.trainer.config):
            evaluation = phases.run("evaluation", lambda: evaluator(self.trainer.state.params, self.done), wait=False)
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
            with watchdog.iteration(done) as phases, profiled:
                metrics, scored, batch = trainer.iterate(done, phases)
            log.write(metrics)
            components = applicable(scored.components, scored.prompts)
            shown = {f"reward/{name}": values for name, values in components.items()}
            if (curriculum := trainer.draws.curriculum) is not None:
                shown["curriculum/rate"] = curriculum.rates()
            log.histograms(done, shown)
            if compiled := compilation.line(metrics):
                console.note(compiled)
            console.iteration(metrics)
            health(metrics)
            if config.logging.samples_every and done % config.logging.samples_every == 0:
                given = (scored.prompts, scored.completions, scored.rewards_B, scored.components)
                rows = sample_rows(*given, config, scored.logged.extras, scored.episodes)
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
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            raise SystemExit(f"{type(error).__name__}: {error}{notes}") from error


class _Callable(types.ModuleType):
    """`jax_grpo.train` is this module and, called, its function."""

    def __call__(self, *arguments: Any, **options: Any) -> Path:
        return train(*arguments, **options)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    main()
