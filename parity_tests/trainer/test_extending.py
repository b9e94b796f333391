"""docs/extending.md and the README: their files, copied into an empty folder, train with the package as its wheel installs it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from architecture import ROOT
from conftest import PATIENCE_S
from conftest import config as tiny_config

from jax_grpo.config.tasks import task_of
from jax_grpo.report.records import read_records
from jax_grpo.tasks import make_task
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tasks.episodes import checked_reset, checked_steps


def files_of(page: str) -> dict[str, str]:
    """The files that a page shows, each below its name."""
    return dict(re.findall(r"^`([\w.]+)`\n```\w+\n(.*?)^```", page, re.DOTALL | re.MULTILINE))


PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = files_of(PAGE)
COMMANDS = re.findall(r"^python -m (jax_grpo\.train .*)$", PAGE, re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder but for the page's files."""
    (tmp_path / "work").mkdir()
    for name, text in FILES.items():
        (tmp_path / "work" / name).write_text(text)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_the_page_has_its_files_and_says_their_sizes():
    assert set(FILES) == {
        "kinds.jsonl", "rewards.py", "reward.yaml", "repeat.jsonl", "counted.py", "task.yaml",
        "wishes.jsonl", "wish.py", "environment.yaml",
    }  # fmt: skip
    longest = {"rewards.py": 10, "counted.py": 40, "wish.py": 40}
    assert all(FILES[name].count("\n") <= lines for name, lines in longest.items())
    assert [command.split()[-1] for command in COMMANDS] == ["reward.yaml", "task.yaml", "environment.yaml"]


def test_the_environment_of_the_page_tells_its_wish_and_rewards_what_is_written_after_it(folder):
    task = make_task(task_of(name="wish.py:Wish"))
    rows = task.read(tiny_config(prompts={"source": "wishes.jsonl", "split": "all"}).prompts, 0, None)
    prompts = [task.prompt(rows[i], i) for i in range(3)]
    assert {prompt.text for prompt in prompts} == {"a wish: "}, "nothing of it is in the prompt"
    episodes = checked_reset(task, prompts)  # pyright: ignore[reportArgumentType]
    live = dict(enumerate(episodes))
    requested = checked_steps(task, prompts, live, ["AB1"] * 3)  # pyright: ignore[reportArgumentType]
    assert sorted(requested) == [(" capitals: ", False), (" digits: ", False), (" small letters: ", False)]
    checked_steps(task, prompts, live, ["AB1c"] * 3)  # pyright: ignore[reportArgumentType]
    shares = dict(
        zip([text for text, _ in requested], checked_score(task, prompts, episodes)["granted"].values_B, strict=True)
    )
    assert shares == {" capitals: ": 0.5, " digits: ": 0.25, " small letters: ": 0.25}


def test_the_settings_of_the_page_are_what_its_task_is_made_with():
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "jax_grpo.Settings" in b]
    known: dict = {}
    exec(f"import jax_grpo\n{block}", known)
    made = [known["Counted"](known["Counted"].Settings(**given)).most for given in ({}, {"most": 12})]
    assert made == [8, 12]


def test_the_mixture_of_the_page_asks_all_three(folder):
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "name: mixed" in b]
    config = tiny_config(**yaml.safe_load(block))
    task = make_task(config.task)
    rows = task.read(config.prompts, 0, None)
    prompts = [task.prompt(rows[i], i) for i in range(8)]
    assert sorted(p.task for p in prompts) == ["own"] * 2 + ["policy"] * 4 + ["prompts"] * 2
    scores = task.score(prompts, ["AB"] * 8)
    assert {"prompts/share", "own/exact", "policy/legal"} <= set(scores)


def installed(folder: Path) -> Path:
    """Where pip has put the package, from a wheel that was built of a copy of the sources."""
    source, target = folder / "source", folder / "installed"
    for name in ("jax_grpo", "torch_ref"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", "wheels", str(source)], folder)
    (wheel,) = (folder / "wheels").glob("jax_grpo-*.whl")
    run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], folder)
    shutil.rmtree(source)
    return target


def run(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | environment,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # builds a wheel and trains three times
def test_the_examples_train_outside_the_repository_with_the_installed_wheel_and_without_python_chess(folder):
    package, absent = installed(folder.parent), folder.parent / "absent"
    absent.mkdir()
    (absent / "chess.py").write_text("raise ImportError('python-chess is not installed')\n")
    environment = {"PYTHONPATH": f"{absent}:{package}", "JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg"}
    place = run([sys.executable, "-c", "import jax_grpo; print(jax_grpo.__file__)"], folder, **environment)
    assert Path(place.strip()).is_relative_to(package)
    for command in COMMANDS:
        run([sys.executable, "-m", *command.split()], folder, **environment)
    actual = {}
    for name in ("kinds", "counted", "wish"):
        records = [r for r in read_records(folder / "runs" / name / "metrics.jsonl") if "reward/mean" in r]
        actual[name] = [float(np.mean([r["reward/mean"] for r in part])) for part in (records[:5], records[-5:])]
    print({name: f"{first:.2f} -> {last:.2f}" for name, (first, last) in actual.items()})
    assert actual["kinds"][0] < 0.3 and actual["kinds"][1] > 0.6, "of at most 1"
    assert actual["counted"][0] < 0.4 and actual["counted"][1] > 1.1, "of at most 2"
    assert actual["wish"][0] < 0.3 and actual["wish"][1] > 0.6, "of at most 1, and a third without the answers"
    from_python = (
        "import jax_grpo, rewards\n"
        "changes = ['--task.rewards_from', 'null', '--iterations', '1', '--run_dir', 'python']\n"
        "config = jax_grpo.load_config('reward.yaml', changes)\n"
        "print(jax_grpo.train.train(config, rewards=[rewards.share]))\n"
    )
    output = run(
        [sys.executable, "-c", from_python], folder, **environment | {"PYTHONPATH": f"{absent}:{package}:{folder}"}
    )
    assert output.rstrip().endswith("python") and (folder / "python" / "weights").is_dir()


def test_the_reward_of_the_readme_is_one_short_file():
    files = files_of((ROOT / "README.md").read_text())
    assert [*files] == ["mine.py"]
    assert files["mine.py"].count("\n") <= 20


@pytest.mark.slow  # a whole training
def test_the_reward_of_the_readme_is_learnt(tmp_path):
    (tmp_path / "mine.py").write_text(files_of((ROOT / "README.md").read_text())["mine.py"])
    run([sys.executable, "mine.py"], tmp_path, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", MPLBACKEND="Agg")
    records = read_records(tmp_path / "runs" / "mine" / "metrics.jsonl")
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    assert np.mean(rewards[:10]) < 0.3 and np.mean(rewards[-10:]) > 0.6
