"""What goes wrong in long runs stops them with one clear message, or is survived; every fault here is a real one."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from conftest import PATIENCE_S, config
from flax import nnx

from jax_grpo import trainer as trainer_module
from jax_grpo.chess.tasks.engine import EngineError
from jax_grpo.config.sections import CheckpointConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.memory.fit import DeviceOutOfMemory, explain_out_of_memory, next_micro_batches
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.run.checkpoints import Checkpoints
from jax_grpo.run.folder import RunFolderError, locked_folder, read_record, record_finish, record_start
from jax_grpo.system import phases as phases_module
from jax_grpo.system.phases import Phases, Watchdog
from jax_grpo.tasks.base import Prompt, RewardError
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tasks.toy import LengthTask
from jax_grpo.train import main
from jax_grpo.update import init_state

PROMPTS = [Prompt(f"prompt {i}", 0) for i in range(4)]
TEXTS = ["a", "bb", "ccc", "dddd"]


class Broken(LengthTask):
    """The length toy with a score of the test's."""

    def __init__(self, score):
        super().__init__(task_of(name="length"))
        self.score = score  # pyright: ignore[reportAttributeAccessIssue]


def one_raises(prompts, completions):
    if "ccc" in completions:
        raise KeyError("no such label")
    return {"length": np.zeros(len(completions))}


def only_the_batch_raises(prompts, completions):
    if len(completions) > 1:
        raise ZeroDivisionError("std of a batch")
    return {"length": np.zeros(1)}


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (one_raises, "task 'length' raised KeyError: 'no such label'. Sample 2: prompt 'prompt 2', completion 'ccc'"),
        (only_the_batch_raises, "raised ZeroDivisionError: std of a batch; it does so on the batch of 4, on none of its"),
        (lambda p, c: None, "score returned None; expected an array for each of length"),
        (lambda p, c: {"len": [0.0] * 4}, "score returned len; expected an array for each of length"),
        (lambda p, c: {"length": None}, "reward component 'length' is None; expected 4 numbers. Sample 0: prompt 'prompt 0'"),
        (lambda p, c: {"length": [0.0, 1.0, None, 0.0]}, "'length' is None; expected a finite number. Sample 2: prompt"),
        (lambda p, c: {"length": np.array([0.0, np.nan, 0, 0])}, "is np.float64(nan); expected a finite number. Sample 1"),
        (lambda p, c: {"length": np.array([0.0, 1e39, 0, 0])}, r"is np.float64(1e+39); expected a finite number. Sample 1"),
        (lambda p, c: {"length": [0.0, 1.0, 2.0, float("inf")]}, "inf); expected a finite number. Sample 3: prompt 'prompt 3'"),
        (lambda p, c: {"length": np.zeros(3)}, "has shape (3,); expected one number for each of the 4 samples"),
        (lambda p, c: {"length": 0.0}, "has shape (); expected one number for each of the 4 samples"),
        (lambda p, c: {"length": ["a", 0.0, 0.0, 0.0]}, "is np.str_('a'); expected a finite number. Sample 0"),
    ],
)  # fmt: skip
def test_a_reward_that_is_no_reward_stops_the_run_and_names_the_sample(score, message):
    with pytest.raises(RewardError, match=re.escape(message)):
        checked_score(Broken(score), PROMPTS, TEXTS)


def test_good_rewards_pass_as_they_are_and_the_engine_s_own_error_stays_its_own():
    good = LengthTask(task_of(name="length", length_cap=4))
    assert checked_score(good, PROMPTS, TEXTS)["length"].tolist() == [0.25, 0.5, 0.75, 1.0]
    assert (
        checked_score(Broken(lambda p, c: {"length": [True, 1, 2.5, np.int64(3)]}), PROMPTS, TEXTS)[
            "length"
        ].values_B.dtype
        == np.float32
    )

    def dead(prompts, completions):
        raise EngineError("stockfish failed 3 times")

    with pytest.raises(EngineError, match="failed 3 times"):
        checked_score(Broken(dead), PROMPTS, TEXTS)


def broken_hf(folder: Path, values: list[float]) -> None:
    """Weights as transformers writes them, with `values` at the start of row 7 of one matrix."""
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=131, n_layer=2, n_head=2, n_embd=32, n_positions=128)
    )
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[7, : len(values)] = torch.tensor(values)
    model.save_pretrained(folder)


