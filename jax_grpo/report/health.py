"""Whether a run can learn at all: sicknesses seen in its metrics, each named once, in one line, with the setting to change.

A check is a pure function of what a `Run` shows; `diagnose` runs them all, `HealthLog` feeds it iteration by iteration. Too long
prompts and rewards that are not numbers need no check: they stop the run (`rollout`, `tasks.base`). Knows nothing of models, tasks
or how the numbers were made.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jax_grpo.config import Config
from jax_grpo.report.records import read_records

WINDOW = 3  # iterations in a row that must look sick; one bad batch is chance
LONG_WINDOW = 5  # for what a healthy run may show briefly
CONSTANT_WINDOW = 8  # for a component: a rare success may be missing from a few small batches
MOST = 0.9  # "nearly all"
SOLVED = 0.9  # share of the attainable reward beyond which nothing is left to learn: equal rewards are success there
COLLAPSED = 0.1  # share of its first entropy that a policy keeps
# A policy this far from its reference (nats per token) is another model; used where no target is set to hold it to.
FAR_FROM_REFERENCE = 3.0
MISMATCH = 0.05  # nats per token between sampling and training log-probabilities; bfloat16 rounding stays below
# Ratio of the first optimiser step on fresh completions, mean |ratio - 1|: rounding of two programs, by compute dtype.
RATIO_TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.05}
ECHOED = 0.2  # of a prompt's runs of words, that completions repeat more than at the start
FALL_IN_DEVIATIONS, FALL_IN_SPAN = 0.75, 0.05  # of the reward: of its first standard deviation, of its whole range
VANISHED = 1e-6  # share of the peak learning rate


class Finding(NamedTuple):
    """`check` is the key in `CHECKS`; `subjects` the reward components meant, if any; `line` names cause and remedy."""

    check: str
    subjects: tuple[str, ...]
    iteration: int
    line: str

    @property
    def topics(self) -> set[tuple[str, str]]:
        """What it is about: a later finding without a new topic is a repetition."""
        return {(self.check, subject) for subject in self.subjects or ("",)}


class Run(NamedTuple):
    """What a check may look at: training records, oldest first (at least one), and what they were made with."""

    history: Sequence[Mapping]
    config: Config
    weights: Mapping[str, float]

    def last(self, name: str, count: int = WINDOW) -> list[float]:
        """A metric over the last `count` iterations, or [] when there are not as many; missing or null is NaN."""
        return [number(record, name) for record in self.history[-count:]] if len(self.history) >= count else []

    def now(self, name: str) -> float:
        """A metric of the last iteration; missing or null is NaN."""
        return number(self.history[-1], name)

    def span(self) -> float:
        """From the least reward to the most that the weights allow: components are in [0, 1]."""
        return sum(map(abs, self.weights.values()))

    @property
    def reward(self) -> str:
        """The metric that tells how good the policy is: not of prompts that were picked by their rewards."""
        return "reward/unselected" if self.config.picks_prompts() else "reward/mean"

    def solved(self) -> bool:
        """Whether the mean reward of the window is near the most that the weights allow."""
        rewards = self.last(self.reward, min(WINDOW, len(self.history)))
        attainable = sum(max(weight, 0) for weight in self.weights.values())
        span = self.span()
        return span > 0 and sum(rewards) / len(rewards) >= attainable - (1 - SOLVED) * span

    def shares_without_signal(self) -> list[float]:
        """Shares of an iteration's groups whose completions all earn the same, over the window."""
        return [groups / self.config.prompts.per_iteration for groups in self.last("groups_without_signal")]


class Sickness(NamedTuple):
    """What a check returns when it finds something; see `Finding`."""

    line: str
    subjects: tuple[str, ...] = ()


def number(record: Mapping, name: str) -> float:
    """A metric of a record, in memory or read back; NaN where missing or null (how `metrics.jsonl` writes NaN)."""
    value = record.get(name)
    return math.nan if value is None else float(value)


def _all(values: Sequence[float], sick: Callable[[float], bool]) -> bool:
    return bool(values) and all(map(sick, values))


def _nearly_all(shares: Sequence[float]) -> bool:
    return _all(shares, lambda share: share >= MOST)


