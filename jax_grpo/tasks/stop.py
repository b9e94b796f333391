"""Stop rules as automata over bytes, and their lift to tokens: exact when a stop straddles tokens.

A rule is a table `state x byte -> state` with one absorbing accept state. On the device a decode step looks its token up in
`state x token -> state`; on the host the same automaton cuts the decoded text. Knows nothing of tasks' meanings.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class TokenBytes(Protocol):
    """What the lift needs of a tokenizer."""

    vocab_size: int
    eos_id: int

    def token_bytes(self) -> list[bytes]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class StopRule:
    """A byte automaton.

    Attributes:
        transitions_SB: int32 [S, 256].
        accept: the state that ends a completion; absorbing.
        includes_last: per state, whether the byte that leads from it to `accept` belongs to the text (a promotion letter
            does; the space that shows that there is none does not). bool [S, 256].
    """

    transitions_SB: np.ndarray
    accept: int
    includes_last_SB: np.ndarray

    def token_table(self, tokenizer: TokenBytes) -> np.ndarray:
        """int32 [S, V]: the state after reading a token's bytes; end-of-text accepts from anywhere."""
        pieces = tokenizer.token_bytes()
        states = len(self.transitions_SB)
        table_SV = np.repeat(np.arange(states, dtype=np.int32)[:, None], tokenizer.vocab_size, axis=1)
        lengths_V = np.array([len(piece) for piece in pieces])
        for at in range(lengths_V.max()):  # all tokens advance together, byte by byte
            ids = np.flatnonzero(lengths_V > at)
            bytes_at = np.array([pieces[i][at] for i in ids])
            table_SV[:, ids] = self.transitions_SB[table_SV[:, ids], bytes_at]
        table_SV[:, tokenizer.eos_id] = self.accept
        return table_SV

    def truncate(self, text: str, start_state: int) -> tuple[str, bool]:
        """The text up to the stop, and whether the rule stopped it."""
        raw, state = text.encode("utf-8", errors="replace"), start_state
        for i, byte in enumerate(raw):
            following = int(self.transitions_SB[state, byte])
            if following == self.accept and state != self.accept:
                end = i + int(self.includes_last_SB[state, byte])
                return raw[:end].decode("utf-8", errors="replace"), True
            state = following
        return text, False


def union(rules: Sequence[StopRule]) -> tuple[StopRule, list[int]]:
    """One rule that holds several side by side, and the number that each one's states are moved up by.

    Their accept states become one, the last. A text obeys the rule in whose states it begins.
    """
    offsets = np.cumsum([0, *(len(rule.transitions_SB) for rule in rules)])
    accept = int(offsets[-1])
    moved = [
        np.where(rule.transitions_SB == rule.accept, accept, rule.transitions_SB + offset)
        for rule, offset in zip(rules, offsets, strict=False)
    ]
    transitions_SB = np.concatenate([*moved, np.full((1, 256), accept)]).astype(np.int32)
    includes_SB = np.concatenate([*(rule.includes_last_SB for rule in rules), np.zeros((1, 256), bool)])
    return StopRule(transitions_SB, accept, includes_SB), offsets[:-1].tolist()


class _Builder:
    """Collects transitions; every byte without one of its own takes the state's default."""

    def __init__(self, states: int):
        self.accept = states - 1
        self.transitions_SB = np.repeat(np.arange(states, dtype=np.int32)[:, None], 256, axis=1)
        self.includes_SB = np.zeros((states, 256), bool)

    def default(self, state: int, target: int) -> None:
        self.transitions_SB[state, :] = target

    def on(self, state: int, chars: str, target: int, *, include: bool = True) -> None:
        columns = [ord(c) for c in chars]
        self.transitions_SB[state, columns] = target
        self.includes_SB[state, columns] = include

    def rule(self) -> StopRule:
        return StopRule(self.transitions_SB, self.accept, self.includes_SB)


# States of the policy rule.
SEEKING, SEEN_B, SPACES = 0, 1, 2
_FROM_RANK, _TO_FILE, _TO_RANK, _PROMOTION, _ACCEPT = 3, 4, 5, 6, 7
FILES, RANKS, INNER_RANKS, PROMOTIONS = "abcdefgh", "12345678", "234567", "qrbn"


@functools.cache
def policy_stop() -> StopRule:
    """After the move that follows `B:`.

    `SEEKING` looks for `B:` (full prompts start there); `SPACES` is right after it (reduced prompts start there). A move
    to an inner rank ends at its fourth character. One to rank 1 or 8 may promote, so the next character decides; it is
    part of the text only if it is a promotion letter. Anything that cannot continue a move stops at once, excluded.
    """
    b = _Builder(8)
    b.default(SEEKING, SEEKING)
    b.on(SEEKING, "B", SEEN_B)
    b.default(SEEN_B, SEEKING)
    b.on(SEEN_B, "B", SEEN_B)
    b.on(SEEN_B, ":", SPACES)
    for state in (SPACES, _FROM_RANK, _TO_FILE, _TO_RANK, _PROMOTION):
        b.default(state, _ACCEPT)
    b.on(SPACES, " ", SPACES)
    b.on(SPACES, FILES, _FROM_RANK)
    b.on(_FROM_RANK, RANKS, _TO_FILE)
    b.on(_TO_FILE, FILES, _TO_RANK)
    b.on(_TO_RANK, INNER_RANKS, _ACCEPT)
    b.on(_TO_RANK, "18", _PROMOTION)
    b.on(_PROMOTION, PROMOTIONS, _ACCEPT)
    return b.rule()


@functools.cache
def environment_stop() -> StopRule:
    """After the first character of the fourth `+`-separated field, which is a single flag; nothing after it counts."""
    b = _Builder(5)
    for field in range(3):
        b.default(field, field)
        b.on(field, "+", field + 1)
    b.transitions_SB[3, :] = b.accept
    b.includes_SB[3, :] = True
    return b.rule()


@functools.cache
def word_stop() -> StopRule:
    """Before the first space or line break."""
    b = _Builder(2)
    b.on(0, " \n", b.accept, include=False)
    return b.rule()
