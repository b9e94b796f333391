"""Closed-loop self-play: how many half-moves does the model play before its first illegal one?

Two worlds: python-chess keeps the board, or the model does (ArbiterSim: the state it writes is the next prompt's). Legality is
always judged on the true board. Knows nothing of generation.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence

import chess
import chess.pgn

from jax_grpo.evaluate.statistics import Estimate, bootstrap_mean, proportion
from jax_grpo.positions.position import recent_moves
from jax_grpo.positions.random_play import random_move
from jax_grpo.positions.rookworld import legal_uci
from jax_grpo.rollout.texts import Complete, Tick
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
    """A game as it is played."""

    board: chess.Board  # the true one, with the moves so far
    state: str  # the FEN the model is shown
    opening: int  # half-moves that were not the model's
    legal: int = 0  # half-moves of the model, all legal
    exact: int = 0  # how many of the states it wrote, from the first on, were the true ones
    ended: str | None = None  # a key of `ENDS`
    last_text: str = ""  # what it wrote where the game ended


def openings(games: int, seed: int) -> list[Game]:
    """Games about to begin: the first from the start position, the others after `OPENING` random half-moves."""
    begun = []
    for number in range(games):
        rng, board = random.Random(f"{seed}/{number}"), chess.Board()
        for _ in range(OPENING if number else 0):
            board.push(random_move(board, rng))
        begun.append(Game(board, board.fen(), len(board.move_stack)))
    return begun


def play(
    games: Sequence[Game],
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
    for step in range(max_half_moves):
        live = [number for number, game in enumerate(games) if game.ended is None]
        if not live:
            return
        prompts = [policy.prompt(Position(games[number].state), 0) for number in live]
        questions: dict[int, Prompt] = {}  # of the games whose move was legal
        truths: list[str] = []
        for number, text in zip(live, choose(prompts, numbers=live, step=step), strict=True):
            game = games[number]
            uci = policy.move(text, game.state)
            if uci not in legal_uci(game.board):
                game.ended, game.last_text = "illegal_move", text
                continue
            questions[number] = Prompt(state_prompt(game.state, uci, recent_moves(game.board)), 0)
            truths.append(next_state(game.board, chess.Move.from_uci(uci)))
            game.board.push_uci(uci)
            game.legal += 1
        answers = truths
        if simulate is not None:
            # Numbers beyond the games': with a game's own, a state would be drawn with the random numbers of the move before it.
            numbers = [len(games) + number for number in questions]
            answers = simulate(list(questions.values()), numbers=numbers, step=step)
        for number, truth, answer in zip(questions, truths, answers, strict=True):
            _continue(games[number], truth, answer)
        tick(step + 1)
    for game in games:
        game.ended = game.ended or "length"


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
    for end in ENDS if own_environment else ON_A_TRUE_BOARD:
        out[f"all/ended_{end}"] = proportion([game.ended == end for game in games])
    for side, color in {"white": chess.WHITE, "black": chess.BLACK}.items():
        out[f"{side}/legal"] = proportion([legal for game in games for legal in _attempts(game, color)])
    return out


def _attempts(game: Game, color: chess.Color) -> list[bool]:
    """Legality of each move the model tried for a colour."""
    plies = range(game.opening, len(game.board.move_stack))
    legal = [True for ply in plies if (ply % 2 == 0) == color]
    return [*legal, False] if game.ended == "illegal_move" and game.board.turn == color else legal


def pgn(games_of: Mapping[str, Sequence[Game]], name: str) -> str:
    """The games of each set (such as `python chess, greedy`), one PGN after another; each says how it ended.

    The model of that name is on both sides. Without a clock and date, the same weights and seed give the same file.
    """
    texts = []
    for event, games in games_of.items():
        for number, game in enumerate(games, 1):
            out, ended = chess.pgn.Game.from_board(game.board), game.ended or "length"
            headers = {"Event": f"Self-play, {event}", "Site": "jax_grpo", "Date": "????.??.??", "Round": str(number)}
            out.headers.update(headers | {"White": name, "Black": name, "Termination": ENDS[ended]})
            end = out.end()
            if ended not in ("checkmate", "draw", "length"):
                end.comment = f"{ENDS[ended]}: {' '.join(game.last_text.split())!r}".replace("}", ")")
            nodes = list(out.mainline())
            if game.opening and (last := nodes[game.opening - 1]) is not end:
                last.comment = "the model's first move follows"
            texts.append(str(out))
    return "\n\n".join(texts) + ("\n" if games_of else "")