def wrong_ratio(run: Run) -> Sickness | None:
    """The first optimiser step on an iteration's completions must see ratio 1: they came from these parameters."""
    deviation, tolerance = run.now("ratio/first_deviation"), RATIO_TOLERANCE[run.config.model.compute_dtype]
    if deviation > tolerance:
        return Sickness(
            f"the ratio of the first step on fresh completions is off 1 by {deviation:.2g} on average (rounding: below "
            f"{tolerance:g}): old log-probabilities are stale or of other weights; set update.epochs and "
            "update.minibatches to 1 to go without them, and report it as a bug",
        )


def sampling_mismatch(run: Run) -> Sickness | None:
    """Sampling and training log-probabilities of the same tokens must agree."""
    if (mismatch := run.now("logp_mismatch/mean")) > MISMATCH:
        return Sickness(
            f"log-probabilities of sampling and training differ by {mismatch:.2g} nats a token: the completions are of "
            "other weights, or rounded too much; set model.compute_dtype: float32, or objective.mismatch_cap: 2",
        )


def no_learning_rate(run: Run) -> Sickness | None:
    """Learning rate 0 after the warm-up, with more than a tenth of the run to go."""
    update, step, rate = run.config.update, run.now("optimizer_step"), run.now("learning_rate")
    steps = run.config.iterations * update.epochs * update.minibatches
    if update.warmup_steps < step < 0.9 * steps and rate <= VANISHED * update.learning_rate:
        return Sickness(
            f"the learning rate is {rate:.2g} at optimiser step {step:.0f} of {steps}: the schedule is over; set "
            f"update.total_steps (now {update.total_steps}) to null or at least {steps}, or "
            "update.final_learning_rate_fraction above 0",
        )


def cut_at_the_cap(run: Run) -> Sickness | None:
    """Nearly all completions end at the cap and so all earn the same, or are all masked out of the loss."""
    shares, masked = run.last("truncated_fraction"), run.config.objective.mask_truncated
    alike = _nearly_all(run.shares_without_signal()) and not run.solved()
    if _nearly_all(shares) and (masked or alike):
        effect = "objective.mask_truncated leaves them out" if masked else "their rewards are all alike"
        turns = run.config.windows().turns
        what, cause, remedy = "completions", "", ""
        if turns > 1:
            what, cause = "episodes", f", or out of turns (task.episode.turns = {turns}),"
            remedy = " or task.episode.turns"
        return Sickness(
            f"{shares[-1]:.0%} of {what} are cut at rollout.max_new_tokens = {run.config.rollout.max_new_tokens}{cause} and "
            f"{effect} (mean reward {run.now('reward/mean'):.3g}); raise rollout.max_new_tokens{remedy}",
        )


def empty_steps(run: Run) -> Sickness | None:
    """An optimiser step had no token to train on, because all of its completions were cut."""
    if (skipped := run.now("empty_steps")) > 0:
        return Sickness(
            f"{skipped:.0f} optimiser steps so far had no token to train on and were skipped: objective.mask_truncated left out "
            f"every completion, cut at rollout.max_new_tokens = {run.config.rollout.max_new_tokens}; raise it, or lower "
            f"update.minibatches (now {run.config.update.minibatches})",
        )


def identical_completions(run: Run) -> Sickness | None:
    """Every group repeats one completion."""
    rollout = run.config.rollout
    if _all(run.last("completions/distinct"), lambda share: share <= 1.1 / rollout.group_size) and not run.solved():
        return Sickness(
            f"the {rollout.group_size} completions of a prompt are identical: nothing to compare; raise rollout.temperature (now "
            f"{rollout.temperature:g}), or loosen rollout.top_k ({rollout.top_k}), top_p ({rollout.top_p:g}) and min_p "
            f"({rollout.min_p:g})",
        )


def starving_curriculum(run: Run) -> Sickness | None:
    """For long, every prompt that was observed is solved or was never passed: there is none to draw again near the target."""
    names = ("curriculum/known", "curriculum/retired", "curriculum/never_passed")
    known, retired, never = (run.last(name, LONG_WINDOW) for name in names)
    between = [a - b - c for a, b, c in zip(known, retired, never, strict=True)]
    if (settings := run.config.prompts.curriculum) is not None and _all(between, lambda count: count <= 0):
        return Sickness(
            f"the curriculum has nothing to draw again: of {known[-1]:.0f} prompts {retired[-1]:.0f} are solved and "
            f"{never[-1]:.0f} were never passed; set prompts.curriculum.passed (now {settings.passed:g}) to a reward that some "
            "completions of a prompt have and others lack, take other prompts (prompts.source), or set prompts.curriculum: null",
        )


