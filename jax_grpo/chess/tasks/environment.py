"""The `A:` task: the model simulates the board. Given a state, a move and the recent moves, it writes the next state.

Completion: `<new FEN>+<reward>+<terminated>+<truncated>`. Rewards: 0.001 for an ordinary legal move, 1.0 for checkmate, 0.5 for a
draw (stalemate, insufficient material, 75 moves: python-chess's `outcome()` without claims), -1.0 for an illegal move, which
leaves the FEN as it was and sets truncated.
"""

import functools
import random
from collections.abc import Sequence
from typing import Any

import chess
import numpy as np

from jax_grpo.chess.positions.position import Position, legal_uci
from jax_grpo.chess.positions.rookworld import CHECKMATE, DRAW, ILLEGAL, ORDINARY, state_prompt, state_text
from jax_grpo.chess.settings import EnvironmentSettings
from jax_grpo.chess.tasks.chess_task import ChessTask
from jax_grpo.tasks.base import Prompt, stack, with_overrides
from jax_grpo.tasks.stop import StopRule, automaton

LONGEST_FEN = 120  # characters compared; what runs on beyond any FEN only costs time
WEIGHTS = {
    "structure": 0.1,
    "exact_fen": 1.0,
    "fen_similarity": 0.5,
    "reward_field": 0.3,
    "flags": 0.1,
    "malformed": -1.0,
}


@functools.cache
def environment_stop() -> StopRule:
    """After the first character of the fourth `+`-separated field, which is a single flag; nothing after it counts."""
    any_character = "".join(map(chr, range(256)))
    return automaton([0, 1, 2, 4, 4], [(0, "+", 1), (1, "+", 2), (2, "+", 3), (3, any_character, 4)])


def next_state(board: chess.Board, move: chess.Move) -> str:
    """The exact completion for a move, legal or not."""
    if move.uci() not in legal_uci(board):
        return state_text(board.fen(), ILLEGAL, terminated=False, truncated=True)
    after = board.copy(stack=False)
    after.push(move)
    outcome = after.outcome()
    reward = ORDINARY if outcome is None else DRAW if outcome.winner is None else CHECKMATE
    return state_text(after.fen(), reward, terminated=outcome is not None, truncated=False)


def draw_move(board: chess.Board, rng: random.Random, illegal_fraction: float) -> chess.Move:
    """A uniform legal move, or with the given probability one that is not legal here."""
    legal = sorted(board.legal_moves, key=chess.Move.uci)
    if legal and rng.random() >= illegal_fraction:
        return rng.choice(legal)
    while True:
        source, target = rng.sample(range(64), 2)
        if (move := chess.Move(source, target)) not in legal:
            return move


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance (insertions, deletions, substitutions cost 1); row by row in NumPy, O(len(a) len(b))."""
    if not a or not b:
        return len(a) or len(b)
    b_chars = np.array([ord(c) for c in b])
    steps = np.arange(len(b) + 1)
    row = steps.copy()
    for i, char in enumerate(a, start=1):
        candidate = np.empty_like(row)
        candidate[0] = i
        candidate[1:] = np.minimum(row[1:] + 1, row[:-1] + (b_chars != ord(char)))
        # insertions run along the row: candidate[j] = min over k <= j of candidate[k] + (j - k)
        row = np.minimum.accumulate(candidate - steps) + steps
    return int(row[-1])


def similarity(a: str, b: str) -> float:
    """1 - edit distance / longer length, in [0, 1]; 1 for two empty texts."""
    return 1 - edit_distance(a, b) / max(len(a), len(b), 1)


class EnvironmentTask(ChessTask):
    """See the module. Components (raw values in [0, 1]):

    structure: four fields, each of its kind.   exact_fen, fen_similarity: of the new FEN.   reward_field: equal as a number.
    flags: share of the two flags that are right.   malformed: not four fields.
    """

    name, Settings = "environment", EnvironmentSettings

    def __init__(self, settings: EnvironmentSettings):
        self._illegal_fraction = settings.illegal_fraction
        self.component_weights = with_overrides(self.name, WEIGHTS, settings.rewards)
        self.stop_rule = environment_stop()
        self.answers = [next_state(chess.Board(), chess.Move.from_uci("e2e4"))]

    def prompt(self, position: Position, seed: int) -> Prompt:
        board, uci, answer = chess.Board(position.fen), position.move, position.next_state
        if uci is None:
            move = draw_move(board, random.Random(seed), self._illegal_fraction)
            uci, answer = move.uci(), next_state(board, move)
        return Prompt(state_prompt(board.fen(), uci, position.history), 0, position, answer)

    def claims(self, row: Position) -> bool:
        return row.move is not None

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        return stack([_row(*each) for each in zip(prompts, completions, strict=True)], self.component_weights)


def _row(prompt: Prompt, text: str) -> dict[str, float]:
    judged = judge(prompt, text)
    if text.rstrip("+").count("+") != 3:
        return {"malformed": 1.0, "fen_similarity": judged["similarity"]}
    return {
        "structure": float(judged["format"]),
        "exact_fen": float(judged["next_state"]),
        "fen_similarity": judged["similarity"],
        "reward_field": float(judged["reward"]),
        "flags": (judged["terminated"] + judged["truncated"]) / 2,
    }


def judge(prompt: Prompt, text: str) -> dict[str, Any]:
    """What a completion says beside what the rules say.

    Booleans `format` (four fields, each of its kind), `next_state` (the FEN exactly), `reward`, `terminated`, `truncated`
    (equal to the rules'; False where the field is missing); numbers `similarity` (normalised Levenshtein similarity of
    the FEN, 0 to 1) and `reward_error` (absolute; None where no number was written).
    """
    fen, reward, terminated, truncated = (prompt.answer or "").split("+")
    fields = text.rstrip("+").split("+")
    written_fen, written_reward, *flags = [*fields, "", "", "", ""][:4]
    number = plain_number(written_reward)
    kinds = written_fen != "" and number is not None and set(flags) <= {"0", "1"}
    return {
        "format": len(fields) == 4 and kinds,
        "next_state": written_fen == fen,
        "similarity": similarity(fen, written_fen[:LONGEST_FEN]),
        "reward": number == float(reward),
        "reward_error": None if number is None else abs(number - float(reward)),
        "terminated": flags[0] == terminated,
        "truncated": flags[1] == truncated,
    }


def plain_number(text: str) -> float | None:
    """A plain decimal number; None for anything else, `nan` and `1e9` included."""
    digits = text.removeprefix("-").replace(".", "", 1)
    return float(text) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
