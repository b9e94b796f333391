"""Stop rules as automata over bytes, and their lift to tokens: exact when a stop straddles tokens; and tokens that are a stop.

A rule is a table `state x byte -> state` with one absorbing accept state. On the device a decode step looks its token up in
`state x token -> state`; on the host the same automaton cuts the decoded text. Knows nothing of tasks' meanings.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Vocabulary(Protocol):
    """What the lift needs of a tokenizer."""

    vocab_size: int
    eos_ids: tuple[int, ...]

    def token_bytes(self) -> list[bytes]: ...

    def token_id(self, token: str | int) -> int: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class StopTokens(NamedTuple):
    """Tokens that end a completion in the states from `begin` to before `end`; a token is its text or its id."""

    tokens: tuple[str | int, ...]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, eq=False)
class StopRule:
    """A byte automaton."""

    transitions_SB: np.ndarray  # int32 [S, 256]
    accept: int  # the state that ends a completion; absorbing
    # bool [S, 256]: whether the byte that leads to `accept` belongs to the text. A promotion letter does, a space does not.
    includes_last_SB: np.ndarray
    # int32 [S, 256]: bytes before that one that belong to the stop, not the text; None: none.
    before_SB: np.ndarray | None = None

    tokens: tuple[StopTokens, ...] = ()  # that end it besides, whatever bytes they have

    def token_table(self, tokenizer: Vocabulary) -> np.ndarray:
        """int32 [S, V]: the state after reading a token's bytes; end-of-text accepts from anywhere."""
        pieces = tokenizer.token_bytes()
        states = len(self.transitions_SB)
        table_SV = np.repeat(np.arange(states, dtype=np.int32)[:, None], tokenizer.vocab_size, axis=1)
        lengths_V = np.array([len(piece) for piece in pieces])
        for at in range(lengths_V.max()):  # all tokens advance together, byte by byte
            ids = np.flatnonzero(lengths_V > at)
            bytes_at = np.array([pieces[i][at] for i in ids])
            table_SV[:, ids] = self.transitions_SB[table_SV[:, ids], bytes_at]
        for stop in self.tokens:
            table_SV[stop.begin : stop.end, [tokenizer.token_id(token) for token in stop.tokens]] = self.accept
        table_SV[:, list(tokenizer.eos_ids)] = self.accept
        return table_SV

    def text(self, ids: Sequence[int], start_state: int, tokenizer: Vocabulary) -> str:
        """What a completion says: its tokens up to and including the one that ended it, without the stop."""
        text, stopped = self.truncate(tokenizer.decode(ids), start_state)
        ends = [token for stop in self.tokens if stop.begin <= start_state < stop.end for token in stop.tokens]
        if not stopped and ids and ids[-1] in map(tokenizer.token_id, ends):
            return tokenizer.decode(ids[:-1])
        return text

    def truncate(self, text: str, start_state: int) -> tuple[str, bool]:
        """The text up to the stop, and whether the rule stopped it."""
        raw, state = text.encode("utf-8", errors="replace"), start_state
        for i, byte in enumerate(raw):
            following = int(self.transitions_SB[state, byte])
            if following == self.accept and state != self.accept:
                before = 0 if self.before_SB is None else int(self.before_SB[state, byte])
                end = i + int(self.includes_last_SB[state, byte]) - before
                return raw[:end].decode("utf-8", errors="replace"), True
            state = following
        return text, False


def union(rules: Sequence[StopRule]) -> tuple[StopRule, list[int]]:
    """One rule that holds several side by side, and the number that each one's states are moved up by.

    Their accept states become one, the last. A text obeys the rule in whose states it begins.
    """
    offsets = np.cumsum([0, *(len(rule.transitions_SB) for rule in rules)])
    accept = int(offsets[-1])
    transitions = [
        np.where(rule.transitions_SB == rule.accept, accept, rule.transitions_SB + offset)
        for rule, offset in zip(rules, offsets, strict=False)
    ]
    transitions_SB = np.concatenate([*transitions, np.full((1, 256), accept)]).astype(np.int32)
    includes_SB = np.concatenate([*(rule.includes_last_SB for rule in rules), np.zeros((1, 256), bool)])
    before = [np.zeros_like(r.transitions_SB) if r.before_SB is None else r.before_SB for r in rules]
    before_SB = np.concatenate([*before, np.zeros((1, 256), np.int32)])
    tokens = tuple(
        StopTokens(stop.tokens, stop.begin + offset, stop.end + offset)
        for rule, offset in zip(rules, offsets.tolist(), strict=False)
        for stop in rule.tokens
    )
    return StopRule(transitions_SB, accept, includes_SB, before_SB, tokens), offsets[:-1].tolist()


def with_tokens(rule: StopRule, tokens: Sequence[str | int]) -> StopRule:
    """The rule, which these tokens end too."""
    return dataclasses.replace(rule, tokens=(StopTokens(tuple(tokens), 0, rule.accept),)) if tokens else rule


def automaton(default: Sequence[int], arrows: Sequence[tuple[int, str, int]], *, include: bool = True) -> StopRule:
    """The rule whose last state accepts: a state goes to its `default` on a byte without an arrow.

    Arrows are (state, characters, state that they lead to); `include`: characters that lead to the last one belong to the text.
    """
    transitions_SB = np.repeat(np.array(default, np.int32)[:, None], 256, axis=1)
    includes_SB = np.zeros_like(transitions_SB, bool)
    for state, chars, target in arrows:
        columns = [ord(char) for char in chars]
        transitions_SB[state, columns] = target
        includes_SB[state, columns] = include
    return StopRule(transitions_SB, len(default) - 1, includes_SB)


@functools.cache
def word_stop() -> StopRule:
    """Before the first space or line break."""
    return automaton([0, 1], [(0, " \n", 1)], include=False)


@functools.cache
def number_stop() -> StopRule:
    """After the first digit, blanks before it left aside; before anything else."""
    return automaton([1, 1], [(0, " ", 0), (0, "0123456789", 1)])


@functools.cache
def text_stop(*strings: str) -> StopRule:
    """Before the first of these strings, whichever is complete first; with none, at end-of-text alone.

    States are the prefixes of the strings (Aho & Corasick 1975): a byte leads to the longest prefix that the text now ends with.
    Where two strings are complete at one byte, the longer is left out.
    """
    wanted = [string.encode() for string in strings]
    states = sorted({string[:length] for string in wanted for length in range(len(string))} | {b""}, key=len)
    numbers = {prefix: number for number, prefix in enumerate(states)}
    accept = len(states)
    transitions_SB, before_SB = np.zeros((accept + 1, 256), np.int32), np.zeros((accept + 1, 256), np.int32)
    transitions_SB[accept] = accept
    for prefix, number in numbers.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            ended = [string for string in wanted if text.endswith(string)]
            rest = next(numbers[text[start:]] for start in range(len(text) + 1) if text[start:] in numbers)
            transitions_SB[number, byte] = accept if ended else rest
            before_SB[number, byte] = max(map(len, ended), default=1) - 1
    return StopRule(transitions_SB, accept, np.zeros_like(before_SB, bool), before_SB)
