"""Two evaluations side by side: differences with intervals, and whether the two intervals are apart.

Reads evaluation.json files; measures nothing.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_grpo.evaluation.generation import EvaluationError
from jax_grpo.evaluation.intervals import Estimate, difference
from jax_grpo.evaluation.tables import SUITES, TITLES, columns, markdown_table, sections, show

REPORT = "evaluation.json"
FORMAT = 1


def read_report(folder: Path) -> dict[str, Any]:
    """evaluation.json of a folder.

    Raises:
        EvaluationError: missing, unreadable, or of another format.
    """
    path = folder / REPORT
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["format"] != FORMAT:
            raise EvaluationError(f"{path} has format {report['format']}; this version reads {FORMAT}: evaluate again")
        return report
    except FileNotFoundError as error:
        raise EvaluationError(
            f"{path} does not exist; make it with python -m jax_grpo.evaluate --weights W --out {folder}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, EvaluationError):
            raise
        raise EvaluationError(f"{path} is not an evaluation ({type(error).__name__}: {error})") from error


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """By path: both estimates, `difference` (after - before, or null) and `apart` (the two intervals do not overlap).

    Raises:
        EvaluationError: nothing was measured by both.
    """
    shared = [path for path in before["estimates"] if path in after["estimates"]]
    if not shared:
        raise EvaluationError("the two evaluations have no measurement in common; evaluate both with the same --suite")
    return {path: _pair(before["estimates"][path], after["estimates"][path]) for path in shared}


def _pair(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    change = difference(Estimate(**before), Estimate(**after))
    apart = change is not None and (after["low"] > before["high"] or after["high"] < before["low"])
    return {
        "before": before,
        "after": after,
        "difference": None if change is None else dataclasses.asdict(change),
        "apart": apart,
    }


def caveats(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What makes the two not comparable: other data, seed or temperature."""
    keys = {"data": "data", "seed": "seeds", "temperature": "sampling temperatures"}
    return [f"The two used different {words}." for key, words in keys.items() if before[key] != after[key]]


def comparison_page(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """comparison.md: one table a section; groups of a number that is known for all prompts are left to the JSON."""
    pairs = compare(before, after)
    names = before["model"]["name"], after["model"]["name"]
    if names[0] == names[1]:
        names = tuple(
            f"{name} ({report['model']['sha256'][:8]})" for name, report in zip(names, (before, after), strict=True)
        )
    notes = [
        "Brackets: 95 % intervals. *apart*: the two intervals do not overlap (a stricter test than an interval of the "
        "difference that leaves out 0). White, Black and other groups: comparison.json.",
        *caveats(before, after),
    ]
    parts = [f"# {names[0]} and {names[1]}\n", "\n".join(notes) + "\n"]
    for section in sections(pairs):
        rows = []
        for mode, group in columns(pairs, section):
            for name, words, unit in SUITES[section.partition("/")[0]]:
                pair = pairs.get(f"{section}/{mode}/{group}/{name}")
                whole = group == "all" or f"{section}/{mode}/all/{name}" not in pairs
                if pair and pair["difference"] and whole:
                    label = f"{words}, {mode}" if group == "all" else f"{words}, {mode}, {group.capitalize()}"
                    change = show(pair["difference"], unit, signed=True)
                    verdict = "apart" if pair["apart"] else ""
                    rows.append([label, show(pair["before"], unit), show(pair["after"], unit), change, verdict])
        if rows:
            head = ["", names[0], names[1], "difference", "intervals"]
            parts.append(f"## {TITLES[section]}\n\n" + markdown_table(head, rows))
    return "\n".join(parts)
