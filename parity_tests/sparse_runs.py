"""Runs of which most groups have no signal: the task pays some prompts only, whatever the model writes."""

import json
import zlib
from pathlib import Path

import jax
import numpy as np
from short_runs import TIMES

from jax_grpo.batch import Batch, minibatches
from jax_grpo.chess.positions.sources import selfplay_positions
from jax_grpo.config import Config
from jax_grpo.tasks.base import Logged
from jax_grpo.tasks.toy import LengthTask
from jax_grpo.trainer import Trainer

PROMPTS, GROUP = 4, 4


class Sparse(LengthTask):
    """Pays the length of a completion for one prompt of `one_of`, by a checksum, and nothing for the others."""

    def __init__(self, config, one_of: int = 3):
        super().__init__(config)
        self._one_of, self._lengths = one_of, []

    def pays(self, prompt) -> bool:
        return zlib.crc32(prompt.text.encode()) % self._one_of == 0

    def score(self, prompts, completions):
        scores = super().score(prompts, completions)
        self._lengths = [len(text) for text in completions]
        paid_B = np.array([self.pays(prompt) for prompt in prompts])
        return {name: np.where(paid_B, x_B, np.float32(0)) for name, x_B in scores.items()}

    def logged(self):
        return Logged({"characters": [float(n) for n in self._lengths]}, {"characters": list(self._lengths)})


class Shaped(Sparse):
    """Pays long texts of the paid prompts, and takes a little off every text for its length."""

    def __init__(self, config, one_of: int = 2):
        super().__init__(config, one_of)
        self.component_weights = {"paid/right": 1.0, "short": -0.25}

    def score(self, prompts, completions):
        paid_B = np.array([self.pays(prompt) for prompt in prompts])
        self._lengths = [len(text) for text in completions]
        lengths_B = np.array(self._lengths, np.float32)
        return {"paid/right": ((lengths_B > 4) & paid_B).astype(np.float32), "short": lengths_B / 8}


def sparse_config(refill: dict | None, **sections) -> Config:
    """4 prompts x 4 completions of up to 6 letters."""
    base: dict = {
        "iterations": 3,
        "run_dir": "unused",
        "seed": 3,
        "model": {"tokenizer": "chess", "num_layers": 1, "num_heads": 2, "hidden_size": 16, "max_position_embeddings": 96},
        "prompts": {"source": "positions.jsonl", "per_iteration": PROMPTS, "max_prompt_tokens": 80},
        "rollout": {"group_size": GROUP, "max_new_tokens": 6, "refill": refill},
        "kl": {"beta": 0.1},
        "update": {"learning_rate": 1e-2},
        "logging": {"tensorboard": False, "samples_every": 1, "samples": PROMPTS, "progress": False},
        "checkpoint": {"every": 1, "keep_last": 9},
    }  # fmt: skip
    for name, value in sections.items():
        base[name] = base.get(name, {}) | value if isinstance(value, dict) else value
    return Config.model_validate(base)


def write_positions(folder: Path) -> Path:
    """The file that `sparse_config` names."""
    rows = [json.dumps({"fen": position.fen}) for position in selfplay_positions(8, 0)]
    (folder / "positions.jsonl").write_text("\n".join(rows))
    return folder


def begins_with_signal(config: Config, batch: Batch) -> bool:
    """Whether the first optimiser step of iteration 0 has an advantage.

    Without one, the gradient of a policy that is still its reference is rounding alone, of which AdamW makes a step that differs
    by machine: two implementations then agree by chance.
    """
    first = next(iter(minibatches(batch, config.update.epochs, config.update.minibatches, config.seed, 0)))
    return bool(np.any(first.advantages_B))


def begin_again(trainer: Trainer, fresh) -> None:
    """A copy of the state, which the update donates, where a checkpoint's would be: other places are other programs."""
    trainer.state, trainer.prompts.further = jax.device_put(fresh, jax.devices()[0]), 0


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(TIMES)}
