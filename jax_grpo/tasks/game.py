"""Chess as an episode: the model plays one side of a game for some moves of its own, and is rewarded by how it stands then.

It plays whichever side is to move. The prompt is the policy task's; an observation is the policy task's prompt of the position
after the opponent's answer, whole: the model has learnt to choose a move from a position it reads, not to follow a board through
moves. Positions before the first count for nothing: repetitions are those of the episode.
"""

import random
from collections.abc import Sequence

import chess
import numpy as np

from jax_grpo.config.tasks import TaskConfig
from jax_grpo.positions.position import Position, ending
from jax_grpo.positions.rookworld import legal_uci
from jax_grpo.positions.values import win_probability
from jax_grpo.tasks.base import Logged, Prompt, stack, with_overrides
from jax_grpo.tasks.engine import EnginePool
from jax_grpo.tasks.episodes import Episode, EpisodicTask, Write
from jax_grpo.tasks.opponents import Opponent, PolicyOpponent, make_opponent
from jax_grpo.tasks.policy import move_prompt, parse_answer
from jax_grpo.tasks.reference_players import balance
from jax_grpo.tasks.stop import policy_stop

RESULTS = ("won", "drawn", "lost", "forfeited", "unfinished")
WEIGHTS = {"outcome": 1.0, "legal_moves": 0.5} | dict.fromkeys(RESULTS, 0.0)
ILLEGAL = "illegal move"  # how a game ends besides `positions.position.ENDINGS`


class Game:
    """A game from the model's side: `left` moves of its own are still to come."""

    def __init__(self, task: "GameTask", board: chess.Board, left: int, draw: tuple[int, ...]):
        self.board, self.colour, self.left, self.played = board, board.turn, left, 0
        self.ended: str | None = None  # `ILLEGAL`, or a key of `ENDINGS`
        self._task, self._draw = task, draw

    def step(self, completion: str) -> tuple[str, bool]:
        return self._task.steps([self], [completion])[0]

    def move(self, uci: str) -> None:
        """One side's move, and whatever it ends."""
        if uci not in legal_uci(self.board):
            self.ended = ILLEGAL
            return
        self.board.push_uci(uci)
        self.ended = ending(self.board, "claimed")

    @property
    def done(self) -> bool:
        return self.ended is not None or (self.left == 0 and self.board.turn == self.colour)

    def random_numbers(self) -> random.Random:
        """Of the half-move that comes next."""
        return random.Random(f"opponent/{self._draw}/{len(self.board.move_stack)}")

    @property
    def result(self) -> str:
        """One of `RESULTS`, for the model."""
        if self.ended is None:
            return "unfinished"
        if self.ended == ILLEGAL:
            return "forfeited"
        if self.ended != "checkmate":
            return "drawn"
        return "lost" if self.board.turn == self.colour else "won"


class GameTask(EpisodicTask):
    """Components (raw values in [0, 1]):

    outcome: 1 for a mate, 0.5 for a draw, 0 for being mated and for an illegal move; of a game that is not over, the win
        probability as `task.judge` sees it.
    legal_moves: share of its moves that the model played, all of them where the game ended before.
    won, drawn, lost, forfeited (by what is no legal move), unfinished: which of these it was.

    Raises:
        EngineError: the opponent, or the judge, is an engine that does not work.
    """

    name = "game"

    def __init__(self, config: TaskConfig):
        self._style, self._moves = config.prompt_style, config.episode.turns if config.episode else 1
        self.component_weights = with_overrides(self.name, WEIGHTS, config.rewards)
        self.stop_rule = policy_stop()
        self._opponent: Opponent = make_opponent(config)
        self.asks = self._opponent.asks
        assert config.judge == "material" or config.engine is not None, "refused by the config"
        self._judge = EnginePool(config.engine) if config.judge == "engine" and config.engine else None
        self._logged = Logged({}, {})

    def close(self) -> None:
        self._opponent.close()
        if self._judge is not None:
            self._judge.close()

    def prompt(self, position: Position, seed: int) -> Prompt:
        """The policy task's. Raises ValueError: there is no legal move."""
        if not any(chess.Board(position.fen).legal_moves):
            raise ValueError(f"task game: the game is over in {position.fen!r}; expected positions with a legal move")
        return move_prompt(self._style, position.fen, position)

    def meet(self, write: Write) -> None:
        assert isinstance(self._opponent, PolicyOpponent), "`asks` names no policy else"
        self._opponent.write = write

    def reset(self, prompt: Prompt) -> Game:
        assert prompt.position is not None, "see `prompt`"
        return Game(self, chess.Board(prompt.position.fen), self._moves, prompt.draw)

    def observation(self, prompt: Prompt) -> str:
        assert prompt.position is not None, "see `prompt`"
        return self._asked(chess.Board(prompt.position.fen))

    def _asked(self, board: chess.Board) -> str:
        return f"\n{move_prompt(self._style, board.fen()).text}"

    def steps(self, environments: Sequence[Game], completions: Sequence[str]) -> list[tuple[str, bool]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The model's move in each game, and the opponent's in all that go on, who is asked about them at once."""
        for game, text in zip(environments, completions, strict=True):
            game.left -= 1
            game.move(parse_answer(self._style, text, game.board.fen()).best)
            game.played += game.ended != ILLEGAL
        answering = [game for game in environments if game.ended is None]
        if answering:
            draws = [game.random_numbers() for game in answering]
            for game, uci in zip(answering, self._opponent.moves([g.board for g in answering], draws), strict=True):
                game.move(uci)
        return [
            (f"\n{game.board.fen()} {game.ended or game.result}" if game.done else self._asked(game.board), game.done)
            for game in environments
        ]

    def score(self, prompts: Sequence[Prompt], episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
        games = [game for episode in episodes if isinstance(game := episode.environment, Game)]
        assert len(games) == len(episodes), "what `reset` returns"
        self._logged = Logged({"moves": [float(game.played) for game in games]}, {})
        if isinstance(other := self._opponent, PolicyOpponent) and other.written:
            self._logged.metrics["opponent_replaced"] = [other.replaced / other.written]
            other.written = other.replaced = 0
        values = self._values([game for game in games if game.result == "unfinished"])
        fixed = {"won": 1.0, "drawn": 0.5, "lost": 0.0, "forfeited": 0.0}
        rows = [
            {
                "outcome": fixed[game.result] if game.result in fixed else values[game.board.fen()],
                "legal_moves": game.played / self._moves if game.ended == ILLEGAL else 1.0,
                game.result: 1.0,
            }
            for game in games
        ]
        return stack(rows, self.component_weights)

    def logged(self) -> Logged:
        return self._logged

    def _values(self, games: Sequence[Game]) -> dict[str, float]:
        """Win probability of the side to move, which is the model's, by FEN."""
        if self._judge is None:
            return {game.board.fen(): win_probability(balance(game.board)) for game in games}
        analyses = self._judge.by_fen(game.board.fen() for game in games)
        return {fen: win_probability(analysis.score) for fen, analysis in analyses.items()}
