"""Closed-loop self-play: how many half-moves does the model play before its first illegal one?

Two worlds: python-chess keeps the board, or the model does (ArbiterSim: the state it writes is the next prompt's). Legality is
always judged on the true board. Knows nothing of generation.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence

import chess

from jax_grpo.chess import games
from jax_grpo.chess.evaluate.policy import model_player
from jax_grpo.chess.games import ILLEGAL, LENGTH, Game, random_opening
from jax_grpo.chess.positions.position import HISTORY, recent_moves
from jax_grpo.chess.tasks.environment import next_state, state_prompt
from jax_grpo.chess.tasks.policy import PolicyTask
from jax_grpo.evaluate.statistics import Estimate, bootstrap_mean, proportion
from jax_grpo.rollout.texts import Complete, Tick
from jax_grpo.tasks.base import Prompt

OPENING = 4  # random half-moves before the model's first, so that greedy games differ; the first game has none
ENDS = {
    "illegal_move": "the model's move is not legal, or not a move",
    "checkmate": "checkmate on the true board",
    "draw": "a draw on the true board (stalemate, material, 75 moves, fivefold repetition)",
    "length": "the limit of half-moves",
    "unreadable_state": "the state written is not a FEN in four fields",
    "environment_refused": "the model called its own legal move illegal",
    "environment_ended": "the model called the game over, and it was not",
}
ON_A_TRUE_BOARD = ("illegal_move", "checkmate", "draw", "length")


@dataclasses.dataclass(eq=False)
class SelfPlay(Game):
    """A game of the model against itself; its environment may end it by a key of `ENDS`."""

    state: str = ""  # the FEN that the model is shown
    exact: int = 0  # how many of the states it wrote, from the first on, were the true ones
    answer: str = ""  # of the environment, the last one

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state = self.board.fen()

    @property
    def fen(self) -> str:
        return self.state

    @property
    def end(self) -> str:
        """A key of `ENDS`."""
        ended = "illegal_move" if self.ended == ILLEGAL else self.ended
        return ended if ended in ENDS else "draw"

    @property
    def last_text(self) -> str:
        """What the model wrote last where the game ended: a move that is not legal, or a state."""
        return self.illegal.get(len(self.board.move_stack), self.answer)


def openings(count: int, seed: int) -> list[SelfPlay]:
    """Games about to begin: the first from the start position, the others after `OPENING` random half-moves."""
    rngs = [random.Random(f"{seed}/{number}") for number in range(count)]
    return [SelfPlay(random_opening(rng, OPENING if n else 0), n) for n, rng in enumerate(rngs)]


def play(
    begun: Sequence[SelfPlay],
    policy: PolicyTask,
    choose: Complete,
    simulate: Complete | None,
    max_half_moves: int,
    tick: Tick,
) -> None:
    """Plays all games to their ends, side by side, in place; each tick is one more half-move of all of them.

    `choose` completes the prompts of the policy task, which ask for one move; `simulate` those of the environment (None:
    python-chess is the environment).
    """

    def after(moved: Sequence[SelfPlay]) -> None:
        _simulate([game for game in moved if game.ended != ILLEGAL], simulate, len(begun))
        tick(moved[0].half_moves)

    games.play(begun, model_player(policy, choose), draws="automatic", most=max_half_moves, after=after)


def _simulate(moved: Sequence[SelfPlay], simulate: Complete | None, count: int) -> None:
    """The environment's answers for the next states of some of `count` games, in which a legal move has just been played."""
    prompts, answers = [], []
    for game in moved:
        before = game.board.copy(stack=HISTORY + 1)
        move = before.pop()
        prompts.append(Prompt(state_prompt(game.state, move.uci(), recent_moves(before)), 0))
        answers.append(next_state(before, move))
    truths = answers
    if simulate is not None and moved:
        # Numbers beyond the games': with a game's own, a state would be drawn with the random numbers of the move before it.
        numbers = [count + game.number for game in moved]
        answers = simulate(prompts, numbers=numbers, step=moved[0].half_moves - 1)
    for game, truth, answer in zip(moved, truths, answers, strict=True):
        _continue(game, truth, answer)


def _continue(game: SelfPlay, truth: str, answer: str) -> None:
    """Takes the environment's answer for the next state, or ends the game."""
    fields = answer.rstrip("+").split("+")
    if game.exact == game.half_moves - 1 and fields[0] == truth.partition("+")[0]:
        game.exact += 1
    game.answer = answer
    if game.ended not in (None, LENGTH):
        return
    if len(fields) != 4 or not _readable(fields[0]):
        game.ended = "unreadable_state"
    elif fields[3] == "1":
        game.ended = "environment_refused"
    elif fields[2] == "1":
        game.ended = "environment_ended"
    else:
        game.state = fields[0]


def _readable(fen: str) -> bool:
    """Whether a policy prompt can be made of it: six fields that python-chess reads. The position may be impossible."""
    try:
        chess.Board(fen)
    except ValueError:
        return False
    return len(fen.split(" ")) == 6


def selfplay_estimates(played: Sequence[SelfPlay], own_environment: bool, seed: int) -> dict[str, Estimate]:
    """`group/name` estimates.

    `all/half_moves`: legal ones before the game ended (for games that did not end by an illegal move a lower bound of what the
    policy would have played); `all/exact_states`: of a model's own environment; `all/ended_*`: share of games by end;
    `white/legal` and `black/legal`: share of that side's attempts that were legal moves.
    """
    out = {"all/half_moves": bootstrap_mean([game.half_moves for game in played], seed)}
    if own_environment:
        out["all/exact_states"] = bootstrap_mean([game.exact for game in played], seed)
    for end in ENDS if own_environment else ON_A_TRUE_BOARD:
        out[f"all/ended_{end}"] = proportion([game.end == end for game in played])
    for side, color in {"white": chess.WHITE, "black": chess.BLACK}.items():
        out[f"{side}/legal"] = proportion([legal for game in played for legal in _attempts(game, color)])
    return out


def _attempts(game: SelfPlay, color: chess.Color) -> list[bool]:
    """Legality of each move the model tried for a colour."""
    legal = [True] * game.moves_by(color)
    return [*legal, False] if game.ended == ILLEGAL and game.board.turn == color else legal


def pgn(games_of: Mapping[str, Sequence[SelfPlay]], name: str) -> str:
    """The games of each set (such as `python_chess/greedy`), one PGN after another; each says how it ended.

    The model of that name is on both sides. Without a clock and date, the same weights and seed give the same file.
    """
    texts = []
    for key, played in games_of.items():
        event = f"Self-play, {key.replace('_', ' ').replace('/', ', ')}"
        for number, game in enumerate(played, 1):
            why = ENDS[game.end]
            headers = {"Event": event, "Site": "jax_grpo", "Round": str(number), "Termination": why}
            text = f"{why}: {' '.join(game.last_text.split())!r}"
            by_model = game.end not in ("checkmate", "draw", "length")
            out = games.to_pgn(game, (name, name), headers, text if by_model else "")
            nodes = list(out.mainline())
            if game.opening and (last := nodes[game.opening - 1]) is not nodes[-1]:
                last.comment = "the model's first move follows"
            texts.append(str(out))
    return "\n\n".join(texts) + ("\n" if games_of else "")
