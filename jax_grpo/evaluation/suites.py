"""All suites of one evaluation: asks the model, greedy and sampled, and hands its answers to the judges.

The generators are passed in, so that another implementation of the same model can be judged by the same code.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jax_grpo.evaluation.environment import environment_prompts, environment_rows, environment_task, is_legal_move
from jax_grpo.evaluation.generation import Complete, Generator
from jax_grpo.evaluation.intervals import Estimate, summarise
from jax_grpo.evaluation.mates import Mate, mate_rows
from jax_grpo.evaluation.policy import STYLES, labelled, policy_rows, policy_task
from jax_grpo.evaluation.selfplay import Game, openings, play, selfplay_estimates
from jax_grpo.loading import Policy
from jax_grpo.tasks.base import Position
from jax_grpo.tasks.engine import EnginePool
from jax_grpo.tasks.policy import parse_full

MODES = ("greedy", "sampled")
SUITE_NAMES = ("policy", "environment", "mates", "selfplay")
CAPS = {"full": 144, "best_move": 12, "environment": 100}  # tokens; a move takes at most 7 in either vocabulary
BeginPart = Callable[[str, int], Callable[[int], None]]  # (what, total) -> tick(done); see progress.Steps


class Ask(Protocol):
    """A generator of a kind of answer (`full`, `best_move`, `environment`) in a mode."""

    def __call__(self, kind: str, mode: str) -> Complete: ...


@dataclasses.dataclass(frozen=True)
class Data:
    """What an evaluation is about.

    Attributes:
        positions: of the policy and environment suites.
        mates: of the mates suite; empty: left out.
        games: self-play games of each kind.
        half_moves: the model's most in one game.
        seed: of sampling, openings and resampling.
        engine: scores moves without a label; None: they are not scored.
    """

    positions: Sequence[Position]
    mates: Sequence[Mate]
    games: int
    half_moves: int
    seed: int
    engine: EnginePool | None = None


@dataclasses.dataclass
class Results:
    """Estimates by `suite/part/mode/group/name`, the self-play games by set, and the greedy moves of the positions."""

    estimates: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    games: dict[str, list[Game]] = dataclasses.field(default_factory=dict)
    moves: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, prefix: str, estimates: Mapping[str, Estimate]) -> None:
        self.estimates |= {f"{prefix}/{path}": estimate for path, estimate in estimates.items()}


def our_generators(policy: Policy, temperature: float, seed: int) -> Ask:
    """Generators by our own rollout, each compiled when first asked for."""
    tasks = {"full": policy_task("full"), "best_move": policy_task("best_move"), "environment": environment_task()}
    made: dict[tuple[str, str], Generator] = {}

    def ask(kind: str, mode: str) -> Complete:
        if (kind, mode) not in made:
            heat = {"greedy": 0.0, "sampled": temperature}[mode]
            made[kind, mode] = Generator(policy, tasks[kind].stop_rule, CAPS[kind], heat, seed)
        return made[kind, mode]

    return ask


def run_suites(suites: Sequence[str], ask: Ask, data: Data, steps: BeginPart) -> Results:
    """Runs the named suites in order."""
    results = Results()
    for suite in suites:
        SUITES[suite](ask, data, steps, results)
    return results


def _sides(positions: Sequence[Position]) -> dict[str, list[bool]]:
    return {name: [f" {letter} " in p.fen for p in positions] for name, letter in {"white": "w", "black": "b"}.items()}


def _policy(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    positions = labelled(data.positions, data.engine)
    for style in STYLES:
        task = policy_task(style)
        prompts = [task.prompt(position, 0) for position in positions]
        for mode in MODES:
            tick = steps(f"policy, {style}, {mode}", len(prompts))
            completions = ask(style, mode)(prompts, tick=tick)
            rows = policy_rows(style, positions, completions, data.engine)
            results.add(f"policy/{style}/{mode}", summarise(rows, _sides(positions)))
            if (style, mode) == ("best_move", "greedy"):
                results.moves = {p.fen: text.strip() for p, text in zip(positions, completions, strict=True)}


def _environment(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    prompts = environment_prompts(environment_task(), data.positions)
    legal = [is_legal_move(prompt) for prompt in prompts]
    groups = _sides(data.positions) | {"legal_moves": legal, "illegal_moves": [not each for each in legal]}
    for mode in MODES:
        completions = ask("environment", mode)(prompts, tick=steps(f"environment, {mode}", len(prompts)))
        results.add(f"environment/next_state/{mode}", summarise(environment_rows(prompts, completions), groups))


def _mates(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    positions = [mate.position for mate in data.mates]
    for style in STYLES:
        task = policy_task(style)
        prompts = [task.prompt(position, 0) for position in positions]
        for mode in MODES:
            completions = ask(style, mode)(prompts, tick=steps(f"mates, {style}, {mode}", len(prompts)))
            moves = [parse_full(text).best if style == "full" else text.strip() for text in completions]
            results.add(f"mates/{style}/{mode}", summarise(mate_rows(data.mates, moves), _sides(positions)))


def _selfplay(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    task = policy_task("best_move")
    for part, own in {"own_environment": True, "python_chess": False}.items():
        for mode in MODES:
            games = openings(data.games, data.seed)
            simulate = ask("environment", mode) if own else None
            tick = steps(f"self-play, {part}, {mode}", data.half_moves)
            play(games, task, ask("best_move", mode), simulate, data.half_moves, tick)
            results.add(f"selfplay/{part}/{mode}", selfplay_estimates(games, own, data.seed))
            results.games[f"{part}/{mode}"] = games


SUITES: dict[str, Any] = {
    "policy": _policy,
    "environment": _environment,
    "mates": _mates,
    "selfplay": _selfplay,
}
