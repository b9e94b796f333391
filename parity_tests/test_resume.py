"""A run that is stopped or killed and continued is the run that was not: real processes, real signals, compared bit for bit."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_grpo import checkpoint_files as files
from jax_grpo.config import ConfigError, check_files, load_config
from jax_grpo.loading import load_policy
from jax_grpo.metrics import MetricsError, MetricsLog
from jax_grpo.prompts import selfplay_positions
from jax_grpo.records import read_records
from jax_grpo.resume import command
from jax_grpo.train import main, train
from jax_grpo.weights import load_hf

ITERATIONS = 16
TIMES = ("time/", "memory/", "tokens_per_second", "flops_per_second/", "mfu/", "compile/")
CONFIG = """
iterations: 16
run_dir: unused
model: {tokenizer: chess, num_layers: 1, num_heads: 2, hidden_size: 16, max_position_embeddings: 208}
task: {name: policy, prompt_style: best_move}
prompts: {source: positions.jsonl, per_iteration: 4, max_prompt_tokens: 80} # 40 positions: iteration 10 begins another epoch
rollout: {group_size: 4, max_new_tokens: 4}
kl: {beta: 0.1, adaptive: true, target: 0.01}
update: {epochs: 2, learning_rate: 1.0e-2, schedule: cosine, warmup_steps: 2}
logging: {samples_every: 0, tensorboard: false}
checkpoint: {every: 3}
record_batches: 16
"""
ENVIRONMENT = ["--task.name", "environment", "--prompts.max_prompt_tokens", "176", "--rollout.max_new_tokens", "6"]
MIXTURE = "{policy: {max_new_tokens: 4}, environment: {share: 2}}"
MIXED = [*ENVIRONMENT, "--task.name", "mixed", "--task.mixture", MIXTURE]
TASKS = {"policy": [], "environment": ENVIRONMENT, "mixed": MIXED}


def write_inputs(folder: Path) -> None:
    rows = [
        json.dumps({"fen": p.fen, "moves": p.moves, "evaluations": p.evaluations})
        for p in selfplay_positions(2, 0)[:40]
    ]
    (folder / "positions.jsonl").write_text("\n".join(rows))
    (folder / "c.yaml").write_text(CONFIG.replace("positions.jsonl", str(folder / "positions.jsonl")))


def start(folder: Path, run: str, *arguments: str, cache: bool = True) -> subprocess.Popen:
    """The command line in a process of its own; compiled programs are shared by all processes of a folder."""
    write_inputs(folder)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled") if cache else "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    command = [
        sys.executable,
        "-m",
        "jax_grpo.train",
        "--config",
        str(folder / "c.yaml"),
        "--run_dir",
        str(folder / run),
    ]
    output = subprocess.PIPE
    return subprocess.Popen([*command, *arguments], stdout=output, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process: subprocess.Popen) -> str:
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return output


def lines(run: Path) -> int:
    return (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0


def signal_after(process: subprocess.Popen, run: Path, count: int, number: int) -> None:
    """Sends the signal as soon as the metrics file has `count` lines."""
    while lines(run) < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)
    process.send_signal(number)


def require_same_run(
    run: Path, reference: Path, batches: int = ITERATIONS, iterations: int = ITERATIONS
) -> dict[str, int]:
    """Parameters, moments, beta, counters, prompts, rollouts and metrics of two runs are equal bit for bit; what was compared."""
    last = files.folder_name(iterations)
    state, expected = (files.verify(path / "checkpoints" / last) for path in (run, reference))
    arrays = [
        name for name in expected["files"] if name.startswith(tuple(f"state/{name}/" for name in expected["arrays"]))
    ]
    assert state["arrays"] == expected["arrays"] and len(arrays) == 2 * len(expected["arrays"]), (
        "values and shape of each"
    )
    for name in arrays:
        assert state["files"][name] == expected["files"][name], name
    assert state["next_prompt"] == expected["next_prompt"]
    weights = [load_hf(path / "weights")[1]["wte"]["embedding"][...] for path in (run, reference)]
    assert np.array_equal(*weights)
    records = [
        [
            {k: v for k, v in record.items() if not k.startswith(TIMES)}
            for record in read_records(path / "metrics.jsonl")
        ]
        for path in (run, reference)
    ]
    assert records[0] == records[1] and len(records[0]) == iterations
    for iteration in range(batches):
        arrays_of = [dict(np.load(path / "batches" / f"{iteration:06d}.npz")) for path in (run, reference)]
        for name in arrays_of[1]:
            assert np.array_equal(arrays_of[0][name], arrays_of[1][name]), (iteration, name)
    beta = [record["beta"] for record in records[0]]
    assert len(set(beta)) > 3, "the coefficient adapts, so that a state without it would show"
    assert max(record["grad_norm"] for record in records[0]) > 0.1
    return {"files": len(arrays), "metrics_records": len(records[0]), "batches": batches}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Path]:
    """A folder with an uninterrupted run, `whole`; its compiled programs are reused by every run in it."""
    folder = tmp_path_factory.mktemp("resume")
    write_inputs(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    train(load_config(str(folder / "c.yaml"), ["--run_dir", str(folder / "whole")]))
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)


def test_a_run_stopped_by_sigterm_and_continued_by_another_process_is_the_run_that_was_not(shared, capfd):
    run = shared / "stopped"
    arguments = ["--config", str(shared / "c.yaml"), "--run_dir", str(run)]

    def terminate() -> None:
        while lines(run) < 4:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=terminate)
    sender.start()
    before = signal.getsignal(signal.SIGTERM)
    main(arguments)  # returns: exit status 0
    sender.join()
    assert signal.getsignal(signal.SIGTERM) is before
    out, err = capfd.readouterr()
    stopped = lines(run)
    assert 4 <= stopped < ITERATIONS and f"stopped after iteration {stopped} of {ITERATIONS}" in out
    assert "SIGTERM: finishing this iteration" in err
    assert f"python -m jax_grpo.train {shlex.join(arguments)} --resume auto\n" in out
    assert int(files.complete(run / "checkpoints")[-1].name) == stopped
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 99, "loss": 1.0}\n{"iteration": 100, "lo')  # what a kill after the save leaves
    output = finish(start(shared, "stopped", "--resume", "auto"))
    assert f"continuing after iteration {stopped}" in output
    print(require_same_run(run, shared / "whole"))
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert [start["from_iteration"] for start in starts] == [0, stopped] and starts[0]["packages"]["jax"]


def error_of(*arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--kl.beta", "0.2"], r"kl\.beta is 0\.2, but .*000016 was made with 0\.1: the coefficient.*Set it back"),
        (["--seed", "1"], r"seed is 1, but .*000016 was made with 0: every prompt and sample is drawn from it"),
        (
            ["--model.hidden_size", "32"],
            r"model\.hidden_size is 32, but .* was made with 16: the parameters have its size",
        ),
        (["--iterations", "10"], r"iterations is 10, but .*000016 is after 16; raise it, or give an earlier one"),
        (["--restart"], r"--resume and --restart contradict each other"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_config_that_cannot_continue_the_run_is_refused_by_key_before_anything_is_compiled(shared, change, message):
    arguments = ["--config", str(shared / "c.yaml"), "--run_dir", str(shared / "whole"), "--resume", "auto"]
    before = (shared / "whole" / "metrics.jsonl").read_bytes()
    error = error_of(*arguments, *change)
    assert re.search(message, error, re.DOTALL), error
    assert (shared / "whole" / "metrics.jsonl").read_bytes() == before


def test_other_positions_under_the_same_name_are_refused(shared):
    file = shared / "positions.jsonl"
    rows = file.read_text().splitlines()
    file.write_text("\n".join([*rows[1:], rows[0]]))
    try:
        error = error_of("--config", str(shared / "c.yaml"), "--run_dir", str(shared / "whole"), "--resume", "auto")
    finally:
        file.write_text("\n".join(rows))
    assert re.search(r"prompts\.source holds something else than when .*000016 was made: its positions is", error), (
        error
    )


def test_an_unfinished_run_is_not_overwritten_by_typing_its_command_again(shared, monkeypatch):
    arguments = ["--config", str(shared / "c.yaml"), "--run_dir", str(shared / "unfinished")]
    shutil.copytree(shared / "whole", shared / "unfinished")
    (shared / "unfinished" / "run.json").unlink()
    assert re.search(
        r"holds an unfinished run, saved at iteration 16: continue it with --resume auto, begin", error_of(*arguments)
    )
    assert "--resume nowhere: not a checkpoint and no folder with" in error_of(
        *arguments, "--resume", "nowhere", "--run_dir", str(shared / "elsewhere")
    )


def test_harmless_changes_are_told_and_a_copy_continues_elsewhere_with_its_metrics(shared, capfd):
    fork = shared / "fork"
    arguments = ["--config", str(shared / "c.yaml"), "--run_dir", str(fork), "--update.learning_rate", "0.02"]
    main(
        [*arguments, "--resume", str(shared / "whole" / "checkpoints" / "000016")]
    )  # nothing is left to do but the weights
    out = capfd.readouterr().out
    assert "continuing after iteration 16 from" in out and "update.learning_rate: 0.01 -> 0.02" in out, out
    for name in ("metrics.jsonl", "weights/model.safetensors"):
        assert (fork / name).read_bytes() == (shared / "whole" / name).read_bytes(), name


def test_a_checkpoint_serves_as_the_weights_of_another_run(shared):
    weights = str(shared / "whole" / "checkpoints" / "000016")
    config = load_config(str(shared / "c.yaml"), ["--model.weights", weights])
    check_files(config)
    policy = load_policy(config.model, 0, 96)
    expected = load_hf(shared / "whole" / "weights")[1]
    assert all(map(np.array_equal, jax.tree.leaves(policy.params), jax.tree.leaves(expected)))
    with pytest.raises(
        ConfigError, match=r"expected a Hugging Face folder.*or give a checkpoint \(runs/NAME/checkpoints"
    ):
        check_files(config.model_copy(update={"model": config.model.model_copy(update={"weights": str(shared)})}))


def test_a_metrics_file_that_lost_lines_is_not_continued_in_silence(shared, tmp_path):
    config = load_config(str(shared / "c.yaml"))
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n')
    with pytest.raises(
        MetricsError, match=r"metrics.jsonl has 17 bytes, but the checkpoint was saved after 500: lines are missing"
    ):
        MetricsLog(tmp_path, config, 500, 3)


def test_the_command_that_continues_is_the_command_that_started():
    assert (
        command(["--config", "a b.yaml", "--restart"]) == "python -m jax_grpo.train --config 'a b.yaml' --resume auto"
    )
    assert (
        command(["--config", "c", "--resume", "x", "--seed=1"])
        == "python -m jax_grpo.train --config c --seed=1 --resume auto"
    )


@pytest.mark.slow
def test_a_disk_that_fills_up_stops_the_run_with_the_last_checkpoint_intact_and_it_continues_once_there_is_room(
    tmp_path,
):
    finish(start(tmp_path, "whole"))
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1800k", "none", disk], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        process = start(tmp_path, "small/run", "--record_batches", "0")
        output = process.communicate(timeout=300)[0]
        print(output)
        assert process.returncode == 1 and "Traceback" not in output
        assert re.search(
            r"CheckpointError: the checkpoint of iteration \d+ could not be written to .*No space left on device",
            output,
        )
        newest = files.complete(disk / "run" / "checkpoints")[-1]
        files.verify(newest)
        assert f"the newest complete checkpoint is {newest}: continue with --resume auto" in output
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        assert "continuing after iteration" in finish(
            start(tmp_path, "small/run", "--record_batches", "0", "--resume", "auto")
        )
        require_same_run(disk / "run", tmp_path / "whole", batches=0)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_steps_that_are_not_finite_stop_the_run_and_keep_the_last_good_checkpoint(tmp_path):
    finish(start(tmp_path, "run", "--iterations", "4", "--update.total_steps", "32"))
    process = start(tmp_path, "run", "--resume", "auto", "--update.total_steps", "32", "--update.learning_rate", "1e38")
    output = process.communicate(timeout=300)[0]
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
    assert process.wait(60) == -signal.SIGKILL
    assert f"continuing after iteration {stopped}" in process.communicate()[0]

    output = finish(start(tmp_path, "cut", "--resume", "auto", cache=False))
    assert "continuing after iteration" in output
    print(require_same_run(run, tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_twenty_sigkills_at_random_moments_lose_nothing(task, tmp_path):
    """Writes its record to $JAX_GRPO_RESULTS/sigkill_TASK.json where that is set."""
    total = 40
    options = [*TASKS[task], "--checkpoint.every", "1", "--iterations", str(total), "--record_batches", str(total)]
    began = time.perf_counter()
    finish(start(tmp_path, "whole", *options))
    warm = time.perf_counter()
    finish(start(tmp_path, "warm", *options))  # with the compiled programs, as those to be killed
    require_same_run(tmp_path / "warm", tmp_path / "whole", total, total)
    whole_s = time.perf_counter() - warm
    rng, run, kills = random.Random(20), tmp_path / "cut", []
    while len(kills) < 20:
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
            files.verify(path)
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