def broken_checkpoint(folder: Path, values: list[float]) -> None:
    architecture = Architecture(vocab_size=131, num_layers=2, num_heads=2, hidden_size=32, max_position_embeddings=128)
    params = nnx.split(Decoder(architecture, rngs=nnx.Rngs(0)), nnx.Param)[1]
    kernel = params["h"][1]["mlp"]["c_fc"]["kernel"]
    kernel.set_value(kernel.get_value().at[7, : len(values)].set(jnp.array(values)))
    with Checkpoints(folder.parent, CheckpointConfig(keep_best=0)) as checkpoints:
        checkpoints.save(
            int(folder.name), init_state(params, config().learning()), {"architecture": asdict(architecture)}, {}
        )


@pytest.mark.default_cases("inf_and_nan-broken_hf-{folder}/model.safetensors: tensor 'transformer.h.1.mlp.c_fc.weight'")
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (broken_hf, "{folder}/model.safetensors: tensor 'transformer.h.1.mlp.c_fc.weight'"),
        (broken_checkpoint, "{folder}/state/params/h/1/mlp/c_fc/kernel: tensor 'params/h/1/mlp/c_fc/kernel'"),
    ],
)
@pytest.mark.parametrize("values", [[float("nan")], [float("inf"), 1.0, float("nan")]], ids=["nan", "inf_and_nan"])
def test_weights_that_are_not_finite_are_refused_by_tensor_before_anything_is_compiled(
    make, where, values, tmp_path, monkeypatch
):
    folder = tmp_path / "000003"
    make(folder, values)
    monkeypatch.setattr(trainer_module, "make_programs", lambda *_: pytest.fail("went on"))
    (tmp_path / "c.yaml").write_text(
        f"run_dir: {tmp_path / 'run'}\niterations: 1\nmodel: {{tokenizer: chess, weights: {folder}}}\n"
        "task: {name: policy, prompt_style: best_move}\nprompts: {source: selfplay:1, max_prompt_tokens: 80}\n"
    )
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(tmp_path / "c.yaml")])
    count = sum(not np.isfinite(value) for value in values)
    assert str(caught.value) == (
        f"WeightsError: {where.format(folder=folder)} has {count} of 4096 values that are NaN or infinite (the first, "
        f"{values[0]}, at [7, 0]); such weights cannot be trained. Set model.weights to earlier ones"
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_out_of_memory_names_the_program_and_a_micro_batch_that_is_smaller():
    tiny = config(update={"micro_batches": 2})
    phases = Phases()
    with (
        pytest.raises(DeviceOutOfMemory, match=r"the update program does not fit on cpu \(it asked for .*GB more\).*"
                      r"Its micro-batch has 8 completions: set update.micro_batches 4 \(now 2\) for 4,") as caught,
        explain_out_of_memory(phases, tiny),
    ):  # fmt: skip
        phases.run("update", lambda: jnp.zeros((1 << 24, 1 << 24)))  # a petabyte
    print(caught.value)
    with (
        pytest.raises(
            DeviceOutOfMemory, match=r"the rollout program .*prompts.per_iteration 4 x rollout.group_size 4 = 16 comp"
        ),
        explain_out_of_memory(phases, tiny),
    ):
        phases.run("rollout", lambda: jnp.zeros((1 << 24, 1 << 24)))
    with (
        pytest.raises(
            DeviceOutOfMemory, match=r"the evaluation program .* 64 held-out prompts .* evaluation.positions 0"
        ),
        explain_out_of_memory(phases, tiny),
    ):
        phases.run("evaluation", lambda: jnp.zeros((1 << 24, 1 << 24)))
    with pytest.raises(ZeroDivisionError), explain_out_of_memory(phases, tiny):
        phases.run("update", lambda: 1 // 0)


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("Out of memory allocating 2491416576 bytes.", " (it asked for 2.49 GB more)"),  # of the CPU's runtime
        (
            "Out of memory while trying to allocate 2491416576 bytes.",
            " (it asked for 2.49 GB more)",
        ),  # these of a GPU's
        ("Out of memory while trying to allocate 2.99GiB.", " (it asked for 2.99 GiB more)"),
        ("Failed to allocate request for 2.99GiB (3206250496B) on device ordinal 0", " (it asked for 2.99 GiB more)"),
        ("Ran out of something else.", ""),
    ],
    ids=["cpu", "bytes", "rounded", "request", "unknown"],
)
def test_the_memory_that_was_asked_for_is_read_from_every_wording_of_the_runtimes(message, asked):
    phases = Phases()

    def full():
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")

    with pytest.raises(DeviceOutOfMemory) as caught, explain_out_of_memory(phases, config()):
        phases.run("update", full)
    assert f"does not fit on {jax.devices()[0].device_kind}{asked}. " in str(caught.value)


