"""Figures that RookWorld's authors published for their 124M model, shown only beside an evaluation of RookWorld's weights."""

from collections.abc import Mapping
from typing import Any

# words, path in evaluation.json, percent
ROOKWORLD = (
    ("checkmate in one (theirs on BIG-bench)", "mates/full/greedy/all/mate", 32.1),
    ("best move", "policy/full/greedy/all/best_move", 26.2),
    ("top five", "policy/full/greedy/all/candidates_top_five", 39.2),
    ("policy format", "policy/full/greedy/all/format", 93.0),
    ("next state", "environment/next_state/greedy/all/next_state", 99.61),
    ("normalised Levenshtein similarity", "environment/next_state/greedy/all/similarity", 99.99),
    ("reward", "environment/next_state/greedy/all/reward", 99.11),
    ("terminated", "environment/next_state/greedy/all/terminated", 99.13),
)
GPT2_SMALL = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}


def published_figures(name: str, settings: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """The figures, where the weights say that they are RookWorld's and have its shape; else none.

    Args:
        name: of the weights, as given.
        settings: their config.json; `_name_or_path` is asked too.
    """
    named = f"{name} {settings.get('_name_or_path', '')}".lower()
    shaped = all(settings.get(key) == value for key, value in GPT2_SMALL.items())
    return list(ROOKWORLD) if "rookworld" in named and shaped else []
