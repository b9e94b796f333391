"""A checkpoint is ranked by the evaluation of its own weights or not at all, whatever stops the run in between: real signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from conftest import config
from short_runs import TIMES

from jax_grpo.config.loading import ConfigError
from jax_grpo.config.sections import CheckpointConfig
from jax_grpo.policy.named import load_checkpoint
from jax_grpo.prompts.dataset import heldout_rows
from jax_grpo.report.log import MetricsLog
from jax_grpo.report.records import read_records
from jax_grpo.run import files
from jax_grpo.run.checkpoints import Checkpoints, load
from jax_grpo.run.files import CheckpointError
from jax_grpo.train import make_evaluator, train
from jax_grpo.trainer import Trainer

METRIC = "eval/sampled/length"  # changes with every evaluation; the greedy one jumps from 0 to 1
LAST = 9


def settings(folder: Path, **checkpoint):
    """Nine iterations, evaluated after every second and after the last, saved after every fourth and at the end."""
    return config(
        run_dir=str(folder),
        seed=6,  # the length at 8 is above that at 9
        iterations=LAST,
        model={"tokenizer": "chess", "num_layers": 1, "hidden_size": 16, "max_position_embeddings": 128},
        task={"name": "length"},
        prompts={"source": "selfplay:6", "max_prompt_tokens": 80},
        update={"learning_rate": 5e-2},
        evaluation={"positions": 32, "every": 2},
        logging={"samples_every": 0, "tensorboard": False, "progress": False},
        checkpoint={"every": 4, "keep_last": 9, "best_metric": METRIC} | checkpoint,
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Path]:
    """A folder with an undisturbed run, `whole`; compiled programs are shared by every run in it, those of other processes too."""
    folder = tmp_path_factory.mktemp("best")
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    train(settings(folder / "whole"))
    yield folder
    jax.config.update("jax_compilation_cache_dir", None)


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    """What the run measured of held-out prompts, by iteration."""
    rows = [row for row in read_records(run / "metrics.jsonl") if METRIC in row]
    assert len({row["iteration"] for row in rows}) == len(rows), "none is doubled"
    return {row["iteration"]: {k: v for k, v in row.items() if k.startswith("eval/")} for row in rows}


def metrics(run: Path) -> list[dict]:
    """Every record in its order, without times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def scores(run: Path) -> dict[int, float | None]:
    """The checkpoints that are there, with the score that ranks each."""
    actual = files.complete(run / "checkpoints")
    return {int(path.name): files.read_manifest(path)["metrics"].get(METRIC) for path in actual}


@pytest.mark.slow
def test_every_checkpoint_holds_the_evaluation_of_its_own_weights(shared):
    run = shared / "whole"
    logged = evaluations(run)
    assert list(logged) == [0, 2, 4, 6, 8, 9]
    trainer = Trainer(settings(shared / "unused"))
    evaluator = make_evaluator(trainer, heldout_rows(trainer.config, trainer.positions, trainer.task.read))
    assert evaluator is not None
    for iteration in (4, 8, 9):
        path = run / "checkpoints" / files.folder_name(iteration)
        own = evaluator(load_checkpoint(path, "float32")[1]).metrics
        saved = load(path).content["metrics"]
        print(iteration, {name: saved.get(name) for name in own})
        assert {name: saved.get(name) for name in own} == own == logged[iteration]
    for before, iteration in ((2, 4), (6, 8), (8, 9)):
        assert logged[before] != logged[iteration], "the evaluation before it would show"


def stopping(monkeypatch, iteration: int) -> None:
    """SIGTERM to this process while it trains on the rollout of that iteration."""
    written = MetricsLog.write

    def write(log, record) -> None:
        written(log, record)
        if record["iteration"] == iteration and "loss" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsLog, "write", write)


@pytest.mark.slow  # three runs
def test_what_a_signal_saves_is_never_ranked_by_an_older_evaluation(shared, monkeypatch):
    """Signals before 5, which is not evaluated, before 8, which is evaluated and saved, and before the last."""
    run, expected, origin = shared / "stopped", evaluations(shared / "whole"), None
    for done in (5, 8, LAST):
        with monkeypatch.context() as patch:
            stopping(patch, done - 1)
            train(settings(run), resume=origin)
        origin = "auto"
        if done < LAST:
            assert max(scores(run)) == done and scores(run)[done] is None, "saved at once, before any evaluation"
    assert metrics(run) == metrics(shared / "whole")
    assert scores(run) == {it: expected.get(it, {}).get(METRIC) for it in (4, 5, 8, LAST)}


