"""evaluation.json as Markdown: what was measured, of whom, with 95 % intervals; alone, or two evaluations side by side.

Estimates are read by their paths (`suite/part/mode/group/name`). Measures nothing.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jax_grpo.config.files import parsed_json
from jax_grpo.evaluate import EvaluationError
from jax_grpo.evaluate.statistics import Estimate, difference

REPORT, FORMAT = "evaluation.json", 1
SUITES = {  # by suite: name in evaluation.json, and words
    "policy": {
        "format": "format right",
        "legal": "legal moves",
        "best_move": "best move",
        "top_five": "move among the engine's five",
        "candidates_legal": "candidates legal",
        "candidates_top_five": "candidates among the engine's five",
        "scored": "moves with a known cost",
        "win_loss": "win probability lost (of scored moves)",
        "centipawn_loss": "centipawns lost (of scored moves)",
        "evaluation_error": "evaluation error, pawns",
        "evaluation_error_win": "evaluation error, win probability",
        "published_best": "the published label's move",
    },
    "environment": {
        "format": "format right",
        "next_state": "next state exact",
        "similarity": "FEN similarity",
        "reward": "reward exact",
        "reward_error": "reward, absolute error",
        "terminated": "terminated",
        "truncated": "truncated",
    },
    "mates": {"mate": "mate in one played", "listed": "the listed mate", "legal": "legal"},
    "selfplay": {
        "half_moves": "legal half-moves before the game ended",
        "exact_states": "exact states in a row",
        "legal": "legal, of moves tried",
        "ended_illegal_move": "ended by an illegal move",
        "ended_checkmate": "ended by checkmate",
        "ended_draw": "ended by a draw",
        "ended_length": "reached the limit",
        "ended_unreadable_state": "ended: state unreadable",
        "ended_environment_refused": "ended: legal move refused",
        "ended_environment_ended": "ended: game over claimed",
    },
    "endgame": {
        "mated": "mated within 50 moves",
        "excess": "moves beyond the shortest mate (of those mated)",
        "slipped": "piece lost or stalemate",
        "illegal": "ended by an illegal move",
        "unmated": "no mate in 50 moves",
    },
    "short_games": {
        "outcome": "score: result, or win probability by material",
        "legal_moves": "moves played, of three",
        "won": "won",
        "drawn": "drawn",
        "lost": "lost",
        "forfeited": "ended by an illegal move",
        "unfinished": "not over",
    },
    "strength": {
        "loss": "win probability lost, illegal as the worst move",
        "legal": "legal",
        "loss_legal": "lost by legal moves",
        "within": "within 2 % of the best",
        "best": "best move",
        "accuracy": "accuracy (Lichess)",
        "blunder": "blunders",
        "pass_1": "pass@1",
        "pass_16": "pass@16",
        "tau": "Kendall's tau over legal moves",
    },
    "puzzles": {
        "solved": "whole line solved",
        "pass_1": "whole line solved, pass@1",
        "pass_16": "whole line solved, pass@16",
        "first": "first move right",
        "legal": "first move legal",
        "rating": "puzzle rating",
    },
}
PLAYERS = {  # of the strength suite, in words: the model's modes, and whom it stands beside
    "greedy": "**the model, greedy**",
    "sampled": "**the model, sampled**",
    "uniform": "uniformly random legal move",
    "greedy_capture": "greedy capture, mate in one",
    "two_ply": "two-ply material search",
    "skill_zero": "Stockfish, Skill Level 0, 1,000 nodes",
    "label": "the published label",
}
REFERENCES = set(PLAYERS) - {"greedy", "sampled"}
# Shown as they are; every other number is a share, in percent.
PLAIN = {"centipawn_loss", "evaluation_error", "reward_error", "half_moves", "exact_states", "excess", "tau", "rating"}
TITLES = {
    "policy/full": "Policy, whole row (`M:` … `B:`)",
    "policy/best_move": "Policy, one move (`B:`)",
    "environment/next_state": "Environment (`A:`)",
    "mates/full": "Mate in one, whole row",
    "mates/best_move": "Mate in one, one move",
    "selfplay/own_environment": "Self-play, the model its own environment",
    "selfplay/python_chess": "Self-play on python-chess's board",
    "endgame/KRK": "King and rook against a perfect defender",
    "endgame/KQK": "King and queen against a perfect defender",
    "short_games/random": "Three moves against random legal ones",
    "short_games/capture": "Three moves against greedy captures",
    "strength/tables": "Strength, by tables of all legal moves",
    "puzzles/lines": "Puzzles, whole lines",
}
# What RookWorld's authors published of their 124M model: words, path in evaluation.json, percent.
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
PLAYED = "strength/tables"  # the section whose modes are players
Measured = TypeVar("Measured")


def published_figures(name: str, settings: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """`ROOKWORLD`, where the weights' name or config.json (`settings`) says RookWorld and they have its shape; else none."""
    named = f"{name} {settings.get('_name_or_path', '')}".lower()
    shaped = all(settings.get(key) == value for key, value in GPT2_SMALL.items())
    return list(ROOKWORLD) if "rookworld" in named and shaped else []


