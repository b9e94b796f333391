"""What a person reads while a run goes on and when it ends: widths, labels, progress without a terminal, what to do next."""

import io
import re
import shlex
import time

import pytest
from rich.console import Console as RichConsole
from sparse_runs import sparse_config

from jax_grpo.config import load_config
from jax_grpo.export.__main__ import main as export
from jax_grpo.report.__main__ import main as report
from jax_grpo.report.console import COLUMNS, WIDTH, Console
from jax_grpo.report.records import outcome
from jax_grpo.system import progress
from jax_grpo.system.terminal import printable
from jax_grpo.tasks.base import Task
from jax_grpo.train import _next_commands
from jax_grpo.train import main as train
from jax_grpo.trainer import Trainer

METRICS = [metric for _, metric, _, _ in COLUMNS]


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 12345.678, 99999, 4.4e9, -1e-9, float("nan")])
def test_rows_of_any_numbers_fit_80_columns_and_stand_below_their_headings(value, capsys):
    console = Console(sparse_config({"rounds": 2}, kl={"adaptive": True}), Task())
    console.iteration({metric: value for metric in METRICS} | {"iteration": 99999})
    heading, row = capsys.readouterr().out.splitlines()
    assert len(heading) <= WIDTH and len(row) == len(heading) and len(row.split()) == len(METRICS), row


def test_a_coefficient_that_stays_and_a_metric_that_is_not_there_have_no_column(capsys):
    Console(sparse_config(None), Task()).iteration({"iteration": 0, "beta": 0.1, "reward/mean": 1.0})
    assert capsys.readouterr().out.splitlines()[0].split() == ["it", "reward"]


def test_held_out_scores_fit_80_columns_and_name_a_users_own_components(capsys):
    scores = {f"eval/{mode}/own_component_{i}": i / 10 for mode in ("greedy", "sampled") for i in range(9)}
    Console(sparse_config(None), Task()).evaluation(7, {"iteration": 7, "eval/greedy/reward": 0.5} | scores)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "reward 0.500" in lines[1] and all(
        sum(f"own_component_{i} " in line for line in lines) == 2 for i in range(9)
    )


def test_a_sample_says_what_is_prompt_completion_and_answer_and_moves_no_cursor(capsys):
    hostile = "a\x1b[2J\x07b\r\u202ec\nd\x9b\ud800"
    turns = [["guess 50", hostile], ["25", ""]]
    row = {"prompt": hostile, "completion": hostile, "reward": 0.5}
    Console(sparse_config(None), Task()).samples(
        [row, row | {"turns": turns, "truncated": "cut"}, row | {"reward": None}]
    )
    out = capsys.readouterr().out
    assert printable(hostile) == r"a\x1b[2J\x07b\r\u202ec⏎d\x9b\ud800" and all(
        c.isprintable() for c in out.replace("\n", "")
    )
    labels = [line.split()[0] for line in out.splitlines()]
    assert labels == ["prompt", "completion", "prompt", "completion", "answer", "completion", "prompt", "completion"]
    assert out.count("reward 0.500") == 2 and "25 [cut]   reward 0.500" in out


def test_without_a_terminal_long_work_is_plain_lines_and_speaks_during_a_silent_step(monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.02)
    written = io.StringIO()
    with progress.progress_bar(RichConsole(file=written, highlight=False)) as bars:
        bar = bars.add_task("stage 0, loss [1]", total=10)
        bars.update(bar, completed=3)
        with progress.under_way(bars, "held-out evaluation"):
            deadline = time.monotonic() + 60
            while "held-out evaluation" not in written.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
    lines = written.getvalue().splitlines()
    assert "stage 0, loss [1]: 3 of 10, 0 s" in lines and "held-out evaluation: 0 s" in lines
    assert written.getvalue().isascii() and "\x1b" not in written.getvalue()
    silent = io.StringIO()
    with progress.progress_bar(RichConsole(file=silent), shown=False) as bars:
        bars.add_task("nothing", total=3)
        time.sleep(0.1)
    assert silent.getvalue() == ""


def test_a_run_ends_with_what_changed_held_out_first():
    training = [{"iteration": i, "loss": 0.0, "reward/mean": i / 10} for i in range(6)]
    held = [{"iteration": i, "eval/greedy/reward": i / 8, "eval/sampled/reward": 0.25 + i / 16} for i in (0, 3, 6)]
    line = "held-out reward, 20 prompts, iteration 0 -> 6: greedy 0.000 -> 0.750, sampled 0.250 -> 0.625"
    assert outcome([held[0], *training[:3], held[1], *training[3:], held[2]], 16, 20) == line
    line = "training reward, first 3 -> last 3 of 6 iterations of 16 completions: 0.100 -> 0.400"
    assert outcome([held[0], *training], 16, 20) == line
    sampled = [record | {"refill/reward": record["reward/mean"] / 2} for record in training]
    assert outcome(sampled, 16, 0).endswith("0.050 -> 0.200"), "of all that was drawn: what is trained on was picked"
    assert outcome([{"iteration": 0, "loss": None, "reward/mean": None}], 16, 0) == "no iteration was trained"


@pytest.mark.slow
def test_the_next_commands_that_a_run_prints_do_what_they_say(tmp_path, monkeypatch, request, capsys):
    monkeypatch.chdir(request.config.rootpath)
    sizes = ["--prompts.per_iteration", "2", "--rollout.group_size", "2", "--rollout.max_new_tokens", "4"]
    sizes += ["--model.hidden_size", "16", "--model.num_layers", "1", "--update.warmup_steps", "0"]
    folder = tmp_path / "a run"
    train(["--config", "configs/length_toy.yaml", "--run_dir", str(folder), "--iterations", "1", *sizes])
    reported = capsys.readouterr().out
    assert "training reward, first 1 -> last 1 of 1 iterations of 4 completions" in reported
    commands = [shlex.split(line) for line in reported.split("next:\n")[1].splitlines()]
    doors = {"jax_grpo.report": report, "jax_grpo.export": export, "jax_grpo.train": train}
    assert [command[:2] for command in commands] == [["python", "-m"]] * 3, "no suite, and nothing held out"
    for command in commands:
        doors[command[2]](command[3:])
    assert (folder / "report.html").exists() and (folder / "exported" / "config.json").exists()
    assert re.search(
        r"continuing after iteration 1 .*\n(.*\n)*training reward.*of 2 iterations", capsys.readouterr().out
    )
    chess = Trainer(load_config("configs/quickstart.yaml", ["--run_dir", "runs/q"]))
    judged = _next_commands(chess, None, None)[0]
    assert "jax_grpo.evaluate --weights runs/q --out runs/q/evaluation" in judged
