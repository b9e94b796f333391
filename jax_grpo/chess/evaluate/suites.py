"""All suites of one evaluation: asks the model, greedy and sampled, and hands its answers to the judges.

The model is passed in, so that another implementation of it can be judged by the same code.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import chess

from jax_grpo.chess import games
from jax_grpo.chess.evaluate import by_side, endgame, policy, puzzles, selfplay, side_by_side, strength
from jax_grpo.chess.evaluate.policy import MOVE, ROW, model_player, policy_task, random_legal, written_moves
from jax_grpo.chess.evaluate.puzzles import Mate, Puzzle
from jax_grpo.chess.games import REFERENCE_PLAYERS, Game, Player, Rule
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.settings import EnvironmentSettings
from jax_grpo.chess.tasks.engine import EnginePool
from jax_grpo.chess.tasks.environment import EnvironmentTask, environment_stop, judge
from jax_grpo.chess.tasks.game import GameTask
from jax_grpo.chess.tasks.policy import labelled, parse_answer, policy_stop
from jax_grpo.config.tasks import task_of
from jax_grpo.evaluate import MODES
from jax_grpo.evaluate.statistics import Estimate, summarise
from jax_grpo.policy.named import Policy
from jax_grpo.rollout.texts import Complete, Generator, Tick
from jax_grpo.tasks.base import Prompt

CAPS = {"full": 144, "best_move": 12, "environment": 100}  # tokens; a move takes at most 7 in either vocabulary
SHORT_GAME, OPPONENTS = 3, ("random", "capture")  # moves of the player's in a short game, and whom it plays
BeginPart = Callable[[str, int], Tick]  # (what, total) -> tick(done); see `progress.timed_parts`


@dataclasses.dataclass(frozen=True)
class Data:
    """What an evaluation is about."""

    positions: Sequence[Position]  # of the suites that are in `OF_POSITIONS`
    mates: Sequence[Mate]
    games: int  # of self-play, of each kind
    half_moves: int  # the model's most in one game
    seed: int  # of sampling, openings and resampling
    engine: EnginePool | None = None  # scores moves without a label; None: they are not scored
    endgames: int = 100  # games of each ending
    tables: Sequence[Position] = ()  # of the strength suite; each has every legal move's evaluation
    tables_of: str = ""  # which split they are, in words
    skill_zero: Rule | None = None  # a reference player that needs an engine
    puzzles: Sequence[Puzzle] = ()
    style: str = "best_move"  # of prompts for one move, of `tasks.policy`


@dataclasses.dataclass
class Results:
    """Estimates by `suite/part/mode/group/name`, the games by set, and the greedy moves of the positions."""

    estimates: dict[str, Estimate] = dataclasses.field(default_factory=dict)
    games: dict[str, list[selfplay.SelfPlay]] = dataclasses.field(default_factory=dict)
    moves: dict[str, str] = dataclasses.field(default_factory=dict)
    endgames: dict[str, list[Game]] = dataclasses.field(default_factory=dict)
    boards: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # see `side_by_side.distribution`

    def add(self, prefix: str, estimates: Mapping[str, Estimate]) -> None:
        self.estimates |= {f"{prefix}/{path}": estimate for path, estimate in estimates.items()}


class OurModel:
    """The model that is judged, answering by our own rollout; whatever has these two methods is judged by the same code."""

    def __init__(self, model: Policy, temperature: float, seed: int, style: str = "best_move"):
        self._style = style  # as `Data.style`
        self._policy, self._seed = model, seed
        self._modes = {"greedy": (0.0, 1), "sampled": (temperature, 1), "samples": (temperature, strength.SAMPLES)}
        self._made: dict[tuple[str, str], Generator] = {}

    def __call__(self, kind: str, mode: str) -> Generator:
        """The generator of a kind of answer, a key of CAPS, in a mode; `samples`: `sampled`, `strength.SAMPLES` a prompt.

        Each is compiled when first needed.
        """
        if (kind, mode) not in self._made:
            stop_rule = environment_stop() if kind == "environment" else policy_stop()
            temperature, samples = self._modes[mode]
            self._made[kind, mode] = Generator(
                self._policy, stop_rule, CAPS[kind], temperature, self._seed, samples=samples
            )
        return self._made[kind, mode]

    def move_logps(self, positions: Sequence[Position], tick: Tick) -> list[dict[str, float]]:
        """As `policy.move_logps`."""
        return policy.move_logps(self._policy, positions, tick, self._style)


def run_suites(suites: Sequence[str], model: OurModel, data: Data, steps: BeginPart) -> Results:
    """Runs the named suites in order."""
    results = Results()
    for suite in suites:
        SUITES[suite](model, data, steps, results)
    return results


def _moves(
    model: OurModel, suite: str, positions: Sequence[Position], data: Data, steps: BeginPart
) -> Iterator[tuple[str, str, str, list]]:
    """Kind, style, mode and completions: the model's answers about each position, rows and moves in every mode."""
    for kind, style in ((ROW, "full"), (MOVE, data.style)):
        task = policy_task(style)
        prompts = [task.prompt(position, 0) for position in positions]
        for mode in MODES:
            yield kind, style, mode, model(kind, mode)(prompts, tick=steps(f"{suite}, {kind}, {mode}", len(prompts)))


