"""Runs that are killed or diverge and are continued end as if they had not been: real processes, real signals."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE_S
from short_runs import (
    CONFIG,
    ITERATIONS,
    TASKS,
    TRAIN,
    finish,
    lines,
    lines_without_times,
    require_same_run,
    signal_after,
    start,
)

from jax_grpo.report.records import read_records
from jax_grpo.run import files
from jax_grpo.run.checkpoints import load


@pytest.mark.slow
def test_steps_that_are_not_finite_stop_the_run_and_keep_the_last_good_checkpoint(tmp_path):
    finish(start(tmp_path, "run", "--iterations", "4", "--update.total_steps", "32"))
    process = start(tmp_path, "run", "--resume", "auto", "--update.total_steps", "32", "--update.learning_rate", "1e38")
    output = process.communicate(timeout=PATIENCE_S)[0]
    print(output)
    assert process.returncode == 1 and "Traceback" not in output
    assert re.search(
        r"NonFiniteUpdates: \d+ optimiser steps in a row had a non-finite loss.*max_consecutive_nonfinite = 3", output
    )
    newest = files.complete(tmp_path / "run" / "checkpoints")[-1]
    assert f"the newest complete checkpoint is {newest}" in output
    finish(start(tmp_path, "run", "--resume", "auto", "--update.total_steps", "32"))
    assert all(record["nonfinite"] == 0 for record in read_records(tmp_path / "run" / "metrics.jsonl")[:4])


@pytest.mark.slow
def test_a_run_stopped_by_sigterm_and_killed_by_sigkill_in_real_processes_ends_as_if_it_had_not_been(tmp_path):
    """Without a shared cache of compiled programs: every process compiles its own."""
    finish(start(tmp_path, "whole", cache=False))
    run = tmp_path / "cut"

    process = start(tmp_path, "cut", cache=False)
    signal_after(process, run, 4, signal.SIGTERM)
    output = finish(process)
    stopped = lines(run)
    assert 4 <= stopped < ITERATIONS and f"stopped after iteration {stopped} of {ITERATIONS}" in output, output
    assert f"--run_dir {run} --resume auto" in output and "SIGTERM: finishing this iteration" in output
    assert int(files.complete(run / "checkpoints")[-1].name) == stopped

    process = start(tmp_path, "cut", "--resume", "auto", cache=False)
    signal_after(process, run, stopped + 4, signal.SIGKILL)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert f"continuing after iteration {stopped}" in process.communicate()[0]

    output = finish(start(tmp_path, "cut", "--resume", "auto", cache=False))
    assert "continuing after iteration" in output
    print(require_same_run(run, tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_sigkills_at_random_moments_lose_nothing(task, tmp_path):
    """Twenty of the first task, eight of others; twenty of each, and a record sigkill_TASK.json, where $JAX_GRPO_RESULTS is set."""
    wanted_kills = 20 if task == "policy" or "JAX_GRPO_RESULTS" in os.environ else 8
    total = 16 if task == "game" else 40  # a hundred times the parameters of the others
    options = [*TASKS[task], "--checkpoint.every", "1", "--iterations", str(total), "--record_batches", str(total)]
    began = time.perf_counter()
    finish(start(tmp_path, "whole", *options))
    warm = time.perf_counter()
    finish(start(tmp_path, "warm", *options))  # with the compiled programs, as those to be killed
    require_same_run(tmp_path / "warm", tmp_path / "whole", total, total)
    whole_s = time.perf_counter() - warm
    rng, run, kills = random.Random(20), tmp_path / "cut", []
    while len(kills) < wanted_kills:
        process, before = start(tmp_path, "cut", *options, "--resume", "auto"), lines(run)
        # Half of the kills come at any time of a process's first seconds: importing, restoring, compiling. The others come
        # within milliseconds of an iteration of their choice: computing, writing a checkpoint, pruning.
        if len(kills) % 2:
            kind, wanted = "from the start", rng.uniform(0.1, 0.7) * whole_s
            time.sleep(wanted)
        else:
            kind, wanted = "after an iteration", before + rng.randrange(1, 5)
            while lines(run) in (before, *range(wanted)) and process.poll() is None:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.1))
        alive = process.poll() is None
        process.kill()
        output = process.communicate()[0]
        if not alive:  # it came to its end before the kill: that is a resume too; the other kills need a run to hit
            assert process.returncode == 0, output
            require_same_run(run, tmp_path / "whole", total, total)
            shutil.rmtree(run)
            continue
        saved = files.complete(run / "checkpoints")
        for path in saved:
            load(path)
        kills.append(
            {
                "kind": kind,
                "wanted": round(wanted, 2),
                "newest_complete": int(saved[-1].name) if saved else None,
                "metrics_lines": lines(run),
                "half_written": sorted(path.name for path in (run / "checkpoints").glob(".*")),
            }
        )
    finish(start(tmp_path, "cut", *options, "--resume", "auto"))
    compared = require_same_run(run, tmp_path / "whole", total, total)
    print(compared, kills)
    if folder := os.environ.get("JAX_GRPO_RESULTS"):
        record = {"task": task, "iterations": total, "config": CONFIG, "options": options, "kills": kills}
        record |= {
            "one_run_s": round(whole_s, 1),
            "test_s": round(time.perf_counter() - began),
            "bitwise_equal": compared,
        }
        (Path(folder) / f"sigkill_{task}.json").write_text(json.dumps(record, indent=1) + "\n")


REFILLED = """
iterations: 4
run_dir: run
model: {tokenizer: chess, num_layers: 1, num_heads: 2, hidden_size: 16, max_position_embeddings: 32}
task: {name: prompts, rewards_from: [rewards.py:right], stop: ["="]}
prompts: {source: sums.jsonl, per_iteration: 4, max_prompt_tokens: 16, curriculum: {passed: 0.2, again: 0.7}}
rollout: {group_size: 4, max_new_tokens: 4, refill: {rounds: 4}}
update: {learning_rate: 1.0e-2, epochs: 2}
kl: {beta: 0.1, adaptive: true, target: 0.01}
logging: {samples_every: 1, tensorboard: false}
checkpoint: {every: 1}
"""
# One prompt in five is paid, by what the completion is; in the third draw of the third iteration the process is killed once.
KILLS_ITSELF = """
import collections, os, pathlib, signal, zlib

