"""What the tasks of chess share: rows are positions, moves are shown on boards, and a model is asked as it was taught."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_grpo.chess.positions.position import Position, in_style
from jax_grpo.chess.settings import OWN_SIDE
from jax_grpo.chess.style import find_style, model_settings
from jax_grpo.config import ConfigError
from jax_grpo.tasks.base import Headline, Prompt, Task

_MOVE = re.compile(r"(?<![a-h0-9])[a-h][1-8][a-h][1-8][qrbn]?(?![a-z0-9])")


class ChessTask(Task[Position]):
    """A task about positions; `style` is how it asks for a move, empty where it asks for none."""

    reads = "positions"
    style = ""
    headlines = (Headline("legal", "legal_move_rate", "legal", "legal moves", "share of sampled moves"),)
    shown = ("legal", "value", "technique", "best_move", "exact_fen")
    has_suites = True

    def require_weights(self, weights: str | None) -> None:
        """Refuses to ask a model for moves in a way that it was not taught: it would take Black's pieces for White's."""
        if self.style in ("", OWN_SIDE) or weights is None or find_style(weights) != OWN_SIDE:
            return
        raise ConfigError(
            f"task.prompt_style is {self.style!r}, but {weights} was taught to see every position from the mover's side; "
            f"expected task.prompt_style: {OWN_SIDE}"
        )

    def model_settings(self) -> dict[str, Any]:
        return model_settings(self.style)

    def _shows_moves(self) -> bool:
        return self.style != "" and any(name.endswith("legal") for name in self.component_weights)

    def sample_fields(self, prompt: Prompt, completion: str) -> dict[str, Any]:
        """`fen`, `engine_move` (the label's first, or null), and `model_move`: the last move written, as it is on that board."""
        position: Position = prompt.row
        moves = _MOVE.findall(completion) if self._shows_moves() else []
        model = in_style(self.style, moves[-1], position.fen) if moves else None
        return {
            "fen": position.fen,
            "engine_move": position.moves[0] if position.moves else None,
            "model_move": model,
        }

    def answered_moves(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[tuple[Position, str]]:
        """The labelled positions, with the last word of each answer, as a move is written on that board."""
        if not self._shows_moves():
            return []
        return [
            (prompt.row, in_style(self.style, (text.split() or [""])[-1], prompt.row.fen))
            for prompt, text in zip(prompts, completions, strict=True)
            if prompt.row.moves
        ]

    def save_pictures(self, folder: Path, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Path]:
        """`boards.png`: the move of each answer about a labelled position, beside the label's first."""
        if not (moves := self.answered_moves(prompts, completions)):
            return []
        from jax_grpo.chess.boards import save_boards  # matplotlib is slow to import

        save_boards(moves, folder / "boards.png")
        return [folder / "boards.png"]
