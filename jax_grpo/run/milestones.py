"""What is done with weights between two iterations: they are evaluated, then saved, so that their own evaluation ranks them.

A stop signal's weights are saved at once, and evaluated when the run continues. The metrics that belong to a checkpoint end before
its evaluation: a run that continues makes that again, or, where it was of the end only, goes on without it. Trains nothing.
"""

import dataclasses

from jax_grpo.evaluate.during_training import Evaluation, Evaluator
from jax_grpo.memory.advice import explain_out_of_memory
from jax_grpo.report.console import Console
from jax_grpo.report.log import MetricsLog
from jax_grpo.run.checkpoints import EVALUATED, MEASURED, Checkpoints, Origin
from jax_grpo.system.phases import Phases
from jax_grpo.trainer import Trainer


@dataclasses.dataclass
class Milestones:
    """Evaluations and checkpoints of a run's weights.

    Attributes:
        done: iterations done in all.
        evaluation: of the weights after them; None while there is none.
    """

    trainer: Trainer
    evaluator: Evaluator | None
    log: MetricsLog
    console: Console
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
        self._evaluate()
        if self.trainer.config.checkpoint.best_metric.startswith(EVALUATED):
            self.checkpoints.require_measured(self._measured)
        if self.origin:  # its checkpoint was saved before it was evaluated: by a stop signal, or by an earlier version
            self._rank()

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
            self._evaluate()  # a signal came in the last iteration
            self._rank()
        self.checkpoints.wait()

    def _evaluates(self) -> bool:
        config = self.trainer.config
        every = config.evaluation.every
        turn = self.done in (0, config.iterations) or (every > 0 and self.done % every == 0)
        return self.evaluator is not None and turn

    def _evaluate(self) -> None:
        evaluator, phases = self.evaluator, Phases()
        assert evaluator is not None, "see `_evaluates`"
        self._position = self.log.position()
        with explain_out_of_memory(phases, self.trainer.config):
            evaluation = phases.run("evaluation", lambda: evaluator(self.trainer.state.params), wait=False)
        self.evaluation = evaluation
        self.log.write({"iteration": self.done, **evaluation.metrics})
        self.console.evaluation(self.done, evaluation.metrics)
        self._measured.update(evaluation.metrics)

    def _save(self) -> None:
        own = self._metrics | (self.evaluation.metrics if self.evaluation else {})
        position = self.log.position() if self._position is None else self._position
        manifest = self.trainer.manifest(self.done, position)
        self.checkpoints.save(self.done, self.trainer.state, manifest, own, self._measured)

    def _rank(self) -> None:
        if self.evaluation:
            self.checkpoints.add_metrics(self.done, self.evaluation.metrics)