def _policy(model: OurModel, data: Data, steps: BeginPart, results: Results) -> None:
    positions = labelled(data.positions, data.engine)
    for kind, style, mode, completions in _moves(model, "policy", positions, data, steps):
        rows = policy.policy_rows(style, positions, completions, data.engine)
        results.add(f"policy/{kind}/{mode}", summarise(rows, by_side(positions)))
        if (kind, mode) == (MOVE, "greedy"):
            results.moves = {
                p.fen: parse_answer(style, text, p.fen).best for p, text in zip(positions, completions, strict=True)
            }


def environment_prompts(positions: Sequence[Position]) -> list[Prompt]:
    """One prompt a position; its move, illegal in 5 % of them, is drawn by a checksum of the position, wherever it stands."""
    task = EnvironmentTask(EnvironmentSettings())
    return [task.prompt(position, zlib.crc32(position.fen.encode())) for position in positions]


def _environment(model: OurModel, data: Data, steps: BeginPart, results: Results) -> None:
    prompts = environment_prompts(data.positions)
    legal = [(prompt.answer or "").endswith("+0") for prompt in prompts]  # the last field, `truncated`
    groups = by_side(data.positions) | {"legal_moves": legal, "illegal_moves": [not each for each in legal]}
    for mode in MODES:
        completions = model("environment", mode)(prompts, tick=steps(f"environment, {mode}", len(prompts)))
        rows = [judge(*each) for each in zip(prompts, completions, strict=True)]
        results.add(f"environment/next_state/{mode}", summarise(rows, groups))


def _mates(model: OurModel, data: Data, steps: BeginPart, results: Results) -> None:
    positions = [mate.position for mate in data.mates]
    for kind, style, mode, completions in _moves(model, "mates", positions, data, steps):
        moves = [parse_answer(style, text, p.fen).best for text, p in zip(completions, positions, strict=True)]
        results.add(f"mates/{kind}/{mode}", summarise(puzzles.mate_rows(data.mates, moves), by_side(positions)))


def _selfplay(model: OurModel, data: Data, steps: BeginPart, results: Results) -> None:
    task = policy_task(data.style)
    for part, own in {"own_environment": True, "python_chess": False}.items():
        for mode in MODES:
            played = selfplay.openings(data.games, data.seed)
            simulate = model("environment", mode) if own else None
            tick = steps(f"self-play, {part}, {mode}", data.half_moves)
            selfplay.play(played, task, model(MOVE, mode), simulate, data.half_moves, tick)
            results.add(f"selfplay/{part}/{mode}", selfplay.selfplay_estimates(played, own, data.seed))
            results.games[f"{part}/{mode}"] = played


def _players(model: OurModel, data: Data) -> dict[str, Player[Game]]:
    """Who plays games: the model in each mode, and random legal moves beside it."""
    task = policy_task(data.style)
    return {mode: model_player(task, model(MOVE, mode)) for mode in MODES} | {"random_legal": random_legal(data.seed)}


