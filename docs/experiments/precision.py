"""How far a run's sampling is from its scoring at learning rate 0, by the dtype it computes in: docs/rollout.md's table.

    python docs/experiments/precision.py --out docs/results/rollout/precision.json

SmolLM2-135M-Instruct answers 16 questions of configs/arithmetic eight times at temperature 1, and the same weights score the
answers as an update does. A token is out of band where exp(scored - sampled) is beyond the clip's bounds. Not part of the package.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from jax_grpo.config import load_config
from jax_grpo.trainer import Trainer

ITERATIONS = 2
SETTINGS = {
    "--prompts.per_iteration": "8",
    "--rollout.max_new_tokens": "48",
    "--rollout.temperature": "1.0",
    "--update.learning_rate": "1e-30",  # changes no weight; 0 is refused, since a run would do nothing
}


def gaps(dtype: str) -> dict[str, float]:
    """Of all sampled tokens: their number, the share out of band, and |scored - sampled| in nats."""
    words = [word for pair in SETTINGS.items() for word in pair]
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            "configs/arithmetic.yaml", [*words, "--model.compute_dtype", dtype, "--run_dir", f"{folder}/run"]
        )
    trainer, actual = Trainer(config), []
    for iteration in range(ITERATIONS):
        _, _, batch = trainer.iterate(iteration)
        scored_BS, _ = trainer.score(trainer.weights, batch)
        actual.append((np.asarray(scored_BS) - np.asarray(batch.sampling_logp_BS))[np.asarray(batch.mask_BS) == 1])
    gap_N = np.concatenate(actual)
    ratio_N, objective = np.exp(gap_N), config.objective
    outside_N = (ratio_N < 1 - objective.epsilon_low) | (ratio_N > 1 + objective.epsilon_high)
    return {
        "tokens": gap_N.size,
        "out_of_band": float(outside_N.mean()),
        "mean": float(np.abs(gap_N).mean()),
        "largest": float(np.abs(gap_N).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record = {}
    for dtype in ("float32", "bfloat16"):
        record[dtype] = gaps(dtype)
        print(dtype, record[dtype], flush=True)
        arguments.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