def test_the_micro_batch_that_is_advised_is_one_the_config_takes():
    parts, actual = 1, []
    while (
        more := next_micro_batches(config(prompts={"per_iteration": 6}, update={"micro_batches": parts}))
    ) is not None:
        actual.append(parts := more)
    assert actual == [2, 3, 6, 12, 24], "6 prompts x 4 completions: whole groups, then halves and quarters of one"


def test_the_watchdog_speaks_during_a_hang_once_and_names_the_phase(monkeypatch):
    """Its own thread speaks; time is what the test says it is."""
    monkeypatch.setattr(phases_module, "CHECK_S", 0.01)
    output: list[tuple[str, str]] = []
    spoke, clock = threading.Event(), [100.0]

    def say(line):
        output.append((threading.current_thread().name, line))
        spoke.set()

    def take(seconds):
        clock[0] += seconds
        watchdog._look()

    def hang():
        clock[0] += 10.0
        assert spoke.wait(PATIENCE_S), "it speaks before the phase is over"
        watchdog._look()
        take(10.0)

    with Watchdog(say, lambda: clock[0]) as watchdog:
        for iteration in range(5):
            with watchdog.iteration(iteration) as phases:
                phases.run("update", lambda: take(1.0))
        assert output == []
        with watchdog.iteration(5) as phases:
            phases.run("rollout", lambda: take(1.0))
            phases.run("reward", hang)
    line = "watchdog: iteration 5 has taken 11.0 s so far, 11 times the median 1.00 s; it is in phase 'reward' since 10.0 s"
    assert output == [("watchdog", line)]
    assert phases.seconds == {"rollout": 1.0, "reward": 20.0}


def test_two_runs_in_one_folder_are_refused_and_a_killed_run_s_lock_is_not(tmp_path):
    held = f"with locked_folder({str(tmp_path)!r}): print('locked', flush=True); input()"
    program = f"from jax_grpo.run.folder import locked_folder\n{held}"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    with pytest.raises(
        RunFolderError, match=rf"another run is using \(process {holder.pid} on .*choose another run_dir"
    ):
        locked_folder(tmp_path).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert f"process {holder.pid}" in (tmp_path / "run.lock").read_text(), "the stale lock file is there"
    with locked_folder(tmp_path) as folder:
        assert f"process {os.getpid()} " in (folder / "run.lock").read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)
    nobody = 65534
    root = os.geteuid() == 0
    if root:  # root may write anywhere: be nobody for the attempt
        for path in (tmp_path, *tmp_path.parents[:2]):
            path.chmod(path.stat().st_mode | 0o055)
        os.seteuid(nobody)
    try:
        with pytest.raises(
            RunFolderError, match=r"run_dir is '.*closed.*', which cannot be written \(Permission denied\)"
        ):
            locked_folder(tmp_path / "closed" / "run").__enter__()
        with pytest.raises(RunFolderError, match=r"cannot be written \(Permission denied\); give a folder that can"):
            locked_folder(tmp_path / "closed").__enter__()
    finally:
        if root:
            os.seteuid(0)


def test_run_json_tells_every_start_and_survives_being_damaged(tmp_path):
    resolved = config().resolved_yaml()
    record_start(tmp_path, resolved, "python -m jax_grpo.train --config c.yaml", 0, 1)
    record_start(tmp_path, resolved, "python -m jax_grpo.train --config c.yaml --resume auto", 7, 1)
    record_finish(tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    assert [start["from_iteration"] for start in record["starts"]] == [0, 7] and record["finished"]
    first = record["starts"][0]
    assert (
        first["packages"]["jax"] == jax.__version__
        and first["hardware"]["devices"] == ["cpu"]
        and first["hardware"]["cores"]
    )
    assert len(first["config_sha256"]) == 64 and first["command"].endswith("--config c.yaml")
    assert first["git"] is None or re.fullmatch("[0-9a-f]{40}", first["git"]["commit"])
    (tmp_path / "run.json").write_text("{cut")
    assert read_record(tmp_path)["starts"] == []
    record_start(tmp_path, resolved, None, 9, 1)
    assert len(read_record(tmp_path)["starts"]) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_first_signal_asks_and_a_second_one_ends(number):
    program = """
import time
from jax_grpo.system.process import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(3600)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    for expected in ("ready\n", "asked\n"):
        assert process.stdout.readline() == expected
        process.send_signal(number)
    error = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == -number, "ended by the signal itself"
    assert f"{number.name}: finishing this iteration, then saving; once more to quit at once" in error
