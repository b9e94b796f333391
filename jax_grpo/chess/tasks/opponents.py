"""Who plays the other side of a `game`: a yardstick, Stockfish at a skill level, or a policy.

What an opponent draws follows from the random numbers that it is given, one stream for each half-move of each episode, and from
the board: a run that is continued meets the same moves. Knows nothing of rewards, nor of how a policy writes.
"""

import random
from collections.abc import Sequence

import chess

from jax_grpo.chess.games import Rule, choose, greedy_capture, two_ply, uniform
from jax_grpo.chess.positions.position import legal_uci
from jax_grpo.chess.settings import EngineConfig, GameSettings
from jax_grpo.chess.tasks.engine import Analysis, EnginePool
from jax_grpo.chess.tasks.policy import move_prompt, parse_answer
from jax_grpo.tasks.episodes import Policy, Write

PLAYERS: dict[str, Rule] = {"random": uniform, "capture": greedy_capture, "two_ply": two_ply}
FULL_SKILL = 20  # Stockfish's, at which it always plays the move it finds best
SKILL_LINES = 4  # moves that a lower level draws from


class Opponent:
    """The other side of any number of games at once."""

    asks: Policy | None = None  # see `EpisodicTask.asks`

    def moves(self, boards: Sequence[chess.Board], draws: Sequence[random.Random]) -> list[str]:
        """A legal move in UCI for each board, on none of which the game is over; a function of board and random numbers."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what it started."""


def make_opponent(settings: GameSettings) -> Opponent:
    """The opponent that `task.opponent` names; what is no name is refused by the config. Raises EngineError: no Stockfish."""
    name, _, level = settings.opponent.partition(":")
    if name in PLAYERS:
        return Yardstick(PLAYERS[name])
    if name == "stockfish":
        assert settings.engine is not None, "refused by the config"
        return Stockfish(settings.engine, int(level))
    return PolicyOpponent(settings.prompt_style, "self" if name == "self" else "reference")


class Yardstick(Opponent):
    """A player that is a function of the board and a draw."""

    def __init__(self, rule: Rule):
        self._rule = rule

    def moves(self, boards: Sequence[chess.Board], draws: Sequence[random.Random]) -> list[str]:
        return [choose(self._rule, board, draw) for board, draw in zip(boards, draws, strict=True)]


class Stockfish(Opponent):
    """Stockfish's own rule of its Skill Level with our random numbers: its process draws by a clock, and never plays twice alike.

    It searches to depth 1 + level at most, within `task.engine.nodes`, four lines at once.
    """

    def __init__(self, engine: EngineConfig, level: int):
        depth = None if level == FULL_SKILL else 1 + level
        self._pool = EnginePool(engine.model_copy(update={"multipv": SKILL_LINES}), depth)
        self._level = level

    def moves(self, boards: Sequence[chess.Board], draws: Sequence[random.Random]) -> list[str]:
        analyses = self._pool.by_fen(board.fen() for board in boards)
        return [skilled(analyses[b.fen()], self._level, draw) for b, draw in zip(boards, draws, strict=True)]

    def close(self) -> None:
        self._pool.close()


def skilled(analysis: Analysis, level: int, draw: random.Random) -> str:
    """The move of a skill level among the lines (Stockfish 15, search.cpp, Skill::pick_best), evaluations in centipawns.

    The move i of greatest s_i + (w (s_0 - s_i) + d (u_i mod w)) / 128, the last of equals: w = 120 - 2 level; d = s_0 less the
    last line's s, a pawn at most; u_i random.
    """
    if level == FULL_SKILL:
        return analysis.moves[0]
    scores = [round(100 * pawns) for pawns in analysis.evaluations]
    weakness, spread = 120 - 2 * level, min(scores[0] - scores[-1], 100)
    pushed = [s + (weakness * (scores[0] - s) + spread * draw.randrange(weakness)) // 128 for s in scores]
    _, place = max((score, place) for place, score in enumerate(pushed))
    return analysis.moves[place]


class PolicyOpponent(Opponent):
    """A policy that plays by each position's prompt alone; what is no legal move is replaced by a random one.

    `written` counts its moves, `replaced` those that were replaced.
    """

    def __init__(self, style: str, asks: Policy):
        self.asks = asks
        self._style = style
        self.write: Write | None = None  # given by `EpisodicTask.meet`
        self.written = self.replaced = 0

    def moves(self, boards: Sequence[chess.Board], draws: Sequence[random.Random]) -> list[str]:
        if self.write is None:
            raise RuntimeError(
                "the opponent is a policy, and the task was given none: `EpisodicTask.meet` comes before the first turn"
            )
        prompts = [move_prompt(self._style, board.fen()) for board in boards]
        texts = self.write(prompts, [draw.getrandbits(31) for draw in draws])
        pairs = zip(texts, boards, strict=True)
        answers = [parse_answer(self._style, text, board.fen()).best for text, board in pairs]
        legal = [answer in legal_uci(board) for answer, board in zip(answers, boards, strict=True)]
        self.written, self.replaced = self.written + len(legal), self.replaced + legal.count(False)
        rows = zip(answers, legal, boards, draws, strict=True)
        return [answer if fine else choose(uniform, board, draw) for answer, fine, board, draw in rows]