def _endgame(model: OurModel, data: Data, steps: BeginPart, results: Results) -> None:
    players = _players(model, data) | {"perfect": endgame.perfect}
    for men in endgame.ENDINGS:
        for player, attack in players.items():
            played = endgame.starts(men, data.endgames, data.seed)
            endgame.play(played, attack, data.seed, steps(f"endgame, {men}, {player}", endgame.LONGEST))
            estimates = endgame.estimates(played)
            if player not in MODES:
                estimates = {path: estimate for path, estimate in estimates.items() if path.startswith("all/")}
            results.add(f"endgame/{men}/{player}", estimates)
            results.endgames[f"{men}/{player}"] = played


def short_games(
    positions: Sequence[Position], opponent: str, player: Player, seed: int, tick: Tick
) -> list[dict[str, float]]:
    """`GameTask`'s components of a game of `SHORT_GAME` moves from each position, side by side, with as many ticks as moves.

    Each move is asked for by its position's prompt alone, as in play: nothing of the episode is before it.
    """
    task = GameTask(task_of(name="game", opponent=opponent, episode={"turns": SHORT_GAME}))
    begun = [task.game_from(position.fen, number, (seed, number)) for number, position in enumerate(positions)]
    games.play(begun, player, task.replies, most=2 * SHORT_GAME, after=lambda moved: tick(moved[0].turn))
    components = task.components(begun)
    return [{name: float(values[i]) for name, values in components.items()} for i in range(len(positions))]


def _short_games(model: OurModel, data: Data, steps: BeginPart, results: Results) -> None:
    for opponent in OPPONENTS:
        for name, player in _players(model, data).items():
            tick = steps(f"short games against {opponent}, {name}", SHORT_GAME)
            rows = short_games(data.positions, opponent, player, data.seed, tick)
            estimates = strength.estimates(data.positions, rows, data.seed, by_side(data.positions))
            results.add(f"short_games/{opponent}/{name}", estimates)


def _strength(model: OurModel, data: Data, steps: BeginPart, results: Results) -> None:
    positions = data.tables
    task = policy_task(data.style)

    def add(player: str, answers: Sequence[Sequence[str]], others: Sequence[Mapping[str, float | None]]) -> None:
        pairs = zip(positions, answers, strict=True)
        rows = [{**strength.judged(*pair), **other} for pair, other in zip(pairs, others, strict=True)]
        results.add(f"strength/tables/{player}", strength.estimates(positions, rows, data.seed))

    def moves_in(mode: str) -> list[str]:
        return written_moves(task, model(MOVE, mode), positions, tick=steps(f"strength, {mode}", len(positions)))

    logps = model.move_logps(positions, steps("strength, likelihood of legal moves", len(positions)))
    results.boards = [side_by_side.distribution(positions[i], logps[i]) for i in side_by_side.chosen(positions)]
    ranks = [strength.rank(*pair) for pair in zip(positions, logps, strict=True)]
    add("greedy", [[move] for move in moves_in("greedy")], ranks)
    moves = moves_in("samples")
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
        moves = written_moves(task, choose, positions, numbers=numbers, step=step)
        return [moves[i : i + count] for i in range(0, len(moves), count)]

    return answer


def _puzzles(model: OurModel, data: Data, steps: BeginPart, results: Results) -> None:
    ratings = [puzzle.rating for puzzle in data.puzzles if puzzle.rating is not None]
    for mode, (kind, count) in {"greedy": ("greedy", 1), "sampled": ("samples", strength.SAMPLES)}.items():
        tick = steps(f"puzzles, {mode}", max(len(puzzle.line) // 2 + 1 for puzzle in data.puzzles))
        outcomes = puzzles.attempts(data.puzzles, _attempted(model(MOVE, kind), count, data.style), count, tick)
        rows = puzzles.puzzle_rows(outcomes, count)
        estimates = summarise(rows, puzzles.groups(data.puzzles))
        if len(ratings) == len(data.puzzles):
            solved = [outcome["solved"] / count for outcome in outcomes]
            estimates["all/rating"] = puzzles.fitted_rating(ratings, solved)
        results.add(f"puzzles/lines/{mode}", estimates)


OF_POSITIONS = {"policy", "environment", "short_games"}  # suites that are about `Data.positions`
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
