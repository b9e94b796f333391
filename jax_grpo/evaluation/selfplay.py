"""Closed-loop self-play: how many half-moves does the model play before its first illegal one?

Two worlds: python-chess keeps the board, or the model does (ArbiterSim: the state it writes is the next prompt's). Legality is
always judged on the true board. Knows nothing of generation.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import chess

from jax_grpo.evaluation.generation import Complete, Tick
from jax_grpo.evaluation.intervals import Estimate, bootstrap_mean, proportion
from jax_grpo.tasks.base import Position, Prompt
from jax_grpo.tasks.environment import next_state, state_prompt
from jax_grpo.tasks.policy import PolicyTask

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


@dataclasses.dataclass
class Game:
    """A game as it is played.

    Attributes:
        board: the true one, with the moves so far.
        state: the FEN the model is shown.
        opening: half-moves that were not the model's.
        legal: half-moves of the model, all legal.
        exact: how many of the states it wrote, from the first on, were the true ones.
        ended: a key of `ENDS`, or None.
        last_text: what it wrote where the game ended.
    """

    board: chess.Board
    state: str
    opening: int
    legal: int = 0
    exact: int = 0
    ended: str | None = None
    last_text: str = ""


def openings(games: int, seed: int) -> list[Game]:
    """Games about to begin: the first from the start position, the others after `OPENING` random half-moves."""
    made = []
    for number in range(games):
        rng, board = random.Random(f"{seed}/{number}"), chess.Board()
        for _ in range(OPENING if number else 0):
            board.push(rng.choice(sorted(board.legal_moves, key=chess.Move.uci)))
        made.append(Game(board, board.fen(), len(board.move_stack)))
    return made


def play(
    games: Sequence[Game],
    policy: PolicyTask,
    choose: Complete,
    simulate: Complete | None,
    max_half_moves: int,
    tick: Tick,
) -> None:
    """Plays all games to their ends, side by side, in place.

    Args:
        games: see `openings`.
        policy: the task that asks for one move.
        choose: completes its prompts.
        simulate: completes environment prompts; None: python-chess is the environment.
        max_half_moves: of the model.
        tick: called with how many half-moves all games have made together.
    """
    for step in range(max_half_moves):
        live = [number for number, game in enumerate(games) if game.ended is None]
        if not live:
            return
        prompts = [policy.prompt(Position(games[number].state), 0) for number in live]
        moved: list[tuple[int, str, str]] = []
        for number, text in zip(live, choose(prompts, numbers=live, step=step), strict=True):
            game, uci = games[number], text.strip()
            if uci not in {move.uci() for move in game.board.legal_moves}:
                game.ended, game.last_text = "illegal_move", text
                continue
            move = chess.Move.from_uci(uci)
            moved.append((number, _question(game, uci), next_state(game.board, move)))
            game.board.push(move)
            game.legal += 1
        if simulate is None:
            answers = [answer for _, _, answer in moved]
        else:
            asked = [Prompt(question, 0) for _, question, _ in moved]
            # Numbers beyond the games': with a game's own, a state would be drawn with the random numbers of the move before it.
            answers = simulate(asked, numbers=[len(games) + number for number, _, _ in moved], step=step)
        for (number, _, truth), answer in zip(moved, answers, strict=True):
            _continue(games[number], truth, answer)
        tick(step + 1)
    for game in games:
        game.ended = game.ended or "length"


def _question(game: Game, uci: str) -> str:
    """The environment prompt about the state that the model was shown."""
    return state_prompt(game.state, uci, [move.uci() for move in game.board.move_stack])


def _continue(game: Game, truth: str, answer: str) -> None:
    """Takes the environment's answer for the next state, or ends the game."""
    fields = answer.rstrip("+").split("+")
    if game.exact == game.legal - 1 and fields[0] == truth.partition("+")[0]:
        game.exact += 1
    game.last_text = answer
    if (outcome := game.board.outcome()) is not None:
        game.ended = "checkmate" if outcome.termination == chess.Termination.CHECKMATE else "draw"
    elif len(fields) != 4 or not _readable(fields[0]):
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


def selfplay_estimates(games: Sequence[Game], own_environment: bool, seed: int) -> dict[str, Estimate]:
    """`group/name` estimates.

    `all/half_moves`: legal ones before the game ended (for games that did not end by an illegal move a lower bound of what the
    policy would have played); `all/exact_states`: of a model's own environment; `all/ended_*`: share of games by end;
    `white/legal` and `black/legal`: share of that side's attempts that were legal moves.
    """
    out = {"all/half_moves": bootstrap_mean([game.legal for game in games], seed)}
    if own_environment:
        out["all/exact_states"] = bootstrap_mean([game.exact for game in games], seed)
    for end in ENDS:
        if own_environment or end in ON_A_TRUE_BOARD:
            out[f"all/ended_{end}"] = proportion([game.ended == end for game in games])
    for side, color in {"white": chess.WHITE, "black": chess.BLACK}.items():
        out[f"{side}/legal"] = proportion([legal for game in games for legal in _attempts(game, color)])
    return out


def _attempts(game: Game, color: chess.Color) -> list[bool]:
    """Legality of each move the model tried for a colour."""
    plies = range(game.opening, len(game.board.move_stack))
    legal = [True for ply in plies if (ply % 2 == 0) == color]
    return [*legal, False] if game.ended == "illegal_move" and game.board.turn == color else legal


def games_record(games: Sequence[Game]) -> dict[str, Any]:
    """JSON of the games' lengths and ends."""
    return {"half_moves": [game.legal for game in games], "ended": [game.ended for game in games]}