def read_report(folder: Path) -> dict[str, Any]:
    """evaluation.json of a folder. Raises EvaluationError: missing, unreadable, or of another format."""
    path = folder / REPORT
    try:
        report = parsed_json(path.read_text(encoding="utf-8"))
        version = report["format"]
    except FileNotFoundError as error:
        raise EvaluationError(
            f"{path} does not exist; make it with python -m jax_grpo.evaluate --weights W --out {folder}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"{path} is not an evaluation ({type(error).__name__}: {error})") from error
    if version != FORMAT:
        raise EvaluationError(f"{path} has format {version}; this version reads {FORMAT}: evaluate again")
    return report


def by_section(estimates: Mapping[str, Measured]) -> dict[str, dict[str, dict[str, Measured]]]:
    """What was measured by section (`suite/part`, in the order of `TITLES`), column (`mode/group`) and name."""
    sections: dict[str, dict[str, dict[str, Measured]]] = {}
    for path, estimate in estimates.items():
        suite, part, mode, group, name = path.split("/")
        sections.setdefault(f"{suite}/{part}", {}).setdefault(f"{mode}/{group}", {})[name] = estimate
    return {section: sections[section] for section in TITLES if section in sections}


def words_of(section: str) -> dict[str, str]:
    """The names that a section may have measured, in order, in words."""
    return SUITES[section.partition("/")[0]]


def evaluation_page(report: Mapping[str, Any]) -> str:
    """evaluation.md of an evaluation.json."""
    model, estimates = report["model"], report["estimates"]
    notes = [
        f"{model['parameters']:,} parameters, weights {model['sha256'][:12]}; seed {report['seed']}, temperature "
        f"{report['temperature']} where sampled.",
        *(f"{name}: {text}." for name, text in report["data"].items()),
        "Brackets: 95 % intervals (method in parentheses). docs/evaluation.md says what each number means.",
    ]
    parts = [f"# Evaluation of {model['name']}\n", "\n".join(f"- {note}" for note in notes) + "\n"]
    for section, columns in by_section(estimates).items():
        if section == PLAYED:
            parts.append(f"## {TITLES[section]}\n\n" + "\n".join(_players(columns)))
            continue
        counts = [max(estimate["count"] for estimate in column.values()) for column in columns.values()]
        rows = [["observations", *(f"{count:,}" for count in counts)]]
        for name, words in words_of(section).items():
            cells = [column.get(name) for column in columns.values()]
            if there := [cell for cell in cells if cell]:
                first = min(there, key=lambda cell: cell["value"] is None)  # that measured something, if one did
                method = first["method"].replace("wilson", "Wilson")
                rows.append([f"{words} ({method})", *(_show(name, cell) for cell in cells)])
        head = ["", *(column.replace("/", ", ").replace("_", " ") for column in columns)]
        parts.append(f"## {TITLES[section]}\n\n" + _markdown_table(head, rows))
    if published := report.get("published"):
        rows = [[words, f"{figure:.2f} %", _show(path, estimates.get(path))] for words, path, figure in published]
        parts.append("## Beside the published figures\n\n" + _markdown_table(["", "published", "here (greedy)"], rows))
    return "\n".join(parts)


Table = tuple[str, list[str], list[list[str]]]  # title, heads of columns, rows


def summary(report: Mapping[str, Any]) -> list[Table]:
    """The numbers of an evaluation.json of all prompts, a table a section; groups of prompts stand in evaluation.md alone."""
    tables = []
    for section, columns in by_section(report["estimates"]).items():
        words = words_of(section)
        whole = {column.removesuffix("/all"): cells for column, cells in columns.items() if column.endswith("/all")}
        if section == PLAYED:
            short = {"loss": "lost", "legal": "legal", "best": "best move", "blunder": "blunders"}
            head = ["", *short.values()]
            rows = [[player.strip("*"), *cells] for player, *cells in _player_rows(columns, short)]
        else:
            whole = whole or columns
            head = ["", *(column.replace("/", ", ").replace("_", " ") for column in whole)]
            names = [name for name in words if any(name in cells for cells in whole.values())]
            rows = [[words[name], *(_show(name, cells.get(name)) for cells in whole.values())] for name in names]
        count = max(estimate["count"] for cells in whole.values() for estimate in cells.values())
        tables.append((f"{TITLES[section].replace('`', '')}: {count:,} observations", head, rows))
    return tables


def by_loss(columns: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The players of the strength section, from who loses most to who loses least."""
    players = [column.removesuffix("/all") for column in columns if column.endswith("/all")]
    return sorted(players, key=lambda player: -columns[f"{player}/all"]["loss"]["value"])


def _player_rows(columns: Mapping[str, Mapping[str, Mapping[str, Any]]], names: Iterable[str]) -> list[list[str]]:
    """A row of numbers for each player, from worst to best; `loss` with its interval."""
    return [
        [PLAYERS[player], *(_show(name, columns[f"{player}/all"].get(name), interval=name == "loss") for name in names)]
        for player in by_loss(columns)
    ]


def _players(columns: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """One table of all players, from worst to best, and one of what they lose in each group of positions."""
    names = [name for name in words_of(PLAYED) if any(name in column for column in columns.values())]
    players = by_loss(columns)
    groups = list(dict.fromkeys(column.partition("/")[2] for column in columns))
    lost = [[PLAYERS[p], *(_show("loss", columns[f"{p}/{group}"]["loss"]) for group in groups)] for p in players]
    counts = (columns[f"{players[0]}/{group}"]["loss"]["count"] for group in groups)
    heads = [f"{group} ({count:,})" for group, count in zip(groups, counts, strict=True)]
    return [
        _markdown_table(["", *(words_of(PLAYED)[name] for name in names)], _player_rows(columns, names)),
        "All intervals, by a bootstrap over whole games, are in evaluation.json. Lost by group of positions:\n",
        _markdown_table(["", *heads], lost),
    ]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """By path: both estimates, `difference` (after - before, or null) and `apart` (the two intervals do not overlap).

    Raises:
        EvaluationError: nothing was measured by both.
    """
    pairs = {}
    for path, first in before["estimates"].items():
        if (second := after["estimates"].get(path)) is not None:
            change = difference(Estimate(**first), Estimate(**second))
            apart = change is not None and (second["low"] > first["high"] or second["high"] < first["low"])
            change = None if change is None else dataclasses.asdict(change)
            pairs[path] = {"before": first, "after": second, "difference": change, "apart": apart}
    if not pairs:
        raise EvaluationError("the two evaluations have no measurement in common; evaluate both with the same --suite")
    return pairs


def comparison_page(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """comparison.md: one table a section; groups of a number that is known for all prompts are left to the JSON."""
    models = before["model"], after["model"]
    names = [model["name"] for model in models]
    if names[0] == names[1]:
        names = [f"{model['name']} ({model['sha256'][:8]})" for model in models]
    notes = [
        "Brackets: 95 % intervals. *apart*: the two intervals do not overlap (a stricter test than an interval of the "
        "difference that leaves out 0). White, Black and other groups: comparison.json."
    ]
    same = {"data": "data", "seed": "seeds", "temperature": "sampling temperatures"}
    notes += [f"The two used different {words}." for key, words in same.items() if before[key] != after[key]]
    parts = [f"# {names[0]} and {names[1]}\n", "\n".join(notes) + "\n"]
    for title, head, rows in compared(before, after):
        parts.append(f"## {title}\n\n" + _markdown_table([head[0], *names, *head[3:]], rows))
    return "\n".join(parts)


def compared(before: Mapping[str, Any], after: Mapping[str, Any], *, brief: bool = False) -> list[Table]:
    """The numbers of `compare` that have a difference, a table a section; `brief`: only the difference with its interval."""
    tables = []
    for section, columns in by_section(compare(before, after)).items():
        rows = []
        for column, pairs in columns.items():
            mode, _, group = column.partition("/")
            if mode in REFERENCES:
                continue
            for name, words in words_of(section).items():
                pair = pairs.get(name)
                whole = group == "all" or name not in columns.get(f"{mode}/all", {})
                if pair and pair["difference"] and whole:
                    label = f"{words}, {mode}" if group == "all" else f"{words}, {mode}, {group.capitalize()}"
                    change = _show(name, pair["difference"], sign="+")
                    verdict = "apart" if pair["apart"] else ""
                    both = [_show(name, pair[when], interval=not brief) for when in ("before", "after")]
                    rows.append([label, *both, change, verdict])
        if rows:
            tables.append((TITLES[section], ["", "before", "after", "difference", "intervals"], rows))
    return tables


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"


def _show(name: str, estimate: Mapping[str, Any] | None, sign: str = "", *, interval: bool = True) -> str:
    """`61.2 % [58.1, 64.2]`, or without the interval; a dash where nothing was measured. The name may be a path."""
    if estimate is None:
        return "–"
    value, low, high = estimate["value"], estimate["low"], estimate["high"]
    if value is None:  # of a rating fitted to none or all solved there is a bound
        return f"below {high:.0f}" if high is not None else f"above {low:.0f}" if low is not None else "–"
    plain = name.rpartition("/")[2] in PLAIN
    scale, digits, mark = (1, 2 if abs(value) < 10 else 1, "") if plain else (100, 1, " %")

    def rounded(number: float) -> str:
        return f"{round(number * scale, digits) + 0.0:{sign}.{digits}f}"  # + 0.0: no minus before a zero

    text = rounded(value) + mark
    return text if low is None or not interval else f"{text} [{rounded(low)}, {rounded(high)}]"
