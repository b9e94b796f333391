"""Exactly one optimiser step on a recorded batch: the door through which other implementations are compared.

    python -m jax_grpo.replay --config C.yaml --weights HF_DIR --batch B.npz --out O.npz

Batch arrays, all [B, T] and aligned to token positions (`x[:, t]` belongs to `input_ids[:, t]` given what stands before it,
position 0 unused): input_ids, attention_mask, completion_mask, and optionally old_logp, ref_logp, entropy (of the old policy;
each else computed with the given weights), sampling_logp; per row `advantages` [B], or `rewards` [B] with the `group_ids` [B] of
groups of one size, and optionally `stopped` [B]; and `vocabulary`, how many columns the softmax has (else as many as the weights
have rows). Output: every metric, logp, advantages, grad/<HF name> before clipping, param/<HF name> after the step.
"""

import argparse
import dataclasses
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_grpo.advantages import group_advantages
from jax_grpo.batch import CACHED, Batch, CannotCut, FlatTokens
from jax_grpo.config import ConfigError, load_config
from jax_grpo.config.learning import AdvantageConfig, Learning
from jax_grpo.mesh import require_one_device
from jax_grpo.model.weights import WeightsError, to_hf
from jax_grpo.policy.adapters import divided
from jax_grpo.policy.named import Model, Policy, load_model
from jax_grpo.run.files import CheckpointError
from jax_grpo.update import init_state, make_score, make_step

TOKEN_ARRAYS = ("input_ids", "attention_mask", "completion_mask")
ROW_ARRAYS = ("rewards", "advantages", "group_ids", "stopped")


class BatchError(ValueError):
    """A recorded batch file cannot be used; the message names the file, the array and what was expected."""


