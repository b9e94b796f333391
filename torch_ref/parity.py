"""`python -m torch_ref.parity --config C --out DIR`: the parity contract measured on a real run's batches.

Trains with `jax_grpo` for some iterations, recording what it trained on; replays it with both implementations at three
precisions; then lets both trainers take iterations of several epochs, minibatches and micro-batches on the same rollouts;
writes results.json, README.md and pictures. Exit status 1 if anything is outside its tolerance.
"""

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_grpo.batch import record
from jax_grpo.config import Config, ConfigError, check_files, load_config, require_all_trained
from jax_grpo.config.learning import Learning
from jax_grpo.config.model import ModelConfig
from jax_grpo.model.weights import save_hf, to_hf
from jax_grpo.policy.named import Model, Policy, load_policy
from jax_grpo.replay import batch_from
from jax_grpo.replay import replay as jax_replay
from jax_grpo.trainer import Trainer
from jax_grpo.update import init_state, make_update
from torch_ref import parity_report
from torch_ref import train as torch_train
from torch_ref.batch import from_arrays
from torch_ref.compare import (
    CANCELLING,
    TOLERANCES,
    difference,
    finite,
    floor_of,
    logp_error,
    observable,
    scalar_errors,
    tensor_errors,
)
from torch_ref.model import LanguageModel
from torch_ref.options import Options
from torch_ref.replay import STORAGE, with_logp
from torch_ref.replay import replay as torch_replay
from torch_ref.update import optimiser_step, precision, start
from torch_ref.weights import load_hf

Arrays = dict[str, np.ndarray]
ADAMW_STEPS = 20
CURVES = ("loss", "kl/mean")
# What a rollout leaves behind; log-probabilities of the old policy and the reference each trainer has to find itself.
ROLLOUT = (
    "input_ids", "attention_mask", "completion_mask", "stopped", "sampling_logp", "rewards", "group_ids",
)  # fmt: skip
SEVERAL_ITERATIONS = 3
# What two programs round differently: in float64 nothing but the last bits of log-probabilities, which have no relative accuracy.
ROUNDING = ("logp_mismatch/mean", "logp_mismatch/max")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A run's batches, what its trainer measured on each, and folders of its weights before and after."""

    batches: list[Arrays]
    metrics: list[dict[str, float]]
    before: Path
    after: Path


def record_run(config: Config, folder: Path) -> Recorded:
    """Trains, one optimiser step an iteration, and leaves the weights in `folder`."""
    trainer, before, after = Trainer(config), folder / "before", folder / "after"
    save_hf(before, trainer.policy.architecture, trainer.state.params, trainer.tokenizer)
    batches, metrics = [], []
    for iteration in range(config.iterations):
        measured, scored, batch = trainer.iterate(iteration)
        batches.append(record(batch, scored.rewards_B, trainer.group_ids(), trainer.tokenizer.vocab_size))
        metrics.append({name: measured[name] for name in (*CURVES, "reward/mean")})
    save_hf(after, trainer.policy.architecture, trainer.state.params, trainer.tokenizer)
    trainer.task.close()
    return Recorded(batches, metrics, before, after)


def at(config: Config, dtype: str, weights: Path) -> Config:
    """The config at another precision, beginning with the given weights."""
    masters = "float64" if dtype == "float64" else "float32"
    model = {"compute_dtype": dtype, "param_dtype": masters, "weights": str(weights)}
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


def both(settings: ModelConfig, seed: int, weights: Path) -> tuple[Policy, LanguageModel]:
    """The same weights in both implementations."""
    policy = load_policy(settings, seed, 1)
    model = load_hf(weights, dtype=STORAGE[settings.compute_dtype], remat=bool(settings.remat))
    model.vocabulary = policy.tokenizer.vocab_size
    return policy, model


