"""A run, or several side by side, as one page: `python -m jax_grpo.report RUN [RUN2 ...] --out report.html`.

The page needs no network and no other file: data, style and script stand in it, and its content policy forbids anything else.
Texts of a run are data to it, never markup. Of a run's folder only `metrics.jsonl` must be there; a record written twice (a run
that was killed and resumed) counts once, the later one. The drawing is in assets/report.
"""

import argparse
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from jax_grpo.config.loading import flat
from jax_grpo.names import BOARDS, by_name
from jax_grpo.report.records import RecordsError, read_records
from jax_grpo.system.terminal import printable_lines

ASSETS = Path(__file__).parents[1] / "assets" / "report"
POINTS = 1000  # of a curve; longer runs show means of neighbours
COLUMNS = 100  # of a histogram over time
SAMPLED_ITERATIONS = 9  # whose completions are shown, first and last among them


class ReportError(ValueError):
    """A run's folder cannot be reported on; names the folder or the file and line, and what was expected."""


def read_run(folder: str | Path) -> dict[str, Any]:
    """Everything the page shows of one run, ready for JSON (no NaN, no infinity); a ReportError or RecordsError says why not.

    `name`, `path`; `step`: iterations a point stands for; `iterations` [N] and `series` (metric -> [N], null where missing);
    `evaluations` (metric -> [[iteration, value]]); `histograms` (component -> low, high, iterations, last, shares
    [columns][bins]); `samples` ([{iteration, samples}]); `health` (findings); `config` and `environment` (dotted key -> text);
    `missing`: files that were not there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ReportError(
            f"{folder}: no such run folder; expected one that `python -m jax_grpo.train` wrote (its run_dir)"
        )
    if not (folder / "metrics.jsonl").is_file():
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise ReportError(f"{folder}: no metrics.jsonl in it (found: {there}); expected a run_dir of jax_grpo.train")
    records = read_records(folder / "metrics.jsonl")
    training = _once(record for record in records if "loss" in record)
    if not training:
        raise ReportError(f"{folder}/metrics.jsonl: no training iteration in it yet; expected records with a loss")
    names = ("histograms.jsonl", "samples.jsonl", "health.jsonl", "config.yaml", "run.json")
    step = -(-len(training) // POINTS)
    return {
        "name": folder.resolve().name,
        "path": str(folder),
        "step": step,
        "iterations": [record["iteration"] for record in training][::step],
        "series": _series(training, step),
        "evaluations": _evaluations(records),
        "histograms": _histograms(folder / "histograms.jsonl"),
        "samples": _samples(read_records(folder / "samples.jsonl", missing_ok=True)),
        "health": [
            {"iteration": finding.get("iteration"), "line": printable_lines(str(finding.get("line", "")))}
            for finding in read_records(folder / "health.jsonl", missing_ok=True)
        ],
        # Settings as they are written, whatever this version knows of them: an older run's config can still be shown.
        "config": _texts_by_key(
            folder / "config.yaml", partial(yaml.load, Loader=yaml.BaseLoader), "a readable config"
        ),
        "environment": _texts_by_key(folder / "run.json", json.loads, "readable JSON"),
        "missing": [name for name in names if not (folder / name).is_file()],
    }


def _once(records: Iterable[Mapping]) -> list[Mapping]:
    """The last record of each iteration, in the order of iterations."""
    latest = {record["iteration"]: record for record in records}
    return [latest[iteration] for iteration in sorted(latest)]


def _number(value: Any) -> float | None:
    """Five significant digits of a finite number; anything else is null."""
    finite = type(value) in (int, float) and abs(value) <= 1e300  # NaN is not
    return float(f"{value:.5g}") if finite else None


def _series(training: Sequence[Mapping], step: int) -> dict[str, list[float | None]]:
    """The means of `step` neighbouring records, by metric."""
    names = sorted({name for record in training for name, value in record.items() if _number(value) is not None})
    groups = [training[start : start + step] for start in range(0, len(training), step)]
    return {name: [_mean([_number(record.get(name)) for record in group]) for group in groups] for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _number(sum(known) / len(known)) if known else None


def _evaluations(records: Sequence[Mapping]) -> dict[str, list[tuple[int, float]]]:
    points: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("eval/") and (number := _number(value)) is not None:
                points.setdefault(name, {})[record["iteration"]] = number
    return {name: sorted(by_iteration.items()) for name, by_iteration in points.items()}


def _histograms(path: Path) -> dict[str, dict]:
    """Shares of completions by value and time; neighbouring iterations are added up to at most `COLUMNS` columns."""
    records = _once(read_records(path, missing_ok=True))
    stride = max(-(-len(records) // COLUMNS), 1)
    pairs = [(record["iteration"], _as(dict, record.get("histograms"))) for record in records]
    merged: dict[str, dict] = {}
    for start in range(0, len(pairs), stride):
        group = pairs[start : start + stride]
        first, last = group[0][0], group[-1][0]
        for name in {name for _, histograms in group for name in histograms}:
            present = [_as(dict, histograms[name]) for _, histograms in group if name in histograms]
            low, high, shares = _added(present, f"{path}: iterations {first} to {last}, {name}")
            entry = merged.setdefault(name, {"low": low, "high": high, "iterations": [], "shares": []})
            entry["low"], entry["high"] = min(low, entry["low"]), max(high, entry["high"])
            entry["iterations"].append(first)
            entry["last"] = last
            entry["shares"].append(shares)
    return dict(sorted(merged.items()))


def _added(histograms: Sequence[Mapping], where: str) -> tuple[float, float, list[float]]:
    """Lowest and highest edge, and the shares of all completions by bin."""
    edges = [number for one in histograms for edge in ("low", "high") if (number := _number(one.get(edge))) is not None]
    counts = [
        [number for c in _as(list, one.get("counts")) if (number := _number(c)) is not None] for one in histograms
    ]
    complete = len(edges) == 2 * len(histograms) and len({len(bins) for bins in counts}) == 1 and counts[0]
    if not complete:
        raise ReportError(
            f"{where}: {str(histograms[0])[:100]}; expected low, high and counts, as many in each iteration"
        )
    total = [sum(column) for column in zip(*counts, strict=True)]
    return min(edges), max(edges), [round(count / (sum(total) or 1), 4) for count in total]


def _as(kind: Callable[[], Any], value: Any) -> Any:
    """The value of a file if it is of the kind that is expected there, else an empty one."""
    return value if type(value) is kind else kind()


def _samples(records: Sequence[Mapping]) -> list[dict]:
    records = _once(records)
    last = len(records) - 1
    places = sorted({round(i * last / (SAMPLED_ITERATIONS - 1)) for i in range(SAMPLED_ITERATIONS)}) if records else []
    return [
        {
            "iteration": record["iteration"],
            "samples": [
                one for i, row in enumerate(_as(list, record.get("samples"))) for one in _completions(i, _as(dict, row))
            ],
        }
        for record in (records[i] for i in places)
    ]


def _completions(number: int, row: dict) -> list[dict]:
    """The first completion of a group with its board, and those that are recorded beside it."""
    fen, engine, model = (row.get(key) for key in ("fen", "engine_move", "model_move"))
    board = by_name(BOARDS).board_svg(fen, model, engine) if isinstance(fen, str) else None
    others = [_as(dict, other) for other in _as(list, row.get("others"))]
    return [
        {
            "group": number,
            "prompt": printable_lines(str(row.get("prompt", ""))),
            "completion": printable_lines(str(one.get("completion", ""))),
            "reward": _number(one.get("reward")),
            "advantage": _number(one.get("advantage")),
            "components": {str(name): _number(value) for name, value in _as(dict, one.get("components")).items()},
            "board": board if one is row else None,
        }
        for one in (row, *others)
    ]


def _texts_by_key(path: Path, parse: Callable[[str], Any], what: str) -> dict[str, str]:
    """A file's values by dotted key, as texts; lists stay whole. Empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ReportError(f"{path}: not {what} ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(values, dict):
        raise ReportError(f"{path}: expected a mapping")
    values.pop("config", None)  # in run.json: it is shown from config.yaml
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(values).items()}