KILLED = """
import os, signal, sys, time
from pathlib import Path
from jax_grpo.config import load_config
from jax_grpo.report.log import MetricsLog
from jax_grpo.train import train

written = MetricsLog.write

def write(log, record):
    written(log, record)
    if record["iteration"] == int(sys.argv[2]) and "loss" not in record:
        while not (Path(sys.argv[3]) / "manifest.json").exists():  # the save before is written in the background
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

MetricsLog.write = write
train(load_config(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("done", "before"), [(8, 4), (LAST, 8)])
def test_a_kill_between_evaluation_and_save_loses_and_doubles_no_evaluation(shared, done, before):
    run, file = shared / f"killed_after_{done}", shared / f"killed_{done}.yaml"
    file.write_text(settings(run).resolved_yaml())
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(shared / "compiled")}
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(file), str(done), str(run / "checkpoints" / files.folder_name(before))],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr[-2000:]
    assert max(evaluations(run)) == done and max(scores(run)) == before, "evaluated, and not yet saved"
    train(settings(run), resume="auto")
    assert metrics(run) == metrics(shared / "whole") and scores(run) == scores(shared / "whole")


@pytest.mark.slow
def test_an_evaluation_of_the_end_is_not_in_the_way_of_a_longer_run(shared):
    run = shared / "longer"
    shorter = settings(run).model_copy(update={"iterations": 7})
    train(shorter)
    assert list(evaluations(run)) == [0, 2, 4, 6, 7] and scores(run)[7] == evaluations(run)[7][METRIC]
    train(settings(run).model_copy(update={"iterations": LAST}), resume="auto")
    assert metrics(run) == metrics(shared / "whole")


@pytest.mark.slow  # another run
def test_a_checkpoint_of_an_earlier_version_is_not_ranked_by_the_evaluation_before_it(shared):
    """Those hold the newest evaluation there was when they were saved, and no word on what the run measures."""
    run = shared / "earlier"
    shutil.copytree(shared / "whole", run)
    for path, score in zip(files.complete(run / "checkpoints"), (1e6, 2e6, 3e6), strict=True):
        content = files.read_manifest(path)
        del content["measured"]
        files.write_manifest(path, content | {"metrics": content["metrics"] | {METRIC: score}})
    for path in files.complete(run / "checkpoints")[2:]:
        files.discard(path)
    (run / "run.json").unlink()
    train(settings(run, keep_last=1), resume="auto")
    expected = evaluations(run)
    assert metrics(run) == metrics(shared / "whole")
    # 4 had a score of 10^6 and 8 of 2 * 10^6, of other weights; 8 is evaluated anew when the run continues from it
    assert scores(run) == {it: expected[it][METRIC] for it in (8, LAST)}


@pytest.mark.slow
def test_a_metric_that_no_evaluation_has_is_refused_before_training(shared):
    run = shared / "misspelt"
    with pytest.raises(CheckpointError, match=r"best_metric is 'eval/sampled/lenght', which this run does not measure"):
        train(settings(run, best_metric="eval/sampled/lenght"))
    assert [row["iteration"] for row in read_records(run / "metrics.jsonl")] == [0], "no iteration was paid for"


@pytest.mark.parametrize(
    ("evaluation", "checkpoint", "message"),
    [
        ({"positions": 0}, {}, r"best_metric 'eval/sampled/length' needs evaluation\.positions of at least 1; it is 0"),
        ({"every": 0}, {}, r"best_metric 'eval/sampled/length' needs evaluation\.every of at least 1; it is 0"),
        ({"every": 3}, {}, r"checkpoint\.every 4 must be a multiple of evaluation\.every 3"),
        ({"every": 8}, {}, r"checkpoint\.every 4 must be a multiple of evaluation\.every 8"),
    ],
)  # fmt: skip
def test_settings_under_which_a_checkpoint_could_not_be_ranked_are_refused(tmp_path, evaluation, checkpoint, message):
    values = settings(tmp_path, **checkpoint).model_dump()
    changed = values | {"evaluation": values["evaluation"] | evaluation}
    with pytest.raises((ConfigError, ValueError), match=message):
        config(**changed)
    config(**changed | {"checkpoint": values["checkpoint"] | {"keep_best": 0}})  # nothing is ranked
    config(**changed | {"checkpoint": values["checkpoint"] | {"best_metric": "reward/mean"}})


def test_a_checkpoint_without_the_metric_is_neither_best_nor_in_its_place(tmp_path):
    state = {"beta": jax.numpy.float32(0.1)}
    with Checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=1, best_metric="eval/x")) as checkpoints:
        checkpoints.save(1, state, {}, {"eval/x": 5.0})
        checkpoints.save(2, state, {}, {"loss": 1.0}, measured={"eval/x"})
        checkpoints.save(3, state, {}, {"loss": 1.0}, measured={"eval/x"})
        checkpoints.wait()
        assert [path.name for path in files.complete(tmp_path)] == ["000001", "000003"]
        checkpoints.add_metrics(3, {"eval/x": 7.0})
        assert [path.name for path in files.complete(tmp_path)] == ["000003"]
    load(tmp_path / "000003")
