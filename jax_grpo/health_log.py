"""What the health checks found in a run, once each: said on the console and kept in `health.jsonl`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from jax_grpo.config import Config
from jax_grpo.health import Finding, diagnose
from jax_grpo.records import read_records


class HealthLog:
    """Names each finding of a run once, on the console and in `health.jsonl`.

    What was found is a function of the records: a resumed run reads its `metrics.jsonl` and does not repeat itself.

    Args:
        run_dir: the run's folder, its metrics as far as they go.
        config: the run's.
        weights: reward weights by component.
        say: shows one line.
    """

    def __init__(self, run_dir: Path, config: Config, weights: Mapping[str, float], say: Callable[[str], None]):
        self._path, self._config, self._say = run_dir / "health.jsonl", config, say
        # In a mixture a component adds to the mean reward by its task's share.
        shares = config.task.mixture
        self._weights = {
            name: weight * (shares.share(name.partition("/")[0]) if shares else 1.0) for name, weight in weights.items()
        }
        self._history: list[Mapping] = []
        self._findings: list[Finding] = []
        metrics = run_dir / "metrics.jsonl"
        for record in read_records(metrics) if metrics.exists() else []:
            if "loss" in record:
                self._new(record)
        self._write()

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """Looks at one more iteration."""
        if new := self._new(metrics):
            self._write()
        for finding in new:
            self._say(f"health: {finding.line}")

    def _new(self, record: Mapping) -> list[Finding]:
        self._history.append(record)
        known = {(finding.check, subject) for finding in self._findings for subject in finding.subjects or ("",)}
        found = diagnose(self._history, self._config, self._weights)
        new = [f for f in found if not {(f.check, subject) for subject in f.subjects or ("",)} <= known]
        self._findings += new
        return new

    def _write(self) -> None:
        self._path.write_text("".join(json.dumps(f._asdict()) + "\n" for f in self._findings), encoding="utf-8")
