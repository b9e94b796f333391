"""The report: whole, self-contained, safe with any text, clear about broken folders, and drawn without errors by a browser."""

import html
import json
import re
import shutil
import subprocess
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE_S, config

from jax_grpo.chess.boards import board_svg
from jax_grpo.report.__main__ import ReportError, main, read_run, render, script_json
from jax_grpo.report.records import OTHERS, RecordsError, sample_rows
from jax_grpo.tasks.base import Prompt, Task, as_component

RECORDED = Path(__file__).parents[2] / "docs" / "results" / "legality" / "metrics_seed0.jsonl"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "</script><script>document.title='broken in'</script><img src=x onerror=\"document.title='broken in'\">&amp;{{data}}"
FEN = "8/1P4k1/8/8/8/8/6K1/8 w - - 0 1"
CHARTS = [
    "Reward", "Legal moves", "KL to the reference", "Entropy", "Clip fraction", "KL coefficient",
    "Ratio off 1", "Gradient norm", "Loss", "Learning rate", "Groups without signal", "Completion length",
    "Cut at the cap, distinct", "Sampling against training", "Timing", "Time of an iteration", "Generation",
    "Memory, peak so far",
]  # fmt: skip


COMPONENTS = ["parseable", "legal", "top_five", "best_move", "quality", "malformed"]


def run_folder(path: Path, beta: str = "0.1", text: str = EVIL) -> Path:
    """A run as `train` writes it: the recorded legality run's first iterations, with what newer runs also log."""
    path.mkdir(parents=True)
    newer = {
        "ratio/deviation": 0.0,
        "ratio/first_deviation": 0.0,
        "completions/distinct": 0.6,
        "memory/host_peak_bytes": 1e9,
    }
    records = [json.loads(line) for line in RECORDED.read_text().splitlines()[:40]]
    lines = [json.dumps(record | (newer if "loss" in record else {})) for record in records]
    lines.append('{"iteration": 40, "loss": null, "nonfinite": ["loss"], "reward/mean": 0.5}')
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n" + '{"iteration": 41, "lo')
    counts = {"reward/legal": {"low": 0.0, "high": 1.0, "counts": [30, *[0] * 8, 34]}}
    (path / "histograms.jsonl").write_text(
        "".join(json.dumps({"iteration": i, "histograms": counts}) + "\n" for i in range(39))
    )
    sample = {
        "prompt": text, "completion": text, "reward": 1.1, "components": {"legal": 1.0}, "fen": FEN, "engine_move": "b7b8q",
        "model_move": "g2g3",
    }  # fmt: skip
    # of the second group three completions more, as newer runs record them
    others = [
        {"completion": text, "reward": r, "advantage": r - 0.5, "components": {"legal": r}} for r in (0.25, 0.75, 0.5)
    ]
    second = sample | {"reward": 0.5, "advantage": 0.0, "others": others}
    retained = [{"iteration": i, "samples": [sample | {"fen": text, "model_move": text}, second]} for i in (0, 20)]
    (path / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in retained))
    finding = {"check": "no_signal", "subjects": [], "iteration": 3, "line": text}
    (path / "health.jsonl").write_text(json.dumps(finding) + "\n")
    (path / "config.yaml").write_text(f"seed: 0\nkl:\n  beta: {beta}\n  target: 1e-5\nrun_dir: {json.dumps(text)}\n")
    (path / "run.json").write_text(json.dumps({"versions": {"jax": "0.10.2"}, "command": [text]}))
    return path


