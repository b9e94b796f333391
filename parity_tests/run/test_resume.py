"""A run that is stopped and continued is the run that was not, and one that cannot be is refused: compared bit for bit."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from short_runs import ITERATIONS, finish, lines, require_same_run, start, write_inputs
from test_config import FLAT

from jax_grpo.config import ConfigError, check_files, load_config
from jax_grpo.model.weights import load_hf
from jax_grpo.policy.named import load_policy
from jax_grpo.report.log import MetricsError, MetricsLog
from jax_grpo.run import files, resume
from jax_grpo.run.checkpoints import Checkpoints, Origin
from jax_grpo.run.files import CheckpointError
from jax_grpo.run.folder import RunFolderError
from jax_grpo.run.resume import command, find_origin
from jax_grpo.train import main, train
from jax_grpo.trainer import Trainer
from torch_ref.options import Options
from torch_ref.train import train as torch_train


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder with an uninterrupted run, `whole`; the session's compiled programs serve every run in it."""
    folder = tmp_path_factory.mktemp("resume")
    write_inputs(folder)
    train(load_config(str(folder / "c.yaml"), ["--run_dir", str(folder / "whole")]))
    return folder


@pytest.mark.slow  # three runs in processes of their own
def test_a_run_stopped_by_sigterm_and_continued_by_another_process_is_the_run_that_was_not(shared, capfd, monkeypatch):
    run = shared / "stopped"
    arguments = ["--config", str(shared / "c.yaml"), "--run_dir", str(run)]

    real = Trainer.iterate

    def terminated(self, iteration, *others):
        if lines(run) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, iteration, *others)

    monkeypatch.setattr(Trainer, "iterate", terminated)
    before = signal.getsignal(signal.SIGTERM)
    main(arguments)  # returns: exit status 0
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "{policy: {share: 2}, environment: {}}",
            r"task\.mixture\.policy\.share is 2\.0, but .* made with 1\.0: the prompts dep",
        ),
        (
            "{policy: {}, length: {}}",
            r"task\.mixture\.length\.share is 1\.0, but .* made with '\(not set\)': the prompts depend",
        ),
        ("{policy: {}, environment: {max_new_tokens: 9}}", None),
    ],
)
def test_a_mixture_asks_what_it_asked_or_does_not_continue(change, message, request):
    file = str(request.config.rootpath / "configs/quickstart_mixed.yaml")
    before, now = (
        load_config(file, ["--task.mixture", mixture, "--rollout.max_new_tokens", "96"])
        for mixture in ("{policy: {}, environment: {}}", change)
    )
    origin = Origin(Path("000016"), {"config": before.model_dump(), "iteration": 0}, {})
    if message is None:
        assert any("environment.max_new_tokens: None -> 9" in line for line in resume.require_same_run(origin, now))
        return
    with pytest.raises(CheckpointError, match=message):
        resume.require_same_run(origin, now)


def test_a_checkpoint_of_a_version_in_which_an_objective_had_every_key_is_continued(request):
    config = load_config(str(request.config.rootpath / "configs/quickstart.yaml"), ["--objective.name", "gmpo"])
    before = config.model_dump()
    before["objective"] = FLAT | before["objective"]
    del before["objective"]["entropy_bounds"]
    origin = Origin(Path("000016"), {"config": before, "iteration": 0}, {})
    assert resume.require_same_run(origin, config) == []
    before["objective"]["delta"] = 3.0
    assert resume.require_same_run(origin, config) == ["objective.delta: 3.0 -> (not set)"]


def test_a_checkpoint_of_adapters_that_could_have_a_dropout_of_0_is_continued(request):
    config = load_config(str(request.config.rootpath / "configs/quickstart.yaml"), ["--model.adapter", "{}"])
    before = config.model_dump()
    before["model"]["adapter"]["dropout"] = 0.0
    assert resume.require_same_run(Origin(Path("000016"), {"config": before, "iteration": 0}, {}), config) == []
    with pytest.raises(
        ConfigError, match=r"model\.adapter\.dropout is no longer a setting: it could only be 0; leave it out"
    ):
        load_config(str(request.config.rootpath / "configs/quickstart.yaml"), ["--model.adapter.dropout", "0.1"])


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


def test_a_finished_run_is_not_overwritten_by_typing_its_command_again(shared):
    def everything(folder):
        return {
            str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"
        }

    finished, weights = shared / "finished", shared / "weights_alone"
    shutil.copytree(shared / "whole", finished)
    (weights / "weights").mkdir(parents=True)
    shutil.copy(shared / "whole" / "weights" / "config.json", weights / "weights")
    before = everything(finished) | everything(weights)
    again = ["--config", str(shared / "c.yaml"), "--seed", "5"]
    elsewhere = ["--resume", str(shared / "whole" / "checkpoints" / "000016")]
    for folder, more in itertools.product((finished, weights), ([], elsewhere, ["--iterations", "99"])):
        error = error_of(*again, "--run_dir", str(folder), *more)
        assert re.search(
            r"holds a finished run(, of 2\S+)?, and its metrics, .* over: choose another run_dir", error
        ), error
    assert "no checkpoint to continue from" in error_of(*again, "--run_dir", str(weights), "--resume", "auto")
    with pytest.raises(RunFolderError, match="holds a finished run"):
        torch_train(load_config(str(shared / "c.yaml"), ["--run_dir", str(finished)]), Options())
    assert everything(finished) | everything(weights) == before
    checkpoints = Checkpoints(finished / "checkpoints", load_config(str(shared / "c.yaml")).checkpoint)
    assert find_origin(None, True, finished, checkpoints, print) is None, "unless it is to begin again"


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
        ConfigError,
        match=r"expected a Hugging Face folder.*or give a .gguf file, a finished run's folder or a checkpoint \(runs/NAME/",
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