def refill_in_vain(run: Run) -> Sickness | None:
    """Further prompts were drawn, and nearly all groups of the batch are without signal all the same; success too costs that."""
    if _all(run.last("refill/rounds"), lambda rounds: rounds > 0) and _nearly_all(
        shares := run.shares_without_signal()
    ):
        return Sickness(
            f"refill drew {run.now('refill/drawn'):.0f} groups for {run.config.prompts.per_iteration} and {shares[-1]:.0%} of the "
            f"batch have no signal (mean reward {run.now('refill/reward'):.3g}): {run.now('refill/discarded_tokens'):.0f} tokens "
            "an iteration are thrown away; take prompts of which some completions succeed (prompts.source), raise "
            "rollout.group_size or rollout.temperature, or set rollout.refill: null",
        )


def no_signal(run: Run) -> Sickness | None:
    """In nearly all groups every completion earns the same."""
    shares = run.shares_without_signal()
    if _nearly_all(shares) and not run.solved():
        return Sickness(
            f"{shares[-1]:.0%} of groups have equal rewards (mean {run.now('reward/mean'):.3g}): no advantage, no gradient; "
            "raise rollout.group_size or rollout.temperature, take easier prompts (prompts.source) or give partial credit "
            "(task.rewards)",
        )


def constant_component(run: Run) -> Sickness | None:
    """Weighted components that are the same for every completion, at a value that is not their best."""
    stuck: dict[str, float] = {}
    for name, weight in run.weights.items():
        means, stds = (run.last(f"reward/{name}/{part}", CONSTANT_WINDOW) for part in ("mean", "std"))
        constant = _all(stds, lambda std: std <= 1e-6) and max(means) - min(means) <= 1e-6
        if weight and constant and abs(means[-1] - (weight > 0)) > 1e-6:
            stuck[name] = means[-1]
    if stuck:
        values = ", ".join(f"{name} ({value:.3g})" for name, value in stuck.items())
        return Sickness(
            f"constant reward component for {CONSTANT_WINDOW} iterations: {values}; it teaches nothing; take prompts where "
            f"it varies (with labels or task.engine, if it needs them), or set task.rewards.{next(iter(stuck))}: 0",
            tuple(stuck),
        )


def runaway_kl(run: Run) -> Sickness | None:
    """KL beyond twice its target where one is in force, else a policy that has left its reference altogether."""
    kl, values = run.config.kl, run.last("kl/mean", LONG_WINDOW)
    held = kl.adaptive or kl.guardrail == "end_epoch"
    limit = 2 * kl.target if held else FAR_FROM_REFERENCE
    if kl.beta > 0 and _all(values, lambda value: value > limit):
        bound = f"twice kl.target {kl.target:g}" if held else f"{limit:g}, with no target in force"
        remedy = "raise the upper one of kl.beta_bounds or kl.target" if kl.adaptive else "raise kl.beta"
        return Sickness(
            f"KL to the reference is {values[-1]:.3g} nats a token, above {bound} for {LONG_WINDOW} iterations (beta "
            f"{run.now('beta'):.3g}); lower update.learning_rate or {remedy}",
        )


def entropy_collapse(run: Run) -> Sickness | None:
    """The policy has become nearly deterministic before it has learnt the task."""
    start, now = max(number(record, "entropy") for record in run.history[:WINDOW]), run.last("entropy")
    if _all(now, lambda entropy: entropy < COLLAPSED * start) and not run.solved():
        return Sickness(
            f"entropy fell from {start:.3g} to {now[-1]:.3g} nats a token while the reward is {run.now('reward/mean'):.3g}: "
            "the policy has stopped exploring; lower update.learning_rate, raise kl.beta, or set "
            "objective.entropy_coefficient: 0.01",
        )


def falling_reward(run: Run) -> Sickness | None:
    """The policy has become much worse than it was, by the spread of its first rewards and by what the weights span."""
    start, now = number(run.history[0], run.reward), run.last(run.reward)
    spread = max(number(record, "reward/std") for record in run.history[:WINDOW])
    least = max(FALL_IN_DEVIATIONS * spread, FALL_IN_SPAN * run.span())
    if len(run.history) > WINDOW and sum(now) / len(now) < start - least:
        return Sickness(
            f"the mean reward fell from {start:.3g} to {now[-1]:.3g}: training destroys the policy; lower "
            "update.learning_rate, or raise kl.beta"
        )


