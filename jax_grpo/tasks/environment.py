"""The `A:` task: the model simulates the board. Given a state, a move and the recent moves, it writes the next state.

Completion: `<new FEN>+<reward>+<terminated>+<truncated>`. Rewards: 0.001 for an ordinary legal move, 1.0 for checkmate, 0.5 for a
draw (stalemate, insufficient material, 75 moves: python-chess's `outcome()` without claims), -1.0 for an illegal move, which
leaves the FEN as it was and sets truncated.
"""

import random
from collections.abc import Sequence

import chess
import numpy as np

from jax_grpo.config_sections import TaskConfig
from jax_grpo.tasks.base import Position, Prompt, stack, with_overrides
from jax_grpo.tasks.stop import environment_stop

HISTORY = 10  # moves shown, the current one included
WEIGHTS = {
    "structure": 0.1,
    "exact_fen": 1.0,
    "fen_similarity": 0.5,
    "reward_field": 0.3,
    "flags": 0.1,
    "malformed": -1.0,
}


def next_state(board: chess.Board, move: chess.Move) -> str:
    """The exact completion for a move, legal or not."""
    # `in board.legal_moves` also takes castling written king takes rook (`e1h1`), which the list does not have.
    if move not in list(board.legal_moves):
        return f"{board.fen()}+-1.0+0+1"
    after = board.copy(stack=False)
    after.push(move)
    outcome = after.outcome()
    reward = "0.001" if outcome is None else "0.5" if outcome.winner is None else "1.0"
    return f"{after.fen()}+{reward}+{int(outcome is not None)}+0"


def environment_prompt(board: chess.Board, move: chess.Move, before: Sequence[str]) -> str:
    """`A: <FEN>+<uci>+<history>+`, the history ending with the move itself."""
    return state_prompt(board.fen(), move.uci(), before)


def state_prompt(fen: str, uci: str, before: Sequence[str]) -> str:
    """`environment_prompt` for a state given as text, such as one that a model wrote."""
    return f"A: {fen}+{uci}+{' '.join([*before[-(HISTORY - 1) :], uci])}+"


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


class EnvironmentTask:
    """See the module. Components (raw values in [0, 1]):

    structure: four fields, each of its kind.   exact_fen, fen_similarity: of the new FEN.   reward_field: equal as a number.
    flags: share of the two flags that are right.   malformed: not four fields.
    """

    name = "environment"

    def __init__(self, config: TaskConfig):
        self._illegal_fraction = config.illegal_fraction
        self.component_weights = with_overrides(self.name, WEIGHTS, config.rewards)
        self.stop_rule = environment_stop()

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Nothing to do before the completions are there."""

    def close(self) -> None:
        pass

    def prompt(self, position: Position, seed: int) -> Prompt:
        board = chess.Board(position.fen)
        if position.move is not None:
            text = environment_prompt(board, chess.Move.from_uci(position.move), position.history)
            return Prompt(text, 0, position, answer=position.next_state)
        move = draw_move(board, random.Random(seed), self._illegal_fraction)
        text = environment_prompt(board, move, position.history)
        return Prompt(text, 0, position, answer=next_state(board, move))

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        rows = [_row(prompt.answer or "", text) for prompt, text in zip(prompts, completions, strict=True)]
        return stack(rows, list(self.component_weights))


def _row(answer: str, text: str) -> dict[str, float]:
    expected, found = answer.split("+"), text.rstrip("+").split("+")
    if len(found) != 4:
        return {"malformed": 1.0, "fen_similarity": similarity(expected[0], found[0][:120])}
    reward = plain_number(found[1])
    flags = [found[i] == expected[i] for i in (2, 3)]
    kinds = [found[0] != "", reward is not None, found[2] in ("0", "1"), found[3] in ("0", "1")]
    return {
        "structure": float(all(kinds)),
        "exact_fen": float(found[0] == expected[0]),
        "fen_similarity": similarity(expected[0], found[0][:120]),
        "reward_field": float(reward is not None and reward == float(expected[1])),
        "flags": sum(flags) / 2,
    }


def plain_number(text: str) -> float | None:
    """A plain decimal number; None for anything else, `nan` and `1e9` included."""
    digits = text.removeprefix("-").replace(".", "", 1)
    return float(text) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
