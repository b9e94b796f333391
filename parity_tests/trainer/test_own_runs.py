"""Whole runs on the user's own prompts and rewards: stopped by a reward that fails, continued bit for bit, and the reference's."""

import json

import pytest
from short_runs import TIMES

from jax_grpo import train as training
from jax_grpo.report.records import read_records
from jax_grpo.run.files import CheckpointError
from torch_ref import train as torch_training

CONFIG = """
iterations: 5
run_dir: run
model: {tokenizer: chess, num_layers: 1, num_heads: 2, hidden_size: 16, max_position_embeddings: 32}
task:
  name: prompts
  rewards_from: [rewards.py:right, rewards.py:short]
  reward_weights: [2.0, 0.5]
  stop: ["="]
prompts: {source: sums.jsonl, per_iteration: 4, max_prompt_tokens: 16}
rollout: {group_size: 4, max_new_tokens: 4}
update: {learning_rate: 1.0e-2}
evaluation: {positions: 4, every: 2}
logging: {samples_every: 1, tensorboard: false}
checkpoint: {every: 2}
"""
REWARDS = """
import pathlib


def right(completions, answer, trainer_state, log_metric, log_extra):
    if trainer_state.global_step == 3:
        raise KeyError("no such answer")
    log_metric("step", trainer_state.global_step)
    log_extra("expected", answer)
    return [None if a % 2 else float(str(a) in c) for a, c in zip(answer, completions)]


async def short(completion_ids, **columns):
    return [-float(len(ids)) for ids in completion_ids]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(6) for b in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def mended(folder):
    (folder / "rewards.py").write_text(REWARDS.replace("global_step == 3", "global_step == -1"))


def records(run):
    rows = read_records(run / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


@pytest.mark.slow  # compiles three small runs
def test_a_run_that_a_reward_ended_is_continued_with_the_mended_one_bit_for_bit(folder, capfd):
    command = ["--config", "config.yaml"]
    with pytest.raises(
        SystemExit, match=r"rewards.py:7: right raised KeyError: 'no such answer'. Sample 0: prompt '"
    ) as raised:
        training.main(command)
    assert "Traceback" not in str(raised.value)
    mended(folder)
    training.main([*command, "--resume", "auto"])
    assert "continuing after iteration 2 from" in (output := "".join(capfd.readouterr().out.split("\n")))
    assert "changed since: the code of rewards.py" in output.replace("  ", " ")
    training.main([*command, "--run_dir", "whole"])
    for file in ("weights/model.safetensors", "samples.jsonl"):
        assert (folder / "run" / file).read_bytes() == (folder / "whole" / file).read_bytes(), file
    assert records(folder / "run") == records(folder / "whole")
    assert [row["log/step"] for row in records(folder / "run") if "reward/mean" in row] == [0, 1, 2, 3, 4]
    lines = (folder / "run" / "samples.jsonl").read_text().splitlines()
    samples = [sample for line in lines for sample in json.loads(line)["samples"]]
    odd = [sample["extra"]["expected"] % 2 for sample in samples]
    assert set(odd) == {0, 1} and all(len(s["components"]) == 2 - o for s, o in zip(samples, odd, strict=True)), (
        "None is none"
    )
    assert all(sample["extra"]["expected"] == eval(sample["prompt"][:-1]) for sample in samples)

    rows = (folder / "sums.jsonl").read_text()
    (folder / "sums.jsonl").write_text(rows + rows.splitlines()[0] + "\n")
    with pytest.raises(SystemExit, match=rf"{CheckpointError.__name__}: prompts.source holds something else than when"):
        training.main([*command, "--iterations", "6", "--resume", "auto"])


@pytest.mark.slow
def test_the_reference_trains_on_them_too_and_reports_under_the_same_names(folder):
    with pytest.raises(SystemExit, match=r"RewardError: .*rewards.py:7: right raised KeyError: 'no such answer'"):
        torch_training.main(["--config", "config.yaml", "--run_dir", "broken", "--device", "cpu"])
    mended(folder)
    torch_training.main(["--config", "config.yaml", "--run_dir", "theirs", "--device", "cpu"])
    training.main(["--config", "config.yaml", "--run_dir", "ours"])
    ours, theirs = records(folder / "ours"), records(folder / "theirs")
    assert [row["iteration"] for row in ours] == [row["iteration"] for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        names = [{name for name in row if name.startswith(("reward/", "eval/", "log/"))} for row in (mine, other)]
        assert names[0] == names[1] and names[0]