def one_step(
    learning: Learning, policy: Policy | Model, model: LanguageModel, arrays: Arrays
) -> tuple[dict[str, Any], Arrays]:
    """Errors of one optimiser step by kind, and the reference's arrays."""
    dtype = learning.compute_dtype
    largest, gap = logits_error(dtype, policy, model, arrays)
    errors: dict[str, Any] = {"logits": gap, "largest_logit": largest}
    tested = jax_replay(learning, policy, arrays)
    batch = from_arrays(arrays, learning, dtype=STORAGE[dtype])
    reference = torch_replay(learning, model, with_logp(batch, model, learning))
    errors["logp"] = logp_error(tested["logp"], reference["logp"], arrays["completion_mask"])
    errors["floors"] = {name: floor_of(name, reference, dtype) for name in CANCELLING}
    errors["scalars"] = scalar_errors(tested, reference, dtype)
    errors["gradients"] = tensor_errors(tested, reference)
    return errors, reference


def logits_error(
    compute_dtype: str, policy: Policy | Model, model: LanguageModel, arrays: Arrays, rows: int = 8
) -> tuple[float, float]:
    """Largest size and largest absolute difference of the first rows' logits, where they predict completion tokens."""
    names = ("input_ids", "attention_mask", "completion_mask")
    ids, mask, completion = (np.array(arrays[name][:rows]) for name in names)
    with torch.no_grad(), precision(compute_dtype, "cpu"):
        expected = model.logits(model(torch.from_numpy(ids).long(), torch.from_numpy(mask).long())).numpy()

    @jax.jit
    def logits(params):
        merged = nnx.merge(policy.graphdef, params)
        hidden = merged(jnp.asarray(ids), jnp.asarray(mask))
        embedding = merged.head_VH[: model.vocabulary].astype(hidden.dtype)
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        return jnp.einsum("bth,vh->btv", hidden, embedding, preferred_element_type=wide)

    tested = np.asarray(logits(policy.params), np.float64)
    used = completion[:, 1:] == 1
    tested, expected = tested[:, :-1][used], expected[:, :-1][used]
    return float(np.abs(expected).max()), difference("logits", tested, expected)


