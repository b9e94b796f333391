"""Where a move ends, and where a state of the board does."""

import functools

from jax_grpo.tasks.stop import StopRule, automaton

# States of the policy rule.
SEEKING, SEEN_B, SPACES, _FROM_RANK, _TO_FILE, _TO_RANK, _PROMOTION, _ACCEPT = range(8)
FILES, RANKS, INNER_RANKS, PROMOTIONS = "abcdefgh", "12345678", "234567", "qrbn"
ANY = "".join(map(chr, range(256)))


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


@functools.cache
def environment_stop() -> StopRule:
    """After the first character of the fourth `+`-separated field, which is a single flag; nothing after it counts."""
    return automaton([0, 1, 2, 4, 4], [(0, "+", 1), (1, "+", 2), (2, "+", 3), (3, ANY, 4)])
