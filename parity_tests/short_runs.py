"""Short real runs, in processes of their own where asked, and the comparison of two of them bit for bit."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE_S

from jax_grpo.chess.positions.sources import selfplay_positions
from jax_grpo.config import Config
from jax_grpo.model.weights import load_hf
from jax_grpo.report.records import read_records
from jax_grpo.run import files
from jax_grpo.run.checkpoints import load
from jax_grpo.train import train
from jax_grpo.trainer import Trainer

TRAIN = [sys.executable, "-m", "jax_grpo.train"]
ITERATIONS = 16
TIMES = ("time/", "memory/", "tokens_per_second", "flops_per_second/", "mfu/", "compile/")
CONFIG = """
iterations: 16
run_dir: unused
model: {tokenizer: chess, num_layers: 1, num_heads: 2, hidden_size: 16, max_position_embeddings: 208}
task: {name: policy, prompt_style: best_move}
prompts: {source: positions.jsonl, split: all, per_iteration: 4, max_prompt_tokens: 80} # 40: iteration 10 begins another epoch
rollout: {group_size: 4, max_new_tokens: 4}
kl: {beta: 0.1, adaptive: true, target: 0.01}
update: {epochs: 2, learning_rate: 1.0e-2, schedule: cosine, warmup_steps: 2}
logging: {samples_every: 0, tensorboard: false}
checkpoint: {every: 3}
record_batches: 16
"""
ENVIRONMENT = ["--task", "{name: environment}", "--prompts.max_prompt_tokens", "176", "--rollout.max_new_tokens", "6"]
MIXTURE = "{policy: {max_new_tokens: 4}, environment: {share: 2}}"
MIXED = [*ENVIRONMENT, "--task", f"{{name: mixed, prompt_style: best_move, mixture: {MIXTURE}}}"]
GUESS = ["--task", "{name: guess, episode: {turns: 3}}", "--rollout.max_new_tokens", "2"]
OBSERVED = "{turns: 2, max_observation_tokens: 76}"
# Random weights play no legal move, are paid nothing and learn nothing: games begin with a model that knows some.
PLAYER = ["--model", "{weights: packaged:rook-small, tokenizer: chess}"]
GENTLER = ["--update.learning_rate", "3e-4", "--prompts.per_iteration", "2"]
GAME = [*PLAYER, *GENTLER, "--task.name", "game", "--task.opponent", "capture", "--task.episode", OBSERVED]
# Episodes in float64, for random weights and for a model that knows some chess and is its own opponent.
EPISODES = {
    "guess": [*("--task", "{name: guess, episode: {turns: 3}}"), "--rollout.max_new_tokens", "2"],
    "game": [
        *("--model", "{weights: packaged:rook-small, tokenizer: chess, param_dtype: float64, compute_dtype: float64}"),
        *(
            "--task",
            "{name: game, prompt_style: best_move, opponent: self, episode: {turns: 2, max_observation_tokens: 76}}",
        ),
        *("--rollout.max_new_tokens", "4", "--update.learning_rate", "3e-4"),
    ],
}
TASKS = {"policy": [], "environment": ENVIRONMENT, "mixed": MIXED, "guess": GUESS, "game": GAME}


def write_inputs(folder: Path) -> None:
    rows = [
        json.dumps({"fen": p.fen, "moves": p.moves, "evaluations": p.evaluations})
        for p in selfplay_positions(2, 0)[:40]
    ]
    (folder / "positions.jsonl").write_text("\n".join(rows))
    (folder / "c.yaml").write_text(CONFIG.replace("positions.jsonl", str(folder / "positions.jsonl")))


def letters(folder: Path, **changes) -> Config:
    """The toy of lengths, in float32: 4 prompts x 4 completions of up to 6 letters, 2 epochs, saved behind every iteration."""
    if not (file := folder / "positions.jsonl").exists():
        file.write_text("\n".join(json.dumps({"fen": position.fen}) for position in selfplay_positions(2, 0)[:20]))
    base: dict = {
        "iterations": 4,
        "run_dir": str(folder / "run"),
        "model": {
            "tokenizer": "chess", "num_layers": 1, "num_heads": 2, "hidden_size": 16, "max_position_embeddings": 96,
        },
        "task": {"name": "length", "length_cap": 6},
        "prompts": {"source": str(file), "split": "all", "per_iteration": 4, "max_prompt_tokens": 80},
        "rollout": {"group_size": 4, "max_new_tokens": 6},
        "update": {"epochs": 2, "learning_rate": 1e-2},
        "logging": {"samples_every": 0, "tensorboard": False},
        "checkpoint": {"every": 1},
    }  # fmt: skip
    for name, value in changes.items():
        base[name] = base.get(name, {}) | value if isinstance(value, dict) else value
    return Config.model_validate(base)


def start(folder: Path, run: str, *arguments: str, cache: bool = True) -> subprocess.Popen:
    """The command line in a process of its own, on the tests' device; compiled programs are shared by the whole session."""
    write_inputs(folder)
    environment = os.environ | {
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        if cache
        else "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    command = [*TRAIN, "--config", str(folder / "c.yaml"), "--run_dir", str(folder / run), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, **pipes, text=True, env=environment)


def finish(process: subprocess.Popen) -> str:
    output = process.communicate(timeout=PATIENCE_S)[0]
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


def lines_without_times(run: Path) -> list[dict]:
    """What the metrics file says that does not depend on the machine's mood."""
    return [
        {name: value for name, value in record.items() if not name.startswith(TIMES)}
        for record in read_records(run / "metrics.jsonl")
    ]


def cut_and_whole(settings: Callable[[str], Config], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folders of a run that died in its third iteration and was continued, and of one that did not; in this process.

    `settings` is the config of a run of this name: the two must not share a folder.
    """
    real = Trainer.iterate

    def dies(self, iteration, *others):
        if iteration == 2:
            raise InterruptedError("as if killed")
        return real(self, iteration, *others)

    whole = train(settings("whole"))
    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr(Trainer, "iterate", dies)
        train(settings("cut"))
    return train(settings("cut"), resume="auto"), whole


def require_same_run(
    run: Path, reference: Path, batches: int = ITERATIONS, iterations: int = ITERATIONS
) -> dict[str, int]:
    """Parameters, moments, beta, counters, prompts, rollouts and metrics of two runs are equal bit for bit; what was compared."""
    last = files.folder_name(iterations)
    state, expected = (load(path / "checkpoints" / last).content for path in (run, reference))
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
    records = [lines_without_times(path) for path in (run, reference)]
    assert records[0] == records[1] and len(records[0]) == iterations
    for iteration in range(batches):
        arrays_of = [dict(np.load(path / "batches" / f"{iteration:06d}.npz")) for path in (run, reference)]
        for name in arrays_of[1]:
            assert np.array_equal(arrays_of[0][name], arrays_of[1][name]), (iteration, name)
    beta = [record["beta"] for record in records[0]]
    assert len(set(beta)) > 3, "the coefficient adapts, so that a state without it would show"
    assert max(record["grad_norm"] for record in records[0]) > 0.1
    return {"files": len(arrays), "metrics_records": len(records[0]), "batches": batches}
