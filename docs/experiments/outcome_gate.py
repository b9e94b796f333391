"""What a length penalty does in groups in which nobody is right: docs/reasoning.md's figure of `rollout.refill.by`.

    python docs/experiments/outcome_gate.py --out docs/results/outcome_gate

The task: the packaged model of words writes a sentence about a topic, which is right where it has the row's word and an `and`; each
character costs a little. At the start one text in sixty is right, so that most groups differ by their lengths alone, and an `and`
makes a sentence longer. Not part of the package.
"""

import argparse
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import jax_grpo
from jax_grpo.train import train

TOPICS = ("cat", "garden", "river", "house", "book", "winter", "road", "bridge")
WORDS = ("soft", "green", "cold", "loud", "old", "white", "dark", "warm")
LONGEST = 50  # characters
WAYS = {
    "no refill": None,
    "refill": {"rounds": 8},
    "refill by what is right": {"rounds": 8, "by": "right"},
}
SEEDS = range(3)


def right(completions, word, log_metric, **columns):
    """1 where a text has the row's word, and an `and`."""
    texts = [text.lower().rstrip(".?").split() for text in completions]
    values = [float(wanted in words and "and" in words) for wanted, words in zip(word, texts, strict=True)]
    log_metric("right", np.mean(values))
    return values


def length(completions, log_metric, **columns):
    """The share of the most characters that a text has."""
    values = [min(len(text) / LONGEST, 1.0) for text in completions]
    log_metric("length", np.mean(values))
    return values


def settings(folder: Path, way: str, seed: int, iterations: int, beta: float) -> dict:
    return {
        "iterations": iterations,
        "run_dir": str(folder / f"{way} {seed}"),
        "seed": seed,
        "model": {"weights": "packaged:words-small"},
        "task": {"name": "prompts", "reward_weights": [1.0, -0.5]},
        "prompts": {"source": str(folder / "prompts.jsonl"), "split": "all", "per_iteration": 8},
        "rollout": {"group_size": 8, "max_new_tokens": 24, "refill": WAYS[way]},
        "kl": {"beta": beta},
        "update": {"learning_rate": 3.0e-4},
        "checkpoint": {"every": 0},
        "logging": {"samples_every": 0, "tensorboard": False},
    }


def curves(folder: Path, way: str, seed: int, iterations: int, beta: float) -> dict[str, list[float]]:
    """Of a run: by iteration the share of right texts and the mean length of everything that was drawn."""
    run = train(settings(folder, way, seed, iterations, beta), rewards=[right, length], restart=True)
    records = [record for record in jax_grpo.read_records(run / "metrics.jsonl") if "loss" in record]
    names = {"right": "log/right", "length": "log/length"}
    return {name: [record[metric] for record in records] for name, metric in names.items()}


def draw(found: dict[str, list[dict[str, list[float]]]], file: Path) -> None:
    """One line a way: the mean of its seeds, shaded from the lowest to the highest."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    titles = {"right": "texts that are right, %", "length": "characters of a text"}
    for axis, (name, factor) in zip(axes, {"right": 100, "length": LONGEST}.items(), strict=True):
        for way, runs in found.items():
            values = factor * np.array([smoothed(run[name]) for run in runs])
            (line,) = axis.plot(values.mean(0), label=way)
            axis.fill_between(
                range(values.shape[1]), values.min(0), values.max(0), color=line.get_color(), alpha=0.2, lw=0
            )
        axis.set(title=titles[name], xlabel="iteration")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(file, dpi=110)


def smoothed(values: list[float], width: int = 5) -> np.ndarray:
    """Means of so many iterations."""
    return np.convolve(values, np.ones(width) / width, mode="valid")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--beta", type=float, default=0.0, help="of the KL term")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"prompt": f"Write about a {topic}.\n", "word": word} for topic in TOPICS for word in WORDS]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        how = (arguments.iterations, arguments.beta)
        found = {way: [curves(folder, way, seed, *how) for seed in SEEDS] for way in WAYS}
    (arguments.out / "curves.json").write_text(json.dumps(found) + "\n")
    draw(found, arguments.out / "outcome_gate.png")
    for way, runs in found.items():
        ends = {name: [np.mean(run[name][-10:]) for run in runs] for name in ("right", "length")}
        print(f"{way}: right {np.round(ends['right'], 2)}, length {np.round(LONGEST * np.array(ends['length']), 1)}")


if __name__ == "__main__":
    main()