calls = collections.Counter()


def right(completions, answer, trainer_state):
    calls[trainer_state.global_step] += 1
    if trainer_state.global_step == 2 and calls[2] == 3 and not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.0 if a % 5 else zlib.crc32(c.encode()) % 5 / 5 for a, c in zip(answer, completions)]
"""


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_a_refill_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(REFILLED)
    (tmp_path / "rewards.py").write_text(KILLS_ITSELF)
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(9) for b in range(9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str) -> tuple[int, str]:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "MPLBACKEND": "Agg"}
        command = [*TRAIN, "--config", "config.yaml", "--run_dir", name, "--resume", "auto"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)
        return done.returncode, done.stdout + done.stderr

    status, output = run("cut")
    assert status == -signal.SIGKILL and (tmp_path / "killed").exists(), output
    assert [int(path.name) for path in files.complete(tmp_path / "cut" / "checkpoints")][-1:] in ([1], [2]), (
        "no later one"
    )
    status, output = run("cut")
    assert status == 0 and "continuing after iteration" in output, output
    status, output = run("whole")
    assert status == 0, output
    cut, whole = ([*lines_without_times(tmp_path / name)] for name in ("cut", "whole"))
    print([(record["refill/rounds"], record["groups_without_signal"], record["curriculum/again"]) for record in whole])
    assert any(record["curriculum/again"] > 0 for record in whole[2:])
    assert cut == whole and whole[2]["refill/rounds"] >= 2, "killed in a further draw"
    newest = [load(files.complete(tmp_path / name / "checkpoints")[-1]) for name in ("cut", "whole")]
    assert newest[0].content["next_prompt"] == newest[1].content["next_prompt"] > 4 * 4
    for name, array in newest[1].arrays.items():
        np.testing.assert_array_equal(newest[0].arrays[name], array, err_msg=name)
    for file in ("weights/model.safetensors", "samples.jsonl"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
