"""The `P:` task: five candidate moves, their evaluations and the best move; or, with the reduced prompts, one move.

Parsed by field, never by column; the candidates are not sorted. The best move is the engine's first for both colours: the
published labels give Black the worst of the five (`best_for_black: last` reproduces them).
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import chess
import numpy as np

from jax_grpo.chess.positions.position import UCI, Position, as_white, in_style, legal_uci
from jax_grpo.chess.positions.rookworld import policy_prompt
from jax_grpo.chess.positions.values import move_table, moves_lost, win_probability
from jax_grpo.chess.settings import OWN_SIDE, PolicySettings
from jax_grpo.chess.tasks.chess_task import ChessTask
from jax_grpo.chess.tasks.engine import EnginePool
from jax_grpo.tasks.base import Prompt, stack, with_overrides
from jax_grpo.tasks.stop import StopRule, automaton

# States of the policy rule.
SEEKING, SEEN_B, SPACES, _FROM_RANK, _TO_FILE, _TO_RANK, _PROMOTION, _ACCEPT = range(8)
FILES, RANKS, INNER_RANKS, PROMOTIONS = "abcdefgh", "12345678", "234567", "qrbn"
CANDIDATES = 5
# What the prompt of a style ends with, and the first state of its stop rule.
PROMPT_ENDS = {"full": ("M:", SEEKING), "best_move": ("B:", SPACES), OWN_SIDE: ("B:", SPACES)}
WEIGHTS = {
    "full": {"structure": 0.2, "parseable": 0.1, "legal_moves": 0.2, "top_five": 0.5, "evaluation": 0.2}
    | {"best_move": 1.0, "quality": 0.5, "malformed": -1.0, "legal": 0.5},
    "best_move": {"parseable": 0.1, "legal": 1.0, "top_five": 0.2, "best_move": 0.3, "quality": 0.4, "malformed": -0.5},
}
WEIGHTS[OWN_SIDE] = WEIGHTS["best_move"]
# Components of runs that ask for them: they need positions with every legal move's evaluation, or exact ones.
VALUE, TECHNIQUE = "value", "technique"
DECAY = 0.7  # of `technique`'s reward, for each move by which the mate is put off
ONE_MOVE = (" e2e4", " a7a8q")
ANSWERS = {"full": (" e2e4 g1f3    E: 0.35 -1.2    B: e2e4",), "best_move": ONE_MOVE, OWN_SIDE: ONE_MOVE}
_NUMBER = re.compile(r"[-+]?[0-9]{1,4}(?:\.[0-9]{1,4})?")


@functools.cache
def policy_stop() -> StopRule:
    """After the move that follows `B:`.

    `SEEKING` looks for `B:` (full prompts start there); `SPACES` is right after it (reduced prompts start there). A move
    to an inner rank ends at its fourth character. One to rank 1 or 8 may promote, so the next character decides; it is
    part of the text only if it is a promotion letter. Anything that cannot continue a move stops at once, excluded.
    """
    return automaton(
        [SEEKING, SEEKING, *[_ACCEPT] * 6],
        [
            (SEEKING, "B", SEEN_B),
            (SEEN_B, "B", SEEN_B),
            (SEEN_B, ":", SPACES),
            (SPACES, " ", SPACES),
            (SPACES, FILES, _FROM_RANK),
            (_FROM_RANK, RANKS, _TO_FILE),
            (_TO_FILE, FILES, _TO_RANK),
            (_TO_RANK, INNER_RANKS, _ACCEPT),
            (_TO_RANK, "18", _PROMOTION),
            (_PROMOTION, PROMOTIONS, _ACCEPT),
        ],
    )


def move_prompt(style: str, fen: str, position: Position | None = None) -> Prompt:
    """What asks for a move in a style, a key of `PROMPT_ENDS`."""
    field, start_state = PROMPT_ENDS[style]
    shown = as_white(fen) if style == OWN_SIDE else fen
    return Prompt(policy_prompt(shown, field), start_state, position)


class Answer(NamedTuple):
    """Fields of a completion as written; `structured` says whether all the markers stood in order."""

    moves: list[str]
    evaluations: list[str]
    best: str
    structured: bool

    def pawns(self) -> dict[str, float]:
        """What it says of its candidates, by move, in pawns from the side to move; what is no number is left out."""
        pairs = zip(self.moves, self.evaluations, strict=False)
        return {move: float(number) for move, number in pairs if _NUMBER.fullmatch(number)}


def parse_answer(style: str, text: str, fen: str) -> Answer:
    """Fields of a completion about the position `fen`: the one move, or of a `full` prompt what follows `M:`.

    Moves are those of the position's board. Any text parses, bad ones unstructured.
    """
    if style != "full":
        return Answer([], [], in_style(style, text.strip(), fen), True)
    # Split, not matched: one pattern for the row backtracks in cubic time on runs of blanks, which collapsed policies write.
    fields = text.split(":", 2)
    # Before a colon stand a field, a blank and the next field's marker.
    if len(fields) == 3 and re.fullmatch(r"\sE", fields[0][-2:]) and re.fullmatch(r"\sB", fields[1][-2:]):
        moves, evaluations, best = fields[0][:-1].split(), fields[1][:-1].split(), fields[2].split()
        if len(best) <= 1:
            return Answer(moves, evaluations, "".join(best), True)
    return Answer([], [], "", False)


class PolicyTask(ChessTask):
    """See the module. Unlabelled positions need `task.engine`.

    Components (raw values in [0, 1]):
        structure: markers and counts of fields are right.      parseable: share of fields that are moves and numbers.
        legal_moves: share of the five candidates that are legal.  top_five: share of (distinct) candidates, or whether the
        one move, is among the engine's first five.  evaluation: 1 - mean win-probability error of candidates with a label.
        best_move: the move is the engine's first.  quality: win probability of the move over the best one's; 0 for a legal
        move that is neither labelled nor analysed.  legal: the (best) move is legal.  malformed: no move was found.
        value, where `task.rewards` names it: w(move) - w(best), in [-1, 0], of the win probabilities of all legal moves; what is
        no legal move counts as the worst of them.
        technique, where named: 0.7 ** (moves lost against the shortest mate), 0 for a move that lets the win slip or is none.

    Raises:
        NotATable: `value` is asked for and a position lacks a legal move's evaluation; `technique`, and it is not a won position
            with exact ones, which no engine makes up for.
    """

    name, Settings = "policy", PolicySettings

    def __init__(self, settings: PolicySettings):
        self.style, self._best_for_black = settings.prompt_style, settings.best_for_black
        self._values, self._technique = (name in (settings.rewards or {}) for name in (VALUE, TECHNIQUE))
        optional = ((VALUE, self._values), (TECHNIQUE, self._technique))
        weights = WEIGHTS[self.style] | {name: 0.0 for name, wanted in optional if wanted}
        self.component_weights = with_overrides(self.name, weights, settings.rewards)
        self.stop_rule, self.answers = policy_stop(), ANSWERS[self.style]
        self._engine = EnginePool(settings.engine) if settings.engine else None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def prompt(self, position: Position, seed: int) -> Prompt:
        if self._values and self._engine is None:
            move_table(position)  # before anything is generated
        if self._technique:
            moves_lost(position)
        return move_prompt(self.style, position.fen, position)

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """The engine's analyses of unlabelled positions, and the legal moves of all: both are cached."""
        for position in self._labelled(prompts):
            legal_moves(position.fen)

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, np.ndarray]:
        positions = self._labelled(prompts)
        pairs = zip(completions, positions, strict=True)
        answers = [parse_answer(self.style, text, position.fen) for text, position in pairs]
        values = move_values(positions, [answer.best for answer in answers], self._engine)
        rows = [self._row(*row) for row in zip(positions, answers, values, strict=True)]
        return stack(rows, self.component_weights)

    def _labelled(self, prompts: Sequence[Prompt]) -> list[Position]:
        return labelled([prompt.row for prompt in prompts], self._engine, whole=self._values)

    def yardsticks(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        from jax_grpo.chess.evaluate.strength import yardsticks  # which imports this module

        return yardsticks(self, prompts)

    def move(self, text: str, fen: str) -> str:
        """The one move that a completion about `fen` plays, or text that is none."""
        return parse_answer(self.style, text, fen).best

    def _row(self, position: Position, answer: Answer, pawns: float | None) -> dict[str, float]:
        legal = legal_moves(position.fen)
        labels = dict(zip(position.moves, position.evaluations, strict=True))
        # A file, or task.engine.multipv, may have more moves than candidates; a file may have the best one alone.
        ranked = position.moves[:CANDIDATES] or ((position.best,) if position.best else ())
        first = set(ranked)
        worst_wanted = self._best_for_black == "last" and " b " in position.fen
        best = ranked[-1:] if worst_wanted else ranked[:1]
        row = {
            "malformed": float(not answer.structured or not UCI.fullmatch(answer.best)),
            "legal": float(answer.best in legal),
            "best_move": float(answer.best in best),
        }
        if pawns is not None and answer.best in legal and position.evaluations:
            top = win_probability(max(position.evaluations))
            row["quality"] = min(win_probability(pawns) / max(top, 1e-3), 1.0)
        if self._values:
            row[VALUE] = -move_table(position).loss(answer.best)
        if self._technique:
            lost = moves_lost(position).get(answer.best)
            row[TECHNIQUE] = 0.0 if lost is None else DECAY**lost
        if self.style != "full":
            return row | {"parseable": 1 - row["malformed"], "top_five": float(answer.best in first)}
        moves, evaluations = answer.moves[:CANDIDATES], answer.evaluations[:CANDIDATES]
        numbers = [float(e) if _NUMBER.fullmatch(e) else None for e in evaluations]
        # A position may have fewer legal moves than candidates asked for; published rows then list those there are.
        expected = min(CANDIDATES, len(legal))
        listed = max(expected, len(moves), len(evaluations), 1)
        fields = [*(bool(UCI.fullmatch(m)) for m in moves), *(n is not None for n in numbers)]
        errors = [
            abs(win_probability(number) - win_probability(labels[move]))
            for move, number in zip(moves, numbers, strict=False)
            if number is not None and move in labels
        ]
        counts_right = len(answer.moves) == len(answer.evaluations) == expected
        return row | {
            "structure": float(answer.structured and counts_right),
            "parseable": sum(fields) / (2 * listed),
            "legal_moves": len(set(moves) & legal) / listed,
            "top_five": len(set(moves) & first) / max(len(first), 1),
            "evaluation": 1 - sum(errors) / len(errors) if errors else 0.0,
        }


def labelled(positions: Sequence[Position], engine: EnginePool | None, *, whole: bool = False) -> list[Position]:
    """The positions; those without labels get the engine's, when there is one; with `whole`, those that lack a legal move's."""
    if engine is None:
        return list(positions)
    lacking = [len(p.moves) < (len(legal_moves(p.fen)) if whole else 1) for p in positions]
    analyses = engine.by_fen(p.fen for p, lacks in zip(positions, lacking, strict=True) if lacks)
    labels = {fen: {"moves": analysis.moves, "evaluations": analysis.evaluations} for fen, analysis in analyses.items()}
    return [
        dataclasses.replace(p, **labels[p.fen]) if lacks else p for p, lacks in zip(positions, lacking, strict=True)
    ]


def move_values(positions: Sequence[Position], moves: Sequence[str], engine: EnginePool | None) -> list[float | None]:
    """Pawns, for the mover, of each move: its label's, else, if it is legal, the engine's of the position after it, else None."""
    pairs = list(zip(positions, moves, strict=True))
    labels = [dict(zip(p.moves, p.evaluations, strict=True)).get(move) for p, move in pairs]
    if engine is None:
        return labels
    fens = [after_move(p.fen, m) if m not in p.moves and m in legal_moves(p.fen) else None for p, m in pairs]
    analyses = engine.by_fen(fen for fen in fens if fen is not None)
    return [label if fen is None else -analyses[fen].score for label, fen in zip(labels, fens, strict=True)]


@functools.lru_cache(maxsize=65536)
def legal_moves(fen: str) -> frozenset[str]:
    """UCI of every legal move."""
    return frozenset(legal_uci(chess.Board(fen)))


def after_move(fen: str, uci: str) -> str:
    """FEN after a legal move."""
    board = chess.Board(fen)
    board.push_uci(uci)
    return board.fen()
