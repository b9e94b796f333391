"""The reference's own training loop, options and replay: it learns, and what it records means the same to both sides."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from both import crafted_batch, settings, show, torch_model, weights
from conftest import PATIENCE_S

import torch_ref.batch
from jax_grpo.config import ConfigError, load_config
from jax_grpo.report.records import read_records
from torch_ref.compare import difference, tensor_errors
from torch_ref.options import Options, computing, prepare
from torch_ref.replay import replay
from torch_ref.train import Trainer, train
from torch_ref.update import NonFiniteUpdates, accumulate, apply, start

ROOT = Path(__file__).resolve().parents[2]
TOY, QUICK = str(ROOT / "configs/length_toy.yaml"), str(ROOT / "configs/legality.yaml")
# What the reference may share with the product: settings, texts, files and the terminal; never arrays.
SHARED = {
    "bench.machine", "bench.runner", "config", "config.files", "config.learning", "config.model", "config.objectives",
    "config.sections", "config.tasks", "model.tokenizer", "prompts.dataset", "report.console", "report.curves", "report.log",
    "report.records", "run.folder", "tasks", "tasks.base", "tasks.checked", "tasks.episodes",
}  # fmt: skip
HARNESS = {"parity.py", "parity_report.py", "parity_families.py"}  # run both sides on purpose


def test_the_reference_imports_no_maths_of_the_product():
    for file in (ROOT / "torch_ref").glob("*.py"):
        if file.name in HARNESS:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.split(".")[0].startswith(("jax", "flax", "optax")) or (
                    name.startswith("jax_grpo.") and name.removeprefix("jax_grpo.") in SHARED
                ), f"{file.name} imports {name}"


@pytest.mark.slow
def test_the_length_toy_climbs(tmp_path):
    config = load_config(TOY, ["--run_dir", str(tmp_path), "--iterations", "40", "--logging.progress", "false"])
    train(config, Options())
    rewards = [record["reward/mean"] for record in read_records(tmp_path / "metrics.jsonl")]
    print(f"mean reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    assert rewards[0] < 0.3 and np.mean(rewards[-5:]) > 0.6
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "weights" / "model.safetensors").exists()


SMALL = ["--prompts.per_iteration", "4", "--rollout.group_size", "4", "--update.warmup_steps", "0", "--iterations", "2"]


@pytest.mark.parametrize(
    "extra",
    [
        ["--update.epochs", "2", "--update.minibatches", "2", "--update.micro_batches", "2", "--kl.adaptive", "true"],
        ["--advantage.components", "normalise_each", "--kl.beta", "0"],
        [
            "--objective.overlong_penalty",
            "{length: 2, weight: 0.5}",
            "--kl.guardrail",
            "end_epoch",
            "--objective.entropy_quantile",
            "0.5",
            "--update.epochs",
            "2",
        ],
    ],
)
def test_an_iteration_of_the_legality_run_takes_the_steps_its_config_says(extra):
    config = load_config(QUICK, [*SMALL, *extra])
    trainer = Trainer(config, Options())
    metrics, samples, batch, rewards_B = trainer.iterate(0)
    assert trainer.state.step == config.update.epochs * config.update.minibatches
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-5) or config.update.epochs > 1
    assert (
        [row["reward"] for row in samples] == list(rewards_B[:12:4])
        and rewards_B.shape == (16,)
        and np.isfinite(metrics["loss"])
    )
    assert float(metrics["logp_mismatch/max"]) < 1e-4
    groups = batch.advantages_B.reshape(4, 4)
    np.testing.assert_allclose(groups.sum(1), 0, atol=1e-4)


def test_a_top_k_that_leaves_no_token_out_is_refused(tmp_path):
    arguments = ["--run_dir", str(tmp_path), "--rollout.top_k"]
    with pytest.raises(
        ConfigError, match=r"rollout.top_k 585 leaves none of the vocabulary's 585 tokens out; expected fewer, or 0"
    ):
        Trainer(load_config(TOY, [*arguments, "585"]), Options())
    Trainer(load_config(TOY, [*arguments, "584"]), Options())


@pytest.mark.slow  # four processes; test_train replays one of ours by default
def test_a_batch_recorded_by_either_side_replays_to_the_same_step_in_both(tmp_path):
    """Real processes on the packaged model: `torch_ref.train` records, both `replay`s read."""

    def run(*arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]

    run(
        "torch_ref.train",
        "--config",
        QUICK,
        *SMALL,
        "--evaluation.positions",
        "0",
        "--record_batches",
        "2",
        "--run_dir",
        str(tmp_path),
    )
    common = ["--config", QUICK, *SMALL, "--weights", "jax_grpo/assets/models/rook-small"]
    common += ["--batch", str(tmp_path / "batches" / "000001.npz")]
    arrays = {}
    for package in ("jax_grpo", "torch_ref"):
        run(f"{package}.replay", *common, "--out", str(tmp_path / f"{package}.npz"), "--dtype", "float64")
        with np.load(tmp_path / f"{package}.npz") as file:
            arrays[package] = {name: file[name] for name in file.files}
    actual, reference = arrays["jax_grpo"], arrays["torch_ref"]
    assert actual.keys() - {"kl/beyond_guardrail"} == reference.keys() - {"kl/beyond_guardrail"}
    show("gradients", tensor_errors(actual, reference), 1e-9)
    # The second iteration's batch against the first one's weights: the ratio is not 1.
    assert abs(float(reference["ratio/mean"]) - 1) > 1e-4
    show("loss", {"loss": difference("loss", actual["loss"], reference["loss"])}, 1e-10)


@pytest.fixture(scope="module")
def step():
    """A function from options to the arrays of one float32 step."""
    of = weights()
    arrays = crafted_batch(of)

    def run(chosen: Options = Options(), adamw: str = "definition", **sections):  # noqa: B008 - frozen
        config = settings("float32", **sections)
        model = torch_model(of, "float32")
        model.remat = config.model.remat
        with computing(chosen):
            model = prepare(model, chosen)
            tensors = torch_ref.batch.from_arrays(arrays, config.learning(), dtype=torch.float32)
            return replay(config.learning(), model, tensors, adamw)

    return run


@pytest.mark.parametrize("adamw", ["foreach", "fused"])
def test_torchs_faster_adamws_take_the_defined_step(step, adamw):
    show(adamw, tensor_errors(step(adamw=adamw), step(), "param/"), 1e-6)  # float32 rounding of one division


@pytest.mark.parametrize("sdpa", ["math", "flash", "efficient"])
def test_every_attention_backend_that_runs_gives_the_same_gradients(step, sdpa):
    try:
        actual = step(Options(sdpa=sdpa))
    except RuntimeError as error:
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            pytest.skip(f"{sdpa} does not run here")
        raise
    show(sdpa, tensor_errors(actual, step()), 1e-5)  # sums in another order


def test_gradient_checkpointing_changes_no_gradient(step):
    show("remat", tensor_errors(step(model={"remat": True}), step()), 1e-6)


@pytest.mark.slow
def test_compilation_changes_only_rounding(step):
    show("compiled", tensor_errors(step(Options(compile=True)), step()), 1e-5)


def test_tf32_is_set_for_the_block_only():
    before = torch.get_float32_matmul_precision()
    with computing(Options(tf32=True, sdpa="math")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_nonfinite_steps_are_skipped_counted_and_end_the_run():
    of = weights()
    config = settings("float32", update={"max_consecutive_nonfinite": 2})
    state = start(torch_model(of, "float32"), config.learning())
    arrays = crafted_batch(of)
    arrays["advantages"] = np.where(np.arange(8) == 3, np.nan, 1.0)
    batch = torch_ref.batch.from_arrays(arrays, config.learning(), dtype=torch.float32)
    metrics = apply(state, accumulate(state.model, batch, config.learning(), state.beta), config.learning())
    assert metrics["nonfinite"] == 1 and state.step == 0
    assert all(np.array_equal(p.detach().numpy(), np.float32(of[n])) for n, p in state.model.named_parameters())
    with pytest.raises(NonFiniteUpdates, match="2 optimiser steps in a row"):
        apply(state, accumulate(state.model, batch, config.learning(), state.beta), config.learning())


REPLAY = ["torch_ref.replay", "--config", QUICK, "--out", "unwritten.npz"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["torch_ref.train", "--config", QUICK, "--liger", "--device", "cpu"], "--liger needs a GPU"),
        (["torch_ref.train", "--config", QUICK, "--kl.betta", "1"], "kl.betta"),
        ([*REPLAY, "--weights", "nowhere", "--batch", "b"], "nowhere"),
        (
            [*REPLAY, "--weights", "jax_grpo/assets/models/rook-small", "--batch", "README.md"],
            "README.md: not a readable .npz",
        ),
    ],
)
def test_bad_input_is_one_line(command, says):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode != 0 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
