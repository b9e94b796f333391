"""Supervised warm start: teaches a model the rules and RookWorld's formats, or to read instructions, before GRPO.

    python -m jax_grpo.sft --config configs/sft_rook_small.yaml

Stages run one after another, each with its own learning rate and mixture of rows. Writes a Hugging Face folder of weights,
`sft.jsonl` (loss by step) and `provenance.json`. This is how packaged models are made.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
from flax import nnx

from jax_grpo.config import ConfigError, load_yaml
from jax_grpo.config.model import ModelConfig
from jax_grpo.lm_head.materialised import token_logprobs
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import save_hf
from jax_grpo.names import LESSONS, STYLES, by_name
from jax_grpo.optimiser import decays
from jax_grpo.policy.named import GPT2_SIZES, load_policy
from jax_grpo.prompts.table import SourceError, UnsuitableRow
from jax_grpo.sft.rows import INSTRUCTIONS, Row, Stage, batches, rows
from jax_grpo.system.compilation import training_options
from jax_grpo.system.progress import progress_bar
from jax_grpo.system.whole_files import require_new
from jax_grpo.tasks.instructions.lessons import FOLLOWED, lesson

LOG_EVERY = 20  # steps between lines of `sft.jsonl`


class SFTConfig(pydantic.BaseModel, extra="forbid", frozen=True):
    """Config of the warm start. `weights` (see `policy.named`) are continued from; otherwise the sizes make a new model.

    `followed` is the share of its prompt's instructions that an answer follows.
    """

    out: str
    stages: list[Stage]
    seed: int = 0
    tokenizer: str = "chess"
    weights: str | None = None
    num_layers: int = 4
    num_heads: int = 6
    hidden_size: int = 192
    max_position_embeddings: int = 256
    batch_size: int = pydantic.Field(default=64, gt=0)
    warmup_steps: int = 100
    weight_decay: float = 0.01
    compute_dtype: str = "float32"
    followed: float = pydantic.Field(default=FOLLOWED, ge=0, le=1)

    def steps(self, stage: Stage) -> int:
        """Updates of a stage."""
        return max(stage.rows // self.batch_size, 1)


def text_loss(graphdef: Any) -> Callable[..., jax.Array]:
    """`(params, ids, attention, loss_mask) -> loss` in nats a token of the batches of `sft.rows`."""

    def loss(params, input_ids_BT, attention_BT, loss_BT):
        model = nnx.merge(graphdef, params)
        hidden_BTH, embedding_VH = model(input_ids_BT, attention_BT), model.head_VH
        logp_BT, _ = token_logprobs(
            hidden_BTH[:, :-1], embedding_VH, input_ids_BT[:, 1:], vocab_size=model.vocabulary, temperature=1.0
        )
        mask_BT = loss_BT[:, 1:]
        return -jnp.sum(logp_BT * mask_BT) / jnp.sum(mask_BT)

    return loss


def make_step(loss_fn: Callable[..., jax.Array], optimiser: optax.GradientTransformation):
    """Jitted, donated `(params, opt_state, *batch) -> (params, opt_state, loss)` of `loss_fn(params, *batch)`."""

    def step(params, opt_state, *batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1), compiler_options=training_options())


def make_optimiser(config: SFTConfig) -> optax.GradientTransformation:
    """AdamW with global-norm clipping; each stage warms up and decays on its own. Biases and norms do not decay."""
    steps = [config.steps(stage) for stage in config.stages]
    schedules = [
        optax.warmup_cosine_decay_schedule(0.0, peak, min(config.warmup_steps, n // 2), n, peak * 0.1)
        for peak, n in zip((stage.learning_rate for stage in config.stages), steps, strict=True)
    ]
    schedule = optax.join_schedules(schedules, np.cumsum(steps)[:-1].tolist())
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train(config: SFTConfig) -> Path:
    """Runs every stage and returns the folder of the trained weights. FileExistsError: an earlier one's are in `out`."""
    out = Path(config.out)
    require_new(out / "sft.jsonl", "out")
    named = ("weights", "tokenizer", "compute_dtype", *(GPT2_SIZES if config.weights is None else ()))
    model = ModelConfig.model_validate({name: getattr(config, name) for name in named})
    architecture, tokenizer, graphdef, params = load_policy(model, config.seed, context=1)
    optimiser = make_optimiser(config)
    opt_state = optimiser.init(params)
    steps_of = {False: make_step(text_loss(graphdef), optimiser)}
    if any(stage.tables for stage in config.stages):
        steps_of[True] = make_step(by_name(LESSONS).make_loss(graphdef), optimiser)
    feeds = _feeds(config, tokenizer, architecture.max_position_embeddings)
    out.mkdir(parents=True, exist_ok=True)
    done, started = 0, time.time()
    with (out / "sft.jsonl").open("w") as log, progress_bar() as progress:
        for number, stage in enumerate(config.stages):
            steps = config.steps(stage)
            bar = progress.add_task(f"stage {number}", total=steps)
            step = steps_of[stage.tables is not None]
            for batch in itertools.islice(feeds[number], steps):
                params, opt_state, loss = step(params, opt_state, *batch)
                done += 1
                progress.update(bar, advance=1)
                if done % LOG_EVERY == 0:
                    mean, rate = round(float(loss), 4), done * config.batch_size / (time.time() - started)
                    record = {"step": done, "stage": number, "loss": mean, "rows_per_second": round(rate, 1)}
                    print(json.dumps(record), file=log, flush=True)
                    progress.update(bar, description=f"stage {number}, loss {mean:.3f}, {rate:.0f} rows/s")
            own = by_name(STYLES).model_settings(stage.prompt_style) if stage.tables else {}
            save_hf(out / f"stage{number}", architecture, params, tokenizer, own)
    final = out / f"stage{len(config.stages) - 1}"
    provenance = {
        "command": "python -m jax_grpo.sft " + " ".join(sys.argv[1:]),
        "config": config.model_dump(),
        "seconds": round(time.time() - started),
        "rows": done * config.batch_size,
        "data": " and ".join(dict.fromkeys(kind for stage in config.stages for kind in stage.data())),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    (final / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    return final


def _feeds(config: SFTConfig, tokenizer: Tokenizer, context: int) -> list[Iterator[Sequence[np.ndarray]]]:
    """Each stage's endless batches, of one stream of random numbers; sources are read, and refused, before anything is compiled."""
    rng = random.Random(config.seed)
    feeds: list[Iterator[Sequence[np.ndarray]]] = []
    for stage in config.stages:
        if stage.tables is not None:
            feeds.append(by_name(LESSONS).table_batches(stage, config.seed, tokenizer, config.batch_size, context, rng))
        else:
            mixture = stage.mixture or {}
            makers = {INSTRUCTIONS: lambda: Row(*lesson(rng.getrandbits(64), config.followed))}
            if mixture.keys() - {INSTRUCTIONS}:
                makers |= by_name(LESSONS).makers(rng)
            feeds.append(batches(rows(mixture, makers, rng), tokenizer, config.batch_size, context, rng))
    return feeds


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.sft", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    args, overrides = parser.parse_known_args(argv)
    try:
        print("weights:", train(load_yaml(SFTConfig, args.config, overrides)))
    except (ConfigError, FileExistsError, SourceError, UnsuitableRow) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
