"""Runs that are killed or diverge and are continued end as if they had not been: real processes, real signals."""

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import PATIENCE_S
from short_runs import CONFIG, ITERATIONS, TASKS, finish, lines, require_same_run, signal_after, start

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
