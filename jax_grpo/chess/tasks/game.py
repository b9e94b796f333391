"""Chess as an episode: the model plays one side of a game for some moves of its own, and is rewarded by how it stands then.

It plays whichever side is to move. The prompt is the policy task's; an observation is the policy task's prompt of the position
after the opponent's answer, whole: the model has learnt to choose a move from a position it reads, not to follow a board through
moves. Positions before the first count for nothing: repetitions are those of the episode.
"""

import dataclasses
import random
from collections.abc import Sequence

import chess
import numpy as np

from jax_grpo.chess.games import ILLEGAL, LENGTH, Game, balance, play_round
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.values import win_probability
from jax_grpo.chess.settings import GameSettings
from jax_grpo.chess.tasks.chess_task import ChessTask
from jax_grpo.chess.tasks.engine import EnginePool
from jax_grpo.chess.tasks.opponents import Opponent, PolicyOpponent, make_opponent
from jax_grpo.chess.tasks.policy import move_prompt, parse_answer, policy_stop
from jax_grpo.tasks.base import Logged, Prompt, stack, with_overrides
from jax_grpo.tasks.episodes import Episode, EpisodicTask, Write

RESULTS = ("won", "drawn", "lost", "forfeited", "unfinished")
WEIGHTS = {"outcome": 1.0, "legal_moves": 0.5} | dict.fromkeys(RESULTS, 0.0)


@dataclasses.dataclass(eq=False)
class GameEpisode(Game):
    """A game whose first player is the model: the environment of an episode."""

    task: "GameTask" = dataclasses.field(kw_only=True)
    draw: tuple[int, ...] = dataclasses.field(kw_only=True)  # decides the opponent's random numbers

    def step(self, completion: str) -> tuple[str, bool]:
        return self.task.steps([self], [completion])[0]

    @property
    def result(self) -> str:
        """One of `RESULTS`, for the model."""
        if self.ended in (None, LENGTH):
            return "unfinished"
        if self.ended == ILLEGAL:
            return "forfeited"
        return {1.0: "won", 0.5: "drawn", 0.0: "lost"}[self.score]


class GameTask(ChessTask, EpisodicTask):
    """Components (raw values in [0, 1]):

    outcome: 1 for a mate, 0.5 for a draw, 0 for being mated and for an illegal move; of a game that is not over, the win
        probability as `task.judge` sees it.
    legal_moves: share of its moves that the model played, all of them where the game ended before.
    won, drawn, lost, forfeited (by what is no legal move), unfinished: which of these it was.

    Raises:
        EngineError: the opponent, or the judge, is an engine that does not work.
    """

    name, Settings = "game", GameSettings

    def __init__(self, settings: GameSettings):
        self.style = settings.prompt_style
        self._moves = settings.episode.turns if settings.episode else 1  # of the model
        self.component_weights = with_overrides(self.name, WEIGHTS, settings.rewards)
        self.stop_rule = policy_stop()
        self._opponent: Opponent = make_opponent(settings)
        self.asks = self._opponent.asks
        assert settings.judge == "material" or settings.engine is not None, "refused by the config"
        self._judge = EnginePool(settings.engine) if settings.judge == "engine" and settings.engine else None
        self._logged = Logged({}, {})

    def close(self) -> None:
        self._opponent.close()
        if self._judge is not None:
            self._judge.close()

    def prompt(self, position: Position, seed: int) -> Prompt:
        """The policy task's. Raises ValueError: there is no legal move."""
        if not any(chess.Board(position.fen).legal_moves):
            raise ValueError(f"task game: the game is over in {position.fen!r}; expected positions with a legal move")
        return move_prompt(self.style, position.fen, position)

    def meet(self, write: Write) -> None:
        assert isinstance(self._opponent, PolicyOpponent), "`asks` names no policy else"
        self._opponent.write = write

    def reset(self, prompt: Prompt) -> GameEpisode:
        return self.game_from(prompt.row.fen, 0, prompt.draw)

    def game_from(self, fen: str, number: int, draw: tuple[int, ...]) -> GameEpisode:
        """A game from a position."""
        board = chess.Board(fen)
        return GameEpisode(board, number, board.turn, task=self, draw=draw)

    def observation(self, prompt: Prompt) -> str:
        return self._text_of(chess.Board(prompt.row.fen))

    def _text_of(self, board: chess.Board) -> str:
        return f"\n{move_prompt(self.style, board.fen()).text}"

    def steps(self, environments: Sequence[GameEpisode], completions: Sequence[str]) -> list[tuple[str, bool]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The model's move in each game, and the opponent's in all that go on, at once."""
        pairs = zip(completions, environments, strict=True)
        written = [parse_answer(self.style, text, game.fen).best for text, game in pairs]
        play_round(environments, lambda games: written, self.replies, most=2 * self._moves)
        return [self._observed(game) for game in environments]

    def replies(self, games: Sequence[GameEpisode]) -> list[str]:
        """The opponent as a player."""
        draws = [random.Random(f"opponent/{game.draw}/{len(game.board.move_stack)}") for game in games]
        return self._opponent.moves([game.board for game in games], draws)

    def _observed(self, game: GameEpisode) -> tuple[str, bool]:
        if game.ended is None:
            return self._text_of(game.board), False
        return f"\n{game.fen} {game.result if game.ended == LENGTH else game.ended}", True

    def score(self, prompts: Sequence[Prompt], episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
        games = [game for episode in episodes if isinstance(game := episode.environment, GameEpisode)]
        assert len(games) == len(episodes), "what `reset` returns"
        self._logged = Logged({"moves": [float(game.moves) for game in games]}, {})
        if isinstance(other := self._opponent, PolicyOpponent) and other.written:
            self._logged.metrics["opponent_replaced"] = [other.replaced / other.written]
            other.written = other.replaced = 0
        return self.components(games)

    def components(self, games: Sequence[GameEpisode]) -> dict[str, np.ndarray]:
        """Raw components [games] float32, by name."""
        values = self._values([game for game in games if game.result == "unfinished"])
        fixed = {"won": 1.0, "drawn": 0.5, "lost": 0.0, "forfeited": 0.0}
        rows = [
            {
                "outcome": fixed[game.result] if game.result in fixed else values[game.board.fen()],
                "legal_moves": game.moves / self._moves if game.ended == ILLEGAL else 1.0,
                game.result: 1.0,
            }
            for game in games
        ]
        return stack(rows, self.component_weights)

    def logged(self) -> Logged:
        return self._logged

    def _values(self, games: Sequence[GameEpisode]) -> dict[str, float]:
        """Win probability of the side to move, which is the model's, by FEN."""
        if self._judge is None:
            return {game.board.fen(): win_probability(balance(game.board)) for game in games}
        analyses = self._judge.by_fen(game.board.fen() for game in games)
        return {fen: win_probability(analysis.score) for fen, analysis in analyses.items()}
