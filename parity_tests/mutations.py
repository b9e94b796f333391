"""Can the tests fail? Breaks one line of `jax_grpo` at a time, in a copy, and records which test notices.

    python parity_tests/mutations.py --out docs/results/parity/mutations.json [NAME ...]

Exit status 1 if a fault stays unseen. Not collected by pytest: it runs pytest.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """One wrong line: in `file`, `right` becomes `wrong`; `tests` are looked at until one is red."""

    file: str
    right: str
    wrong: str
    tests: str


PARITY = (
    "test_parity.py -k 'every_option or (every_combination and dapo and (k2 or k3)) or (every_combination and luspo)'"
)
ONE_STEP = "test_parity.py -k 'every_combination and clip-token-dapo-k3 and float64'"
FAULTS = {
    "baseline over the batch": Fault(
        "advantages.py",
        "return rewards_B - _group_sum(rewards_B, group_ids_B) / size_B",
        "return rewards_B - jnp.mean(rewards_B) + 0 * size_B",
        PARITY,
    ),
    "standard deviation with ddof 0": Fault("advantages.py", "jnp.maximum(size_B - 1, 1))\n\n\ndef _mean", "size_B)\n\n\ndef _mean", PARITY),
    "k2 and k3 swapped": Fault(
        "objective.py",
        '"k2": lambda d: 0.5 * jnp.square(d),\n    "k3": lambda d: jnp.expm1(d) - d,',
        '"k3": lambda d: 0.5 * jnp.square(d),\n    "k2": lambda d: jnp.expm1(d) - d,',
        PARITY,
    ),
    "sign of d": Fault("objective.py", "masked(ref_logp_BS - logp_BS, mask_BS)", "masked(logp_BS - ref_logp_BS, mask_BS)", PARITY),
    "ratio against the reference": Fault(
        "loss.py", "else batch.old_logp_BS\n", "else (batch.old_logp_BS if batch.ref_logp_BS is None else batch.ref_logp_BS)\n", PARITY
    ),
    "mask off by one": Fault("loss.py", "mask_BS = batch.mask_BS.astype(dtype)\n", "mask_BS = jnp.roll(batch.mask_BS, 1, 1).astype(dtype)\n", PARITY),
    "positions count padding": Fault(
        "model.py",
        "return jnp.maximum(jnp.cumsum(attention_mask_BT.astype(jnp.int32), axis=-1) - 1, 0)",
        "return jnp.broadcast_to(jnp.arange(attention_mask_BT.shape[-1]), attention_mask_BT.shape)",
        PARITY,
    ),
    "missing temperature": Fault("lm_head/materialised.py", "logits_BSV / temperature", "logits_BSV", PARITY),
    "sequence ratio is the sum": Fault(
        "objective.py", "mean_B = masked_mean(log_rho_BS, mask_BS, axis=-1)", "mean_B = jnp.sum(log_rho_BS, axis=-1)", PARITY
    ),
    "denominator counts the cap": Fault(
        "objective.py", '"luspo": lambda mask_BS, max_completion: 1 / mask_BS.shape[0],', '"luspo": lambda mask_BS, max_completion: 1 / mask_BS.shape[1],', PARITY
    ),
    "untied embedding gradient": Fault(
        "update.py", "        model.wte.embedding[...],\n", "        jax.lax.stop_gradient(model.wte.embedding[...]),\n", PARITY
    ),
    "embedding's gradient accumulated in bfloat16": Fault(
        "lm_head/materialised.py",
        'to_embedding_VH = jnp.einsum("bsv,bsh->vh", gradient_BSV, hidden_BSH, preferred_element_type=accumulator)',
        'to_embedding_VH = jnp.einsum("bsv,bsh->vh", gradient_BSV, hidden_BSH, preferred_element_type=accumulator).astype(jnp.bfloat16)',
        "test_lm_head.py test_parity.py -k 'definition or every_option'",
    ),
    "micro-batches accumulated in bfloat16": Fault(
        "update.py",
        "jax.tree.map(jnp.add, grads, part_grads)",
        "jax.tree.map(lambda a, b: (a + b).astype(jnp.bfloat16).astype(a.dtype), grads, part_grads)",
        PARITY,
    ),
    "upper clip bound for bad tokens": Fault(
        "objective.py", "1 - config.epsilon_low, 1 + config.epsilon_high)\n    first", "1 - config.epsilon_high, 1 + config.epsilon_low)\n    first", PARITY
    ),
    "cispo differentiates its weight": Fault(
        "objective.py", "weight_BS = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_rho_BS), config.epsilon_high))", "weight_BS = jnp.minimum(jnp.exp(log_rho_BS), config.epsilon_high)", PARITY
    ),
    "weight decay on biases and norms": Fault("optimiser.py", "lambda x: x.ndim >= 2", "lambda x: x.ndim >= 1", "test_parity_steps.py -k float64"),
    "warm-up begins at 0": Fault("optimiser.py", "lr * (t + 1) / max(warmup, 1)", "lr * t / max(warmup, 1)", "test_parity_steps.py -k float64"),
    "entropy bonus is a penalty": Fault("loss.py", "- bonus *", "+ bonus *", PARITY),
    # NaN is on neither side of a tolerance: every comparator has to look for it.
    "NaN in kl/mean": Fault("loss.py", 'out["kl/mean"] = objective.masked_mean(kl_BS, mask_BS)', 'out["kl/mean"] = objective.masked_mean(kl_BS, mask_BS) * jnp.nan', ONE_STEP),
    "NaN in entropy": Fault("loss.py", '"entropy": objective.masked_mean(entropy_BS, mask_BS),', '"entropy": objective.masked_mean(entropy_BS, mask_BS) * jnp.nan,', ONE_STEP),
    "NaN in clip_fraction/low": Fault("loss.py", '"clip_fraction/low": objective.masked_mean(low_BS, mask_BS),', '"clip_fraction/low": objective.masked_mean(low_BS, mask_BS) * jnp.nan,', ONE_STEP),
    "NaN in wpe's gradient of the grouped layout": Fault(
        "model.py", "self._embed(read_PGC, position_PGC))", "self._embed(read_PGC, position_PGC) + 0 * jnp.sqrt(0 * self.wpe(position_PGC)))",
        "test_model.py -k grouped_layout_equals",
    ),
}  # fmt: skip


def first_red(fault: Fault, copy: Path) -> str | None:
    """The first test that fails with the fault in place, or None."""
    file = copy / "jax_grpo" / fault.file
    source = file.read_text()
    if source.count(fault.right) != 1:
        raise SystemExit(f"{fault.file}: {fault.right!r} stands there {source.count(fault.right)} times; expected once")
    file.write_text(source.replace(fault.right, fault.wrong))
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {fault.tests}"
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(
        command, shell=True, cwd=copy / "parity_tests", env=environment, capture_output=True, text=True, check=False
    )
    file.write_text(source)
    red = re.search(r"^(?:FAILED|ERROR) (?:parity_tests/)?(\S+)", done.stdout, re.MULTILINE)
    if red is None and done.returncode not in (0, 1):
        raise SystemExit(f"pytest did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return red[1] if red else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults; all by default", metavar="NAME")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    caught: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        kept_out = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "docs")
        shutil.copytree(ROOT, copy, ignore=kept_out)
        for name in arguments.names or FAULTS:
            caught[name] = first_red(FAULTS[name], copy)
            print(f"{name}: {caught[name] or 'NOT SEEN'}", flush=True)
    records = {
        name: {"file": FAULTS[name].file, "right": FAULTS[name].right, "wrong": FAULTS[name].wrong, "red": red}
        for name, red in caught.items()
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(records, indent=1) + "\n")
    sys.exit(0 if all(caught.values()) else 1)


if __name__ == "__main__":
    main()
