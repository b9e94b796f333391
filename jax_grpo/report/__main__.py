"""A run, or several side by side, as one page: `python -m jax_grpo.report RUN [RUN2 ...] --out report.html`.

The page needs no network and no other file: data, style and script stand in it, and its content policy forbids anything else.
Texts of a run are data to it, never markup. Reading runs is `report.page`'s; the drawing is in assets/report.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from jax_grpo.report.boards import PIECES_SVG
from jax_grpo.report.page import ReportError, read_run
from jax_grpo.report.records import RecordsError

ASSETS = Path(__file__).parents[1] / "assets" / "report"


def render(folders: Sequence[str | Path]) -> str:
    """The page of these runs. Raises ReportError, RecordsError: a folder is missing or broken, or one of its files; names it."""
    runs = [read_run(folder) for folder in folders]
    for run in runs:  # two runs of one name (seed0/quickstart, seed1/quickstart) are told apart by their paths
        if sum(run["name"] == other["name"] for other in runs) > 1:
            run["label"] = run["path"]
    texts = {
        "{{title}}": "jax_grpo report",
        "{{style}}": (ASSETS / "report.css").read_text(encoding="utf-8"),
        "{{script}}": (ASSETS / "report.js").read_text(encoding="utf-8"),
        "{{pieces}}": PIECES_SVG,
        "{{data}}": script_json({"runs": runs}),
    }
    page = (ASSETS / "page.html").read_text(encoding="utf-8")
    for mark, text in texts.items():  # the data last: a completion that spells a mark stays as it is
        page = page.replace(mark, text, 1)
    return page


def script_json(value: object) -> str:
    """JSON that cannot end its <script> element, whatever texts it holds."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.report", description="One self-contained page of runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run_dir of a training run")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="the page to write (default: report.html)")
    arguments = parser.parse_args(argv)
    try:
        page = render(arguments.runs)
        Path(arguments.out).write_text(page, encoding="utf-8")
    except (ReportError, RecordsError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(f"saved: {arguments.out} ({len(page.encode()) / 1e6:.1f} MB, {len(arguments.runs)} run(s))")


if __name__ == "__main__":
    main()
