"""How a model of chess is asked, for its card: code that plays both colours, and the prompts that it was taught and no others.

Writes code that uses python-chess; uses none itself.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_grpo.chess.settings import OWN_SIDE
from jax_grpo.chess.style import PROMPT_STYLE, tasks_of
from jax_grpo.config.files import read_settings
from jax_grpo.export.recipe import ANSWER, LOAD, answers
from jax_grpo.model.tokenizer import Tokenizer

# What the prompts of chess are called here, by what a warm start or a run calls what it teaches.
KINDS = {"policy": "full", "legal_moves": "best_move"}
TAUGHT = {
    OWN_SIDE: "`P: <FEN>    B:` asks for one move, always of White: mirror Black's positions, and turn the move back, as above.",
    "best_move": "`P: <FEN>    B:` asks for one move.",
    "full": "`P: <FEN>    M:` asks for five moves, their evaluations (`E:`) and the best move (`B:`).",
    "environment": "`A: <FEN>+<move>+<last moves, the move included>+` asks for the next FEN, reward and two flags, joined by `+`.",
}
_MOVE = '''

def move(board):
    """The model's move for the side that plays, in UCI's notation and maybe illegal; None where it writes none."""
{seen}    {answer}
    found = re.{search}(r"{before} *([a-h][1-8][a-h](?:[2-7]|[18][qrbn]?))", text)
    return found and {move}


board = chess.Board()
while board.ply() < 8 and (uci := move(board)) and chess.Move.from_uci(uci) in board.legal_moves:
    board.push_uci(uci)
print(board)
'''


def recipe(
    source: Path, run: Mapping[str, Any], shown: Sequence[str], tokenizer: Tokenizer, folder: str, cap: int
) -> dict[str, str] | None:
    """As `export.recipe.recipe`, of answers of at most `cap` tokens; None: the model was taught no prompts of chess."""
    kinds = [kind for kind in TAUGHT if kind in _taught(source, run, shown, tokenizer)]
    if not kinds:
        return None
    start = "A: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1+e2e4+e2e4+"
    code = answers(start, "", 128, folder) if kinds == ["environment"] else _plays(kinds[0], cap, folder)
    listed = "".join(f"- {TAUGHT[kind]}\n" for kind in kinds)
    return {"code": code, "prompts": f"Prompts:\n\n{listed}\nMoves may be illegal: check them.", "tags": "chess, "}


def _taught(source: Path, run: Mapping[str, Any], shown: Sequence[str], tokenizer: Tokenizer) -> set[str]:
    """Kinds of chess prompts."""
    if run:
        if shown and not shown[0].startswith(("P: ", "A: ")):  # a task that was given to `train` is not in its config
            return set()
        return {style if task in ("policy", "game") else task for task, style in tasks_of(run.get("task", {}))}
    stages = read_settings(source / "provenance.json").get("config", {}).get("stages", [])
    kinds = {str(KINDS.get(kind, kind)) for stage in stages for kind in stage.get("mixture") or {}}
    kinds |= {stage.get(PROMPT_STYLE, "best_move") for stage in stages if stage.get("tables")}
    if read_settings(source / "config.json").get(PROMPT_STYLE) == OWN_SIDE:
        return kinds - {"best_move"} | {OWN_SIDE}
    return kinds or ({"best_move"} if tokenizer.name == "chess" else set())


def _plays(kind: str, cap: int, folder: str) -> str:
    whole, position, turned, seen = kind == "full", "board", "found[1]", ""
    if kind == OWN_SIDE:
        position = "seen"
        turned = '(found[1] if board.turn else found[1].translate(str.maketrans("12345678", "87654321")))'
        seen = "    seen = board if board.turn else board.mirror()  # the model sees its own side as White\n"
    prompt = f'f"P: {{{position}.fen()}}    {"M:" if whole else "B:"}"'
    answer = ANSWER.format(prompt=prompt, arguments="", new_tokens=cap if whole else 8, name="text")
    return LOAD.format(also="import re\n\nimport chess\n", folder=folder) + _MOVE.format(
        seen=seen,
        answer=answer.rstrip().replace("\n", "\n    "),
        search="search" if whole else "match",
        before="B:" if whole else "",
        move=turned,
    )