def data_of(page: str) -> dict:
    return json.loads(re.findall(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[0])


def test_the_page_holds_the_runs_and_refers_to_nothing_outside(tmp_path):
    page = render([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", beta="0.2")])
    a, b = data_of(page)["runs"]
    assert (a["name"], b["config"]["kl.beta"], a["config"]["kl.target"]) == ("a", "0.2", "1e-5")
    assert len(a["iterations"]) == 40 and a["series"]["loss"][-1] is None and a["series"]["reward/mean"][-1] == 0.5
    assert a["evaluations"]["eval/greedy/legal"] == [[0, 0.613]]
    assert a["environment"]["versions.jax"] == "0.10.2" and a["missing"] == []
    # names of XML namespaces are not fetched; nothing else may look like an address
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'<>\\\\]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, addresses
    assert not re.search(r"<link(?![^>]*data:)|@import|url\(", page) and "default-src 'none'" in page


def test_any_text_of_a_run_stays_text(tmp_path):
    page = render([run_folder(tmp_path / "a")], EVIL)
    assert f"<title>{html.escape(EVIL)}</title>" in page, "nor is a title markup, or a mark of the page"
    assert "<img src=x" not in page and page.count("</script>") == 2 and page.count("<script") == 2
    assert data_of(page)["runs"][0]["samples"][0]["samples"][0]["completion"] == EVIL
    page = render([run_folder(tmp_path / "b", text="a\tb\n\x1b[31m\u202e\ud800")])
    shown = data_of(page)["runs"][0]
    assert shown["samples"][0]["samples"][0]["prompt"] == shown["health"][0]["line"] == "a\tb\n\\x1b[31m\\u202e\\ud800"
    hostile = "\u2028</ScRiPt><!--<script>\x00\ud800"
    assert json.loads(script_json(hostile)) == hostile and "<" not in script_json(hostile)


def test_a_resumed_runs_repeated_iterations_count_once_and_long_runs_are_thinned(tmp_path):
    folder = run_folder(tmp_path / "a")
    with (folder / "histograms.jsonl").open("a") as file:
        counts = {"reward/legal": {"low": 0.0, "high": 1.0, "counts": [64, *[0] * 9]}}
        file.write(json.dumps({"iteration": 3, "histograms": counts}) + "\n")
    lines = [{"iteration": i, "loss": 0.0, "x": float(i)} for i in [*range(1500), *range(1400, 2500)]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert run["histograms"]["reward/legal"]["shares"][3] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert run["step"] == 3 and len(run["iterations"]) == 834 and run["iterations"][:3] == [0, 3, 6]
    assert run["series"]["x"][:2] == [1, 4] and run["series"]["x"][-1] == 2499, "means of threes"


def test_boards_show_both_moves_and_say_what_they_are():
    board = board_svg("rnbqkbnr/pppp1ppp/8/4p3/8/5N2/PPPPPPPP/RNBQKB1R w KQkq - 0 2", "f3e5", "e2e4")
    assert board is not None and board["label"] == "White to move; model: f3e5 (legal); engine: e2e4"
    assert board["svg"].count('class="arrow"') == 4 and "<defs>" not in board["svg"]
    illegal = board_svg(FEN, "g2g5", None)
    assert illegal is not None and illegal["label"] == "White to move; model: g2g5 (illegal); engine: no move"
    assert board_svg("not a position", "e2e4", None) is None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, r"run: no such run folder; expected one that `python -m jax_grpo.train` wrote"),
        (lambda run: (run / "metrics.jsonl").unlink(), r"run: no metrics.jsonl in it \(found: config.yaml"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl: no training iteration in it yet"),
        (lambda run: (run / "metrics.jsonl").write_text("{}\n"), r"metrics.jsonl:1: iteration is None; expected a whole"),
        (lambda run: (run / "metrics.jsonl").write_text("not\n{}\n"), "metrics.jsonl:1: 'not' is not JSON"),
        (lambda run: (run / "samples.jsonl").write_text("[1]\n"), r"samples.jsonl:1: '\[1\]'; expected an object"),
        (lambda run: (run / "config.yaml").write_text("a: [\n"), "config.yaml: not a readable config"),
        (lambda run: (run / "run.json").write_bytes(b"\xff"), "run.json: not readable JSON"),
        (
            lambda run: (run / "histograms.jsonl").write_text('{"iteration": 5, "histograms": {"x": {"low": 0}}}\n'),
            "histograms.jsonl: iterations 5 to 5, x: .*; expected low, high and counts",
        ),
    ],
)  # fmt: skip
def test_a_missing_or_broken_run_is_one_clear_error(spoil, message, tmp_path, capsys):
    run = run_folder(tmp_path / "run")
    spoil(run)
    with pytest.raises((ReportError, RecordsError), match=message):
        read_run(run)
    with pytest.raises(SystemExit, match=message):
        main([str(run), "--out", str(tmp_path / "report.html")])
    assert not (tmp_path / "report.html").exists()


def test_a_run_of_an_older_version_has_its_page_too(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_bytes(RECORDED.read_bytes())
    main([str(tmp_path / "old"), "--out", str(tmp_path / "report.html")])
    (run,) = data_of((tmp_path / "report.html").read_text())["runs"]
    assert len(run["missing"]) == 5 and run["histograms"] == {} and run["samples"] == []


def test_the_completions_of_a_group_are_recorded_with_their_advantages_beside_what_older_readers_read():
    settings = config(rollout={"group_size": 10}, prompts={"per_iteration": 2}, logging={"samples": 2})
    prompts, texts = [Prompt(f"p{i // 10}", 0) for i in range(20)], [f"c{i}" for i in range(20)]
    given = Task(), prompts, texts, np.arange(20.0), {"length": as_component(np.arange(20.0))}, settings
    older, newer = sample_rows(*given), sample_rows(*given, advantages_B=np.arange(20.0) - 9.5)
    assert [{key: row[key] for key in old} for row, old in zip(newer, older, strict=True)] == older
    assert [row["advantage"] for row in newer] == [-9.5, 0.5] and len(newer[1]["others"]) == OTHERS == 7
    assert newer[1]["others"][0] == {
        "completion": "c11",
        "reward": 11.0,
        "components": {"length": 11.0},
        "advantage": 1.5,
    }


# Appended in the test only: what the page looks like from inside, as attributes that --dump-dom shows.
PROBE = """<script>{
const seen = { width: document.documentElement.scrollWidth, window: innerWidth, title: document.title,
  dark: matchMedia("(prefers-color-scheme: dark)").matches, back: getComputedStyle(document.body).backgroundColor,
  charts: [...document.querySelectorAll("[data-chart]")].map((n) => n.dataset.chart),
  maps: document.querySelectorAll("canvas").length,
  lines: document.querySelectorAll("path.curve").length, boards: document.querySelectorAll(".board svg .arrow").length,
  texts: [...document.querySelectorAll("article strong")].map((n) => n.textContent),
  differing: [...document.querySelectorAll("[data-table='config differences'] th code")].map((n) => n.textContent),
  first: document.querySelector("[data-chart]").dataset.chart, heading: document.querySelector("h1").textContent,
  flat: [...document.querySelectorAll("#flat [data-chart]")].map((n) => n.dataset.chart),
  named: [...document.querySelectorAll("figure[data-chart]")].every((n) => n.querySelectorAll(".axis-name").length === 2),
  scores: [...document.querySelectorAll("[data-table=scores] tr")].slice(0, 2)
    .map((n) => [...n.children].map((c) => c.textContent)),
  painted: [...document.querySelectorAll("canvas")].every((c) =>
    c.getContext("2d").getImageData(0, c.height - 1, 1, 1).data[3] > 0) };
const chart = document.querySelector("[data-chart=Reward] svg"), place = chart.getBoundingClientRect();
const at = { clientX: place.left + place.width / 2, clientY: place.top + 50, bubbles: true };
chart.dispatchEvent(new PointerEvent("pointermove", at));
seen.tip = document.querySelector("[data-chart=Reward] .tip").textContent;
seen.together = [...document.querySelectorAll(".cursor")].filter((n) => n.style.visibility === "visible").length;
chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
seen.next = document.querySelector("[data-chart=Reward] .tip").textContent;
const box = document.querySelector("#completions > div");
const rewards = () => [...box.querySelectorAll("tbody td:nth-child(2)")].map((n) => Number(n.textContent));
const choose = (label, value) => {
  const control = document.querySelector(`[aria-label^="${label} of the"]`);
  control.value = value;
  control.dispatchEvent(new Event("input"));
};
seen.rewards = [rewards()];
const choices = [["Order", 1], ["Group", 2], ["Order", 4], ["Advantage", 1], ["Advantage", 0], ["Least reward", "0.5"]];
for (const choice of choices) {
  choose(...choice);
  seen.rewards.push(rewards());
}
seen.kept = box.querySelectorAll(".board svg .arrow").length;
parent.document.body.dataset.seen = encodeURIComponent(JSON.stringify(seen));
}</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian and Ubuntu: apt install chromium)")
@pytest.mark.parametrize(
    ("width", "dark", "runs"), [(400, False, 2), (400, True, 1), (1280, False, 1), (1280, True, 2)]
)
def test_a_browser_draws_every_chart_without_an_error(width, dark, runs, tmp_path):
    page = render([run_folder(tmp_path / name, beta) for name, beta in [("a", "0.1"), ("b", "0.2")][:runs]])
    # in a frame: a window of a desktop Chromium cannot be narrower than 500 pixels
    inside = html.escape(page.replace("</body>", PROBE))
    style = f"width:{width}px;height:900px;border:0"
    frame = f'<!doctype html><body style="margin:0"><iframe style="{style}" srcdoc="{inside}"></iframe>'
    (tmp_path / "page.html").write_text(frame, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    options += ["--window-size=1300,900", f"--user-data-dir={tmp_path / 'profile'}", *["--force-dark-mode"] * dark]
    command = [str(CHROMIUM), *options, "--dump-dom", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not errors, "\n".join(errors)
    actual = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert actual, "the page's script ended early"
    seen = json.loads(urllib.parse.unquote(actual[1]))
    print({key: value for key, value in seen.items() if key != "texts"})
    assert seen["window"] == width and seen["width"] <= width, "nothing sticks out to the side"
    assert seen["dark"] == dark and (sum(map(int, re.findall(r"\d+", seen["back"]))) < 150) == dark
    components = ["Reward components"] if runs == 1 else [f"Reward: {name}" for name in COMPONENTS]
    assert sorted(seen["charts"]) == sorted([*CHARTS, *components])
    assert seen["maps"] == runs and seen["painted"] and seen["boards"] == 4 * runs
    assert seen["lines"] >= runs * len(CHARTS)
    assert set(seen["texts"]) == {EVIL} and seen["title"] == f"{'a' if runs == 1 else 'a, b'} – jax_grpo report"
    assert seen["differing"] == ([] if runs == 1 else ["kl.beta"])
    assert re.match(r"iteration \d+(reward|a: [\d.]+b): 0\.\d+", seen["tip"]) and seen["together"] > 10
    assert seen["next"] != seen["tip"]
    assert seen["first"] == "Reward" and seen["heading"] == ("a" if runs == 1 else "a, b") and seen["named"]
    flat = ["Clip fraction", "KL coefficient", "Ratio off 1", "Cut at the cap, distinct"]
    assert seen["flat"] == flat, "what never moves is folded away"
    # the one evaluation of these runs is their start and their end
    head = ["", "start", "end", "change"] if runs == 1 else ["", "a, after 41", "b, after 41", "b − a"]
    assert seen["scores"] == [head, ["held-out reward, greedy", "0.7493", "0.7493", "0"]]
    as_drawn, by_reward, of_group = [1.1, 0.5, 0.25, 0.75, 0.5], [1.1, 0.75, 0.5, 0.5, 0.25], [0.75, 0.5, 0.5, 0.25]
    by_advantage, above, at_least = of_group[::-1], [0.75], [0.5, 0.5, 0.75]
    assert seen["kept"] == 4, "a group's board stays where another of its completions comes first"
    assert seen["rewards"] == [as_drawn, by_reward, of_group, by_advantage, above, by_advantage, at_least]