def echoed_prompts(run: Run) -> Sickness | None:
    """Completions have come to repeat their prompts, which satisfies many a check of what a prompt asks for."""
    start = sum(number(record, "completions/repeat_prompt") for record in run.history[:WINDOW]) / WINDOW
    shares = run.last("completions/repeat_prompt")
    if _all(shares, lambda share: share >= start + ECHOED):
        return Sickness(
            f"completions repeat {shares[-1]:.0%} of their prompts' runs of three words, {start:.0%} at the start (reward "
            f"{run.now('reward/mean'):.3g}): see samples.jsonl whether the policy follows what is asked or repeats it; make the "
            f"reward ask for more, or raise kl.beta (now {run.config.kl.beta:g})"
        )


def mostly_clipped(run: Run) -> Sickness | None:
    """More than half of the tokens are beyond the clip, so that they have no gradient."""
    low, high = run.last("clip_fraction/low"), run.last("clip_fraction/high")
    clipped = [sum(pair) for pair in zip(low, high, strict=True)]
    if run.config.objective.name in ("clip", "cispo") and _all(clipped, lambda share: share > 0.5):
        return Sickness(
            f"{clipped[-1]:.0%} of tokens are clipped at the end of an iteration: the policy moves too far on one rollout; "
            f"lower update.learning_rate or update.epochs (now {run.config.update.epochs})",
        )


Check = Callable[[Run], Sickness | None]
# What groups of equal rewards look like.
_EQUAL_REWARDS: tuple[Check, ...] = (starving_curriculum, refill_in_vain, no_signal, constant_component)
# Causes before symptoms: a finding silences those listed with it, so that a sick run gets one line and not five.
_SYMPTOMS: dict[Check, tuple[Check, ...]] = {
    wrong_ratio: (mostly_clipped, sampling_mismatch),
    sampling_mismatch: (),
    no_learning_rate: (),
    cut_at_the_cap: (empty_steps, identical_completions, *_EQUAL_REWARDS),
    empty_steps: (),
    mostly_clipped: (entropy_collapse, falling_reward),
    runaway_kl: (entropy_collapse, falling_reward),
    entropy_collapse: (falling_reward, identical_completions, *_EQUAL_REWARDS),
    falling_reward: (constant_component,),
    echoed_prompts: _EQUAL_REWARDS,  # the policy has settled on its echo
    identical_completions: _EQUAL_REWARDS,
    starving_curriculum: _EQUAL_REWARDS[1:],
    refill_in_vain: _EQUAL_REWARDS[2:],
    no_signal: _EQUAL_REWARDS[3:],
    constant_component: (),
}
CHECKS = {check.__name__: check for check in _SYMPTOMS}


def diagnose(history: Sequence[Mapping], config: Config, weights: Mapping[str, float]) -> list[Finding]:
    """What is wrong at the last of these records with a loss, causes first, without their symptoms; for `weights` see `Task`."""
    run, findings, silenced = Run(history, config, weights), [], set()
    for name, check in CHECKS.items() if history else ():
        if check not in silenced and (sickness := check(run)):
            findings.append(Finding(name, sickness.subjects, int(history[-1]["iteration"]), sickness.line))
            silenced |= set(_SYMPTOMS[check])
    return findings


class HealthLog:
    """Names each finding of a run once, by `say` and in `health.jsonl`.

    The findings are a function of the records: a resumed run reads its `metrics.jsonl` and does not repeat itself.
    """

    def __init__(self, run_dir: Path, config: Config, weights: Mapping[str, float], say: Callable[[str], None]):
        self._path, self._config, self._say = run_dir / "health.jsonl", config, say
        # In a mixture a component adds to the mean reward by its part's share.
        self._weights = {name: weight * config.task.share(name.partition("/")[0]) for name, weight in weights.items()}
        self._history: list[Mapping] = []
        self._findings: list[Finding] = []
        for record in read_records(run_dir / "metrics.jsonl", missing_ok=True):
            if "loss" in record:
                self._new_findings(record)
        self._write()

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """Looks at one more iteration."""
        if findings := self._new_findings(metrics):
            self._write()
        for finding in findings:
            self._say(f"health: {finding.line}")

    def _new_findings(self, record: Mapping) -> list[Finding]:
        self._history.append(record)
        known = {topic for finding in self._findings for topic in finding.topics}
        new = [f for f in diagnose(self._history, self._config, self._weights) if not f.topics <= known]
        self._findings += new
        return new

    def _write(self) -> None:
        self._path.write_text("".join(json.dumps(f._asdict()) + "\n" for f in self._findings), encoding="utf-8")
