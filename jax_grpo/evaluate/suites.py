"""All suites of one evaluation: asks the model, greedy and sampled, and hands its answers to the judges.

The generators are passed in, so that another implementation of the same model can be judged by the same code.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import chess

from jax_grpo.config.tasks import TaskConfig
from jax_grpo.evaluate import MODES, endgame, puzzles, short_games, side_by_side, strength
from jax_grpo.evaluate.mates import Mate, mate_rows
from jax_grpo.evaluate.move_logps import move_logps
from jax_grpo.evaluate.policy import MOVE, ROW, policy_rows, policy_task
from jax_grpo.evaluate.puzzles import Puzzle
from jax_grpo.evaluate.selfplay import Game, openings, play, selfplay_estimates
from jax_grpo.evaluate.statistics import Estimate, summarise
from jax_grpo.model.named import Policy
from jax_grpo.rollout.texts import Complete, Generator, Tick
from jax_grpo.tasks.base import Position, Prompt
from jax_grpo.tasks.engine import EnginePool
from jax_grpo.tasks.environment import EnvironmentTask, judge
from jax_grpo.tasks.policy import labelled, parse_answer
from jax_grpo.tasks.reference_players import REFERENCE_PLAYERS, Player
from jax_grpo.tasks.stop import environment_stop, policy_stop

CAPS = {"full": 144, "best_move": 12, "environment": 100}  # tokens; a move takes at most 7 in either vocabulary
BeginPart = Callable[[str, int], Tick]  # (what, total) -> tick(done); see `progress.timed_parts`


class Ask(Protocol):
    """The model that is judged."""

    def __call__(self, kind: str, mode: str) -> Complete:
        """The generator of a kind of answer, a key of CAPS, in a mode; `samples`: `sampled`, `strength.SAMPLES` a prompt."""
        ...

    def move_logps(self, positions: Sequence[Position], tick: Tick) -> list[dict[str, float]]:
        """As `move_logps.move_logps`."""
        ...


@dataclasses.dataclass(frozen=True)
class Data:
    """What an evaluation is about."""

    positions: Sequence[Position]  # of the suites that are in `ASKED`
    mates: Sequence[Mate]
    games: int  # of self-play, of each kind
    half_moves: int  # the model's most in one game
    seed: int  # of sampling, openings and resampling
    engine: EnginePool | None = None  # scores moves without a label; None: they are not scored
    endgames: int = 100  # games of each ending
    tables: Sequence[Position] = ()  # of the strength suite; each has every legal move's evaluation
    tables_of: str = ""  # which split they are, in words
    skill_zero: Player | None = None  # a reference player that needs an engine
    puzzles: Sequence[Puzzle] = ()
    style: str = "best_move"  # in which the model is asked for one move, of `tasks.policy`


@dataclasses.dataclass
class Results:
    """Estimates by `suite/part/mode/group/name`, the games by set, and the greedy moves of the positions."""

    estimates: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    games: dict[str, list[Game]] = dataclasses.field(default_factory=dict)
    moves: dict[str, str] = dataclasses.field(default_factory=dict)
    endgames: dict[str, list[endgame.Ending]] = dataclasses.field(default_factory=dict)
    boards: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # see `side_by_side.distribution`

    def add(self, prefix: str, estimates: Mapping[str, Estimate]) -> None:
        self.estimates |= {f"{prefix}/{path}": estimate for path, estimate in estimates.items()}


class OurModel:
    """A policy asked by our own rollout; each generator is compiled when first asked for."""

    def __init__(self, policy: Policy, temperature: float, seed: int, style: str = "best_move"):
        self._style = style  # as `Data.style`
        self._policy, self._seed = policy, seed
        self._modes = {"greedy": (0.0, 1), "sampled": (temperature, 1), "samples": (temperature, strength.SAMPLES)}
        self._made: dict[tuple[str, str], Generator] = {}

    def __call__(self, kind: str, mode: str) -> Generator:
        if (kind, mode) not in self._made:
            stop_rule = environment_stop() if kind == "environment" else policy_stop()
            temperature, samples = self._modes[mode]
            self._made[kind, mode] = Generator(
                self._policy, stop_rule, CAPS[kind], temperature, self._seed, samples=samples
            )
        return self._made[kind, mode]

    def move_logps(self, positions: Sequence[Position], tick: Tick) -> list[dict[str, float]]:
        return move_logps(self._policy, positions, tick, self._style)


def run_suites(suites: Sequence[str], ask: Ask, data: Data, steps: BeginPart) -> Results:
    """Runs the named suites in order."""
    results = Results()
    for suite in suites:
        SUITES[suite](ask, data, steps, results)
    return results


def _sides(positions: Sequence[Position]) -> dict[str, list[bool]]:
    return {name: [f" {letter} " in p.fen for p in positions] for name, letter in {"white": "w", "black": "b"}.items()}


def _moves(
    ask: Ask, suite: str, positions: Sequence[Position], data: Data, steps: BeginPart
) -> Iterator[tuple[str, str, str, list]]:
    """Kind, style, mode and completions: what the model answers in each position, asked for rows and moves in every mode."""
    for kind, style in ((ROW, "full"), (MOVE, data.style)):
        task = policy_task(style)
        prompts = [task.prompt(position, 0) for position in positions]
        for mode in MODES:
            yield kind, style, mode, ask(kind, mode)(prompts, tick=steps(f"{suite}, {kind}, {mode}", len(prompts)))


def _policy(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    positions = labelled(data.positions, data.engine)
    for kind, style, mode, completions in _moves(ask, "policy", positions, data, steps):
        rows = policy_rows(style, positions, completions, data.engine)
        results.add(f"policy/{kind}/{mode}", summarise(rows, _sides(positions)))
        if (kind, mode) == (MOVE, "greedy"):
            results.moves = {
                p.fen: parse_answer(style, text, p.fen).best for p, text in zip(positions, completions, strict=True)
            }


def environment_prompts(positions: Sequence[Position]) -> list[Prompt]:
    """One prompt a position; its move, illegal in 5 % of them, is drawn by a checksum of the position, wherever it stands."""
    task = EnvironmentTask(TaskConfig.model_validate({"name": "environment"}))
    return [task.prompt(position, zlib.crc32(position.fen.encode())) for position in positions]


def _environment(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    prompts = environment_prompts(data.positions)
    legal = [(prompt.answer or "").endswith("+0") for prompt in prompts]  # the last field, `truncated`
    groups = _sides(data.positions) | {"legal_moves": legal, "illegal_moves": [not each for each in legal]}
    for mode in MODES:
        completions = ask("environment", mode)(prompts, tick=steps(f"environment, {mode}", len(prompts)))
        rows = [judge(*each) for each in zip(prompts, completions, strict=True)]
        results.add(f"environment/next_state/{mode}", summarise(rows, groups))


def _mates(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    positions = [mate.position for mate in data.mates]
    for kind, style, mode, completions in _moves(ask, "mates", positions, data, steps):
        moves = [parse_answer(style, text, p.fen).best for text, p in zip(completions, positions, strict=True)]
        results.add(f"mates/{kind}/{mode}", summarise(mate_rows(data.mates, moves), _sides(positions)))


def _selfplay(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    task = policy_task(data.style)
    for part, own in {"own_environment": True, "python_chess": False}.items():
        for mode in MODES:
            games = openings(data.games, data.seed)
            simulate = ask("environment", mode) if own else None
            tick = steps(f"self-play, {part}, {mode}", data.half_moves)
            play(games, task, ask(MOVE, mode), simulate, data.half_moves, tick)
            results.add(f"selfplay/{part}/{mode}", selfplay_estimates(games, own, data.seed))
            results.games[f"{part}/{mode}"] = games


def _endgame(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    task = policy_task(data.style)
    players = {mode: endgame.model(task, ask(MOVE, mode)) for mode in MODES}
    players |= {"random_legal": endgame.random_legal(data.seed), "perfect": endgame.perfect}
    for men in endgame.ENDINGS:
        for player, attack in players.items():
            games = endgame.starts(men, data.endgames, data.seed)
            endgame.play(games, attack, data.seed, steps(f"endgame, {men}, {player}", endgame.LONGEST))
            found = endgame.estimates(games)
            if player not in MODES:
                found = {path: estimate for path, estimate in found.items() if path.startswith("all/")}
            results.add(f"endgame/{men}/{player}", found)
            results.endgames[f"{men}/{player}"] = games


def _short_games(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    players = {mode: ask(MOVE, mode) for mode in MODES} | {
        "random_legal": short_games.random_legal(data.seed, data.style)
    }
    for opponent in short_games.OPPONENTS:
        for player, choose in players.items():
            tick = steps(f"short games against {opponent}, {player}", short_games.MOVES)
            found = short_games.play(data.positions, opponent, choose, data.seed, tick, data.style)
            groups = _sides(data.positions)
            results.add(
                f"short_games/{opponent}/{player}", short_games.estimates(data.positions, found, groups, data.seed)
            )


def _strength(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    positions = data.tables
    task = policy_task(data.style)
    prompts = [task.prompt(position, 0) for position in positions]

    def add(player: str, answers: Sequence[Sequence[str]], others: Sequence[Mapping[str, float | None]]) -> None:
        pairs = zip(positions, answers, strict=True)
        rows = [{**strength.judged(*pair), **other} for pair, other in zip(pairs, others, strict=True)]
        results.add(f"strength/tables/{player}", strength.estimates(positions, rows, data.seed))

    def asked(mode: str) -> list[str]:
        texts = ask(MOVE, mode)(prompts, tick=steps(f"strength, {mode}", len(prompts)))
        each = len(texts) // max(len(positions), 1)
        return [task.move(text, positions[i // each].fen) for i, text in enumerate(texts)]

    logps = ask.move_logps(positions, steps("strength, likelihood of legal moves", len(positions)))
    results.boards = [side_by_side.distribution(positions[i], logps[i]) for i in side_by_side.drawn(positions)]
    ranks = [strength.rank(*pair) for pair in zip(positions, logps, strict=True)]
    add("greedy", [[move] for move in asked("greedy")], ranks)
    moves = asked("samples")
    samples = [moves[i : i + strength.SAMPLES] for i in range(0, len(moves), strength.SAMPLES)]
    add("sampled", samples, [strength.passes(*pair) for pair in zip(positions, samples, strict=True)])
    players = REFERENCE_PLAYERS | ({"skill_zero": data.skill_zero} if data.skill_zero else {})
    for name, player in players.items():
        tick, answers = steps(f"strength, {name}", len(positions)), []
        for done, position in enumerate(positions, start=1):
            answers.append(player(chess.Board(position.fen)))
            tick(done)
        add(name, answers, [{}] * len(positions))
    if positions and all(position.best for position in positions):
        add("label", [[position.best or ""] for position in positions], [{}] * len(positions))


def _attempted(choose: Complete, count: int, style: str) -> puzzles.Answer:
    """Moves of a generator that completes each prompt of a style `count` times."""
    task = policy_task(style)

    def answer(positions: Sequence[Position], numbers: Sequence[int], step: int) -> list[list[str]]:
        texts = choose([task.prompt(position, 0) for position in positions], numbers=numbers, step=step)
        moves = [task.move(text, positions[i // count].fen) for i, text in enumerate(texts)]
        return [moves[i : i + count] for i in range(0, len(moves), count)]

    return answer


def _puzzles(ask: Ask, data: Data, steps: BeginPart, results: Results) -> None:
    asked = data.puzzles
    ratings = [puzzle.rating for puzzle in asked if puzzle.rating is not None]
    for mode, (kind, count) in {"greedy": ("greedy", 1), "sampled": ("samples", strength.SAMPLES)}.items():
        tick = steps(f"puzzles, {mode}", max(len(puzzle.line) // 2 + 1 for puzzle in asked))
        found = puzzles.attempts(asked, _attempted(ask(MOVE, kind), count, data.style), count, tick)
        rows = puzzles.puzzle_rows(found, count)
        estimates = summarise(rows, puzzles.groups(asked))
        if len(ratings) == len(asked):
            solved = [own["solved"] / count for own in found]
            estimates["all/rating"] = puzzles.fitted_rating(ratings, solved)
        results.add(f"puzzles/lines/{mode}", estimates)


ASKED = {"policy", "environment", "short_games"}  # suites that are about `Data.positions`
SUITES = {
    "policy": _policy,
    "environment": _environment,
    "mates": _mates,
    "selfplay": _selfplay,
    "endgame": _endgame,
    "short_games": _short_games,
    "strength": _strength,
    "puzzles": _puzzles,
}