def many_steps(
    learning: Learning, policy: Policy | Model, model: LanguageModel, batches: Sequence[Arrays]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Relative L2 of each parameter's change over the first `ADAMW_STEPS` batches, and both sides' curves over all."""
    begin = to_hf(policy.params, policy.architecture)
    begin = {name: x.copy() for name, x in begin.items()}
    dtype = STORAGE[learning.compute_dtype]
    update, state = make_update(policy.graphdef, learning), init_state(policy.params, learning)
    reference = start(model, learning)
    curves: dict[str, Any] = {side: {name: [] for name in CURVES} for side in ("jax_grpo", "torch_ref")}
    errors: dict[str, float] = {}
    for step, arrays in enumerate(batches, start=1):
        state, ours = update(state, batch_from(arrays, learning))
        theirs = optimiser_step(reference, from_arrays(arrays, learning, dtype=dtype), learning)
        for side, metrics in (("jax_grpo", ours), ("torch_ref", theirs)):
            for name in CURVES:
                curves[side][name].append(float(finite(f"{name}, step {step}", side, metrics.get(name, 0.0))))
        if step == min(ADAMW_STEPS, len(batches)):
            moved = {n: x - begin[n] for n, x in to_hf(state.params, policy.architecture).items()}
            expected = {n: p.detach().numpy() - begin[n] for n, p in model.named_parameters()}
            errors = tensor_errors(observable(moved), observable(expected), "")
    return errors, curves


def several(config: Config, iterations: int = SEVERAL_ITERATIONS) -> Config:
    """The config with 2 epochs, and minibatches, micro-batches and an adaptive beta where it can have them; in float64."""
    values = config.model_dump()
    prompts = config.prompts.per_iteration
    minibatches = next((count for count in range(2, prompts + 1) if prompts % count == 0), 1)
    values["update"] |= {"epochs": 2, "minibatches": minibatches, "micro_batches": 1, "warmup_steps": 0}
    least, most = config.kl.beta_bounds
    values["kl"] |= {"guardrail": "log", "adaptive": least <= config.kl.beta <= most}
    values["model"] |= {"compute_dtype": "float64", "param_dtype": "float64"}
    made = Config.model_validate(values | {"iterations": iterations, "record_batches": 0})
    return made.with_micro_batches(made.possible_micro_batches()[:2][-1])


def whole_iterations(config: Config, folder: Path) -> dict[str, Any]:
    """Both trainers through whole iterations on the rollouts of `jax_grpo`'s: every step of every epoch; call under x64.

    The reference gets tokens, masks and rewards, and finds by itself the old and the reference log-probabilities, the
    advantages, and which rows each optimiser step trains on. The rollouts follow `jax_grpo`'s parameters, so an error grows.
    Adapters have to begin with `model.adapter.weights`, which both read.

    Returns:
        `iterations`: errors of each iteration's metrics, relative, of `ROUNDING` absolute in nats; `change`: relative L2 of each
        parameter's change over all of them; `metrics`: the reference's, by iteration; `config`: what was compared.
    """
    ours = Trainer(config)
    begin = {name: x.copy() for name, x in to_hf(ours.state.params, ours.policy.architecture).items()}
    model = config.model
    if model.adapter is None:
        save_hf(folder, ours.policy.architecture, ours.state.params, ours.tokenizer)
        model = model.model_copy(update={"weights": str(folder)})
    theirs = torch_train.Trainer(config.model_copy(update={"model": model}), Options())
    errors, metrics = [], []
    for iteration in range(config.iterations):
        measured, scored, batch = ours.iterate(iteration)
        arrays = record(batch, scored.rewards_B, ours.group_ids())
        recorded = ROLLOUT if config.advantage.components == "sum_first" else (*ROLLOUT, "advantages")
        shared = from_arrays({name: arrays[name] for name in recorded}, config.learning(), dtype=STORAGE["float64"])
        steps = theirs.optimise(theirs.scored(shared), iteration)
        expected = torch_train.over_steps(steps) | {"optimizer_step": theirs.state.step, "steps": len(steps)}
        tested = {name: np.asarray(x) for name, x in measured.items()}
        reference = {name: np.asarray(x) for name, x in expected.items()}
        gaps = {name: difference(name, tested.pop(name), reference.pop(name)) for name in ROUNDING}
        errors.append(scalar_errors(tested, reference, "float64") | gaps)
        metrics.append(expected)
    moved = {n: x - begin[n] for n, x in to_hf(ours.state.params, ours.policy.architecture).items()}
    trained = ((n, p) for n, p in theirs.state.model.named_parameters() if p.requires_grad)
    expected = {n: p.detach().numpy() - begin[n] for n, p in trained}
    ours.task.close()
    theirs.task.close()
    names = ("epochs", "minibatches", "micro_batches")
    shape = {name: getattr(config.update, name) for name in names} | {"adaptive": config.kl.adaptive}
    change = tensor_errors(observable(moved), observable(expected), "")
    return {"iterations": errors, "change": change, "metrics": metrics, "config": shape}


def sampling_agreement(arrays: Arrays, scored: Arrays) -> dict[str, Any]:
    """How far the rollout's own log-probabilities are from those that each trainer computes for the same tokens."""
    there = arrays["completion_mask"] == 1
    sampled = finite("sampling_logp", "rollout", arrays["sampling_logp"][there])
    gaps = {
        "jax_grpo": np.abs(sampled - finite("logp", "jax_grpo", arrays["old_logp"][there])),
        "torch_ref": np.abs(sampled - finite("logp", "torch_ref", scored["logp"][there])),
    }
    return {
        side: {"mean": float(gap.mean()), "max": float(gap.max()), "all": np.sort(gap).tolist()}
        for side, gap in gaps.items()
    }


def environment(argv: Sequence[str], module: str = "torch_ref.parity", more: Sequence[str] = ()) -> dict[str, Any]:
    """Command, versions (of `more` packages too) and hardware."""
    packages = ("jax", "jaxlib", "flax", "optax", "torch", "numpy", *more)
    return {
        "command": f"python -m {module} " + " ".join(argv),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
        "device": jax.devices()[0].device_kind,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
    }


def measure(config: Config, folder: Path, note: Any) -> dict[str, Any]:
    """Everything of the report but the environment."""
    began = time.perf_counter()
    note(f"recording {config.iterations} iterations of jax_grpo")
    recorded = record_run(config, folder)
    first = recorded.batches[0]
    results: dict[str, Any] = {
        "sequences": int(first["input_ids"].shape[0]),
        "tokens": int(sum(batch["completion_mask"].sum() for batch in recorded.batches)),
        "recorded": recorded.metrics,
        "one_step": {},
        "change": {},
        "curves": {},
    }
    for dtype in TOLERANCES:
        jax.config.update("jax_enable_x64", dtype == "float64")
        settings = at(config, dtype, recorded.before)
        with jax.default_matmul_precision("highest"):
            note(f"{dtype}: one step on the first batch, by the run's first weights (on policy) and last (off policy)")
            on_policy, reference = one_step(
                settings.learning(), *both(settings.model, config.seed, recorded.before), first
            )
            after = at(config, dtype, recorded.after)
            off_policy, shifted = one_step(after.learning(), *both(after.model, config.seed, recorded.after), first)
            if dtype == "float32":
                results["sampling"] = sampling_agreement(first, reference)
                results["off_policy"] = {
                    name: float(shifted[name])
                    for name in ("ratio/mean", "clip_fraction/low", "clip_fraction/high", "kl/mean")
                    if name in shifted
                }
            results["one_step"][dtype] = {"on policy": on_policy, "off policy": off_policy}
            batches = recorded.batches[: ADAMW_STEPS if dtype == "float64" else None]
            note(f"{dtype}: {len(batches)} optimiser steps on the same rollouts")
            of_both = both(settings.model, config.seed, recorded.before)
            results["change"][dtype], results["curves"][dtype] = many_steps(settings.learning(), *of_both, batches)
    jax.config.update("jax_enable_x64", True)
    note(f"float64: {SEVERAL_ITERATIONS} iterations of several optimiser steps by both trainers")
    with jax.default_matmul_precision("highest"):
        results["several"] = whole_iterations(several(config), folder / "several")
    jax.config.update("jax_enable_x64", False)
    return results | {"seconds": round(time.perf_counter() - began)}


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m torch_ref.parity",
        description="settings of the config as in jax_grpo.train: --section.key value",
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", required=True, help="folder of the report")
    parser.add_argument("--iterations", type=int, default=50, help="recorded iterations, one optimiser step each")
    arguments, overrides = parser.parse_known_args(argv)
    single = {"update.epochs": 1, "update.minibatches": 1, "evaluation.positions": 0, "update.warmup_steps": 0}
    single |= {"kl.guardrail": "log"}  # the other one may not stand beside one step an iteration
    fixed = [text for name, value in single.items() for text in (f"--{name}", str(value))]
    counts = ["--iterations", str(arguments.iterations), "--record_batches", str(arguments.iterations)]
    try:
        config = load_config(arguments.config, [*fixed, *counts, *overrides])
        check_files(config)
        require_all_trained(config, "this report")
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            results = measure(config, Path(folder), lambda text: print(text, flush=True))
    except (ConfigError, OSError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    results = environment(argv) | {"config": config.model_dump()} | results
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    rows = parity_report.write(results, out)
    print((out / "README.md").read_text())
    sys.exit(0 if all(row.passed for row in rows) else 1)


if __name__ == "__main__":
    main()