def read_batch(path: str | Path) -> dict[str, np.ndarray]:
    """Arrays of a recorded batch, checked for names and shapes.

    Raises:
        BatchError: unreadable file, missing or misshapen array, or neither rewards with group_ids nor advantages.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise BatchError(f"{path}: not a readable .npz batch ({error})") from error
    for name in TOKEN_ARRAYS:
        if name not in arrays:
            raise BatchError(f"{path}: array {name!r} is missing; expected [B, T], found {sorted(arrays)}")
    shape = arrays["input_ids"].shape
    if len(shape) != 2:
        raise BatchError(f"{path}: input_ids has shape {shape}; expected [B, T]")
    for names, expected in (((*TOKEN_ARRAYS, *CACHED), shape), (ROW_ARRAYS, shape[:1])):
        for name in names:
            if name in arrays and arrays[name].shape != expected:
                raise BatchError(
                    f"{path}: {name} has shape {arrays[name].shape}; expected {expected} to match input_ids"
                )
    if "advantages" not in arrays and not {"rewards", "group_ids"} <= set(arrays):
        raise BatchError(f"{path}: needs advantages [B], or rewards [B] with group_ids [B]; found {sorted(arrays)}")
    return arrays


def require_known_ids(path: str | Path, arrays: dict[str, np.ndarray], vocab_size: int) -> None:
    """Refuses (BatchError) token ids that the model has no embedding of: JAX would take the nearest row, and say nothing."""
    low, high = (int(bound(arrays["input_ids"], initial=0)) for bound in (np.min, np.max))
    if low < 0 or high >= vocab_size:
        raise BatchError(
            f"{path}: input_ids are {low} to {high}; expected 0 to {vocab_size - 1}, the model's vocabulary"
        )


def batch_from(arrays: dict[str, np.ndarray], learning: Learning) -> Batch:
    """The recorded arrays as a flat batch; log-probabilities and advantages in the compute dtype, at least float32.

    Raises:
        BatchError: an array is missing without which a setting would do nothing, or groups are not of one size.
    """
    dtype = jnp.promote_types(jnp.dtype(learning.compute_dtype), jnp.float32)
    components = learning.advantage.components
    for setting, wanted, name in (
        ("objective.mask_truncated", learning.objective.mask_truncated, "stopped"),
        ("objective.mismatch_cap", learning.objective.mismatch_cap is not None, "sampling_logp"),
        (f"advantage.components {components}", components != "sum_first", "advantages"),
    ):
        if wanted and name not in arrays:
            raise BatchError(f"{setting} needs the batch's array {name!r}; found {sorted(arrays)}")

    def optional(name: str) -> jax.Array | None:
        return jnp.asarray(arrays[name], dtype) if name in arrays else None

    input_ids_BT, attention_mask_BT, mask_BT = (jnp.asarray(arrays[name], jnp.int32) for name in TOKEN_ARRAYS)
    mask_BT = mask_BT.at[:, 0].set(0)
    # Advantages win over rewards: a recorded file holds both, and the recorded advantages are what was trained on.
    advantages_B = optional("advantages")
    if advantages_B is None:
        if learning.advantage.scale == "maxrl" and (arrays["rewards"] < 0).any():
            raise BatchError(f"rewards go down to {arrays['rewards'].min():g}; advantage.scale maxrl needs at least 0")
        advantages_B = _advantages(
            arrays, jnp.asarray(arrays["rewards"], dtype), jnp.sum(mask_BT, axis=-1), learning.advantage
        )
    return Batch(
        tokens=FlatTokens(input_ids_BT, attention_mask_BT),
        mask_BS=mask_BT,
        advantages_B=advantages_B,
        stopped_B=jnp.asarray(arrays.get("stopped", np.ones(advantages_B.shape, bool))),
        old_logp_BS=optional("old_logp"),
        ref_logp_BS=optional("ref_logp") if learning.kl.beta > 0 else None,
        sampling_logp_BS=optional("sampling_logp"),
        entropy_BS=optional("entropy") if learning.objective.entropy_quantile > 0 else None,
    )


def _advantages(
    arrays: dict[str, np.ndarray], rewards_B: jax.Array, lengths_B: jax.Array, settings: AdvantageConfig
) -> jax.Array:
    """Advantages [B] of the recorded rewards, whose groups may stand in any order."""
    _, sizes = np.unique(arrays["group_ids"], return_counts=True)
    if len(set(sizes)) > 1:
        raise BatchError(
            f"group_ids: groups have {sizes.min()} to {sizes.max()} rows; expected as many in each, or the array 'advantages'"
        )
    rows_PG = np.argsort(arrays["group_ids"], kind="stable").reshape(len(sizes), -1)
    advantages_PG, _ = group_advantages(rewards_B[rows_PG], settings, lengths_B[rows_PG])
    return jnp.zeros_like(rewards_B).at[rows_PG].set(advantages_PG)


def completed(batch: Batch, policy: Model | Policy, learning: Learning) -> Batch:
    """The batch with the log-probabilities and entropies that the config needs and the file lacks, by the given weights."""
    needed = {
        "old_logp_BS": True,
        "ref_logp_BS": learning.kl.beta > 0,
        "entropy_BS": learning.objective.entropy_quantile > 0,
    }
    missing = [name for name, wanted in needed.items() if wanted and getattr(batch, name) is None]
    if not missing:
        return batch
    logp_BS, entropy_BS = make_score(policy.graphdef, learning)(policy.params, batch)
    return dataclasses.replace(batch, **{name: entropy_BS if name == "entropy_BS" else logp_BS for name in missing})


def replay(learning: Learning, policy: Model | Policy, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One optimiser step on the arrays, in the layout of a recorded batch; see the module's docstring."""
    model = nnx.merge(policy.graphdef, policy.params)
    # The softmax is the one that the batch's log-probabilities are of, whatever tokenizer there is.
    model.vocabulary = int(arrays.get("vocabulary", policy.architecture.vocab_size))
    policy = policy._replace(graphdef=nnx.split(model, nnx.Param)[0])
    batch = completed(batch_from(arrays, learning), policy, learning)
    step = jax.jit(make_step(policy.graphdef, learning))
    trained, base = divided(policy.params)
    state, metrics, logp_BS, grads = step(init_state(trained, learning), batch, base)
    out = {name: np.asarray(value) for name, value in metrics.items()}
    out |= {"logp": np.asarray(logp_BS), "advantages": np.asarray(batch.advantages_B)}
    out |= {f"grad/{name}": value for name, value in to_hf(grads, policy.architecture).items()}
    return out | {f"param/{name}": value for name, value in to_hf(state.params, policy.architecture).items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--weights", required=True, help="packaged:NAME, run folder, Hugging Face folder, checkpoint")
    parser.add_argument("--batch", required=True, help="recorded .npz")
    parser.add_argument("--out", required=True, help=".npz to write")
    widths = ["float64", "float32", "bfloat16"]
    parser.add_argument("--dtype", choices=widths, help="compute dtype; float64 also stores in it")
    args, overrides = parser.parse_known_args(argv)
    try:
        if args.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
            overrides += ["--model.param_dtype", "float64"]
        if args.dtype:
            overrides += ["--model.compute_dtype", args.dtype]
        config = load_config(args.config, [*overrides, "--model.weights", args.weights])
        require_one_device(config.mesh, "a replay")
        arrays = read_batch(args.batch)
        with jax.default_matmul_precision("highest"):
            model = load_model(config.model, config.seed, arrays["input_ids"].shape[1])
            require_known_ids(args.batch, arrays, model.architecture.vocab_size)
            out = replay(config.learning(), model, arrays)
        np.savez(args.out, allow_pickle=False, **out)
    except (BatchError, CannotCut, CheckpointError, ConfigError, WeightsError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(f"{args.out}: loss {float(out['loss']):.6g}, grad_norm {float(out['grad_norm']):.6g}")


if __name__ == "__main__":
    main()
