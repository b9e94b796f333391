"""evaluation.json as Markdown: what was measured, of whom, with 95 % intervals; published figures beside it, where they apply.

Reads estimates by their paths (`suite/part/mode/group/name`). Computes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax_grpo.evaluation.intervals import Estimate

PERCENT, PLAIN = "percent", "plain"
# name in evaluation.json, words, how it is shown
POLICY = (
    ("format", "format right", PERCENT),
    ("legal", "legal moves", PERCENT),
    ("best_move", "best move", PERCENT),
    ("top_five", "move among the engine's five", PERCENT),
    ("candidates_legal", "candidates legal", PERCENT),
    ("candidates_top_five", "candidates among the engine's five", PERCENT),
    ("scored", "moves with a known cost", PERCENT),
    ("win_loss", "win probability lost (of scored moves)", PERCENT),
    ("centipawn_loss", "centipawns lost (of scored moves)", PLAIN),
    ("evaluation_error", "evaluation error, pawns", PLAIN),
    ("evaluation_error_win", "evaluation error, win probability", PERCENT),
    ("published_best", "the published label's move", PERCENT),
)
ENVIRONMENT = (
    ("format", "format right", PERCENT),
    ("next_state", "next state exact", PERCENT),
    ("similarity", "FEN similarity", PERCENT),
    ("reward", "reward exact", PERCENT),
    ("reward_error", "reward, absolute error", PLAIN),
    ("terminated", "terminated", PERCENT),
    ("truncated", "truncated", PERCENT),
)
MATES = (("mate", "mate in one played", PERCENT), ("listed", "the listed mate", PERCENT), ("legal", "legal", PERCENT))
SELFPLAY = (
    ("half_moves", "legal half-moves before the game ended", PLAIN),
    ("exact_states", "exact states in a row", PLAIN),
    ("legal", "legal, of moves tried", PERCENT),
    ("ended_illegal_move", "ended by an illegal move", PERCENT),
    ("ended_checkmate", "ended by checkmate", PERCENT),
    ("ended_draw", "ended by a draw", PERCENT),
    ("ended_length", "reached the limit", PERCENT),
    ("ended_unreadable_state", "ended: state unreadable", PERCENT),
    ("ended_environment_refused", "ended: legal move refused", PERCENT),
    ("ended_environment_ended", "ended: game over claimed", PERCENT),
)
SUITES = {"policy": POLICY, "environment": ENVIRONMENT, "mates": MATES, "selfplay": SELFPLAY}
TITLES = {
    "policy/full": "Policy, whole row (`M:` … `B:`)",
    "policy/best_move": "Policy, one move (`B:`)",
    "environment/next_state": "Environment (`A:`)",
    "mates/full": "Mate in one, whole row",
    "mates/best_move": "Mate in one, one move",
    "selfplay/own_environment": "Self-play, the model its own environment",
    "selfplay/python_chess": "Self-play on python-chess's board",
}
METHODS = {"wilson": "Wilson", "normal": "normal", "bootstrap": "bootstrap", "square and add": "square and add"}


def show(estimate: Estimate | Mapping[str, Any] | None, unit: str, *, signed: bool = False) -> str:
    """`61.2 % [58.1, 64.2]`; a dash where nothing was measured."""
    if estimate is None:
        return "–"
    value, low, high = _parts(estimate)
    if value is None:
        return "–"
    scale, digits, mark = {PERCENT: (100, 1, " %"), PLAIN: (1, 2 if abs(value) < 10 else 1, "")}[unit]
    sign = "+" if signed else ""

    def rounded(number: float) -> str:
        return f"{round(number * scale, digits) + 0.0:{sign}.{digits}f}"  # + 0.0: no minus before a zero

    text = rounded(value) + mark
    return text if low is None else f"{text} [{rounded(low)}, {rounded(high)}]"


def _parts(estimate: Estimate | Mapping[str, Any]) -> tuple[float | None, Any, Any]:
    if isinstance(estimate, Estimate):
        return estimate.value, estimate.low, estimate.high
    return estimate["value"], estimate["low"], estimate["high"]


def sections(estimates: Mapping[str, Any]) -> list[str]:
    """`suite/part` of all that was measured, in the order of `TITLES`."""
    there = {"/".join(path.split("/")[:2]) for path in estimates}
    return [section for section in TITLES if section in there]


def columns(estimates: Mapping[str, Any], section: str) -> list[tuple[str, str]]:
    """(mode, group) of a section, in the order of the file."""
    keys = [path.split("/")[2:4] for path in estimates if path.startswith(section + "/")]
    return list(dict.fromkeys((mode, group) for mode, group in keys))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"


def evaluation_page(report: Mapping[str, Any]) -> str:
    """evaluation.md of an evaluation.json."""
    estimates = report["estimates"]
    parts = [f"# Evaluation of {report['model']['name']}\n", _about(report)]
    for section in sections(estimates):
        cells = [(mode, group) for mode, group in columns(estimates, section)]
        rows = []
        for name, words, unit in SUITES[section.split("/")[0]]:
            found = [estimates.get(f"{section}/{mode}/{group}/{name}") for mode, group in cells]
            if any(found):
                rows.append([f"{words} ({_method(found)})", *(show(cell, unit) for cell in found)])
        counts = [_count(estimates, section, mode, group) for mode, group in cells]
        head = ["", *(f"{mode}, {group.replace('_', ' ')}" for mode, group in cells)]
        parts.append(f"## {TITLES[section]}\n\n" + markdown_table(head, [["observations", *counts], *rows]))
    if report.get("published"):
        parts.append(_published(report))
    return "\n".join(parts)


def _about(report: Mapping[str, Any]) -> str:
    model, data = report["model"], report["data"]
    lines = [
        f"{model['parameters']:,} parameters, weights {model['sha256'][:12]}; seed {report['seed']}, temperature "
        f"{report['temperature']} where sampled.",
        *(f"{name}: {text}." for name, text in data.items()),
        "Brackets: 95 % intervals (method in parentheses). docs/evaluation.md says what each number means.",
    ]
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _method(found: Sequence[Mapping[str, Any] | None]) -> str:
    cells = sorted(
        (cell for cell in found if cell), key=lambda cell: cell["value"] is None
    )  # stable: measured ones first
    return METHODS[cells[0]["method"]]


def _count(estimates: Mapping[str, Any], section: str, mode: str, group: str) -> str:
    counts = [
        estimate["count"] for path, estimate in estimates.items() if path.startswith(f"{section}/{mode}/{group}/")
    ]
    return f"{max(counts):,}"


def _published(report: Mapping[str, Any]) -> str:
    estimates = report["estimates"]
    rows = [
        [words, f"{figure:.2f} %", show(estimates.get(path), PERCENT)] for words, path, figure in report["published"]
    ]
    return "## Beside the published figures\n\n" + markdown_table(["", "published", "here (greedy)"], rows)