def render(folders: Sequence[str | Path], title: str | None = None) -> str:
    """The page of these runs, called by their names where no title is given.

    Raises ReportError, RecordsError: a folder is missing or broken, or one of its files; names it.
    """
    runs = [read_run(folder) for folder in folders]
    for run in runs:  # two runs of one name (seed0/quickstart, seed1/quickstart) are told apart by their paths
        if sum(run["name"] == other["name"] for other in runs) > 1:
            run["label"] = run["path"]
    heading = html.escape(title or ", ".join(run.get("label", run["name"]) for run in runs))
    boards = any(one["board"] for run in runs for record in run["samples"] for one in record["samples"])
    texts = {
        "{{title}}": heading if title else f"{heading} – jax_grpo report",
        "{{heading}}": heading,
        "{{style}}": (ASSETS / "report.css").read_text(encoding="utf-8"),
        "{{script}}": (ASSETS / "report.js").read_text(encoding="utf-8"),
        "{{pieces}}": by_name(BOARDS).PIECES_SVG if boards else "",
        "{{data}}": script_json({"runs": runs}),
    }
    page = (ASSETS / "page.html").read_text(encoding="utf-8")
    # All at once: a title or a completion that spells a mark stays as it is.
    return re.sub("|".join(texts), lambda mark: texts[mark[0]], page)


def script_json(value: object) -> str:
    """JSON that cannot end its <script> element, whatever texts it holds."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.report", description="One self-contained page of runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run_dir of a training run")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="the page to write (default: report.html)")
    parser.add_argument("--title", metavar="TEXT", help="of the page (default: the names of the runs)")
    arguments = parser.parse_args(argv)
    try:
        out = Path(arguments.out)
        if out.exists() and b'<script id="data"' not in out.read_bytes():
            raise ReportError(f"--out {out} is there already and is no report; give another name")
        page = render(arguments.runs, arguments.title)
        out.write_text(page, encoding="utf-8")
    except (ReportError, RecordsError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(f"saved: {arguments.out} ({len(page.encode()) / 1e6:.1f} MB, {len(arguments.runs)} run(s))")


if __name__ == "__main__":
    main()
