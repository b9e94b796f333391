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
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
from flax import nnx

from jax_grpo.config import ConfigError, load_yaml
from jax_grpo.config.sections import ModelConfig, PromptsConfig
from jax_grpo.config.tasks import OWN_SIDE
from jax_grpo.lm_head.materialised import token_logprobs
from jax_grpo.model.gpt2 import GPT2, GPT2Config
from jax_grpo.model.named import load_policy, said_of_style
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import save_hf
from jax_grpo.optimiser import decays
from jax_grpo.positions.dataset import load_positions, read_packaged
from jax_grpo.positions.files import PositionFileError
from jax_grpo.positions.values import NotATable
from jax_grpo.sft import soft_moves
from jax_grpo.sft.rows import DATA, KINDS, batches, rows
from jax_grpo.system.compilation import training_options
from jax_grpo.system.progress import progress_bar
from jax_grpo.tasks.instructions.lessons import FOLLOWED

LOG_EVERY = 20  # steps between lines of `sft.jsonl`


class Stage(pydantic.BaseModel, extra="forbid", frozen=True):
    """One part of the training: `rows` examples at a peak learning rate, cosine to a tenth of it.

    They are texts of a `mixture`, or positions of `tables`, a source as `prompts.source` with every legal move's value, and then
    all moves are taught at once by softmax(win probability / tau), of which a share `uniform` is even (`sft.soft_moves`), in
    prompts of `prompt_style`.
    """

    mixture: dict[str, float] | None = None
    tables: str | None = None
    tau: float = pydantic.Field(default=0.02, gt=0)
    uniform: float = pydantic.Field(default=0.08, ge=0, le=1)
    prompt_style: Literal["best_move", "own_side"] = "best_move"
    rows: int = pydantic.Field(gt=0)
    learning_rate: float = pydantic.Field(gt=0)

    @pydantic.field_validator("mixture")
    @classmethod
    def _known_kinds(cls, mixture: dict[str, float] | None) -> dict[str, float] | None:
        if mixture is not None and (set(mixture) - set(KINDS) or not mixture or min(mixture.values()) <= 0):
            raise ValueError(f"expected positive weights for some of {', '.join(KINDS)}; found {mixture}")
        return mixture

    @pydantic.model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.mixture is None) == (self.tables is None):
            raise ValueError("expected one of mixture and tables in a stage")
        if self.tables is None and (aimless := sorted({"tau", "uniform", "prompt_style"} & self.model_fields_set)):
            raise ValueError(f"{aimless[0]} is of a stage of tables; this one has a mixture")
        return self


class SFTConfig(pydantic.BaseModel, extra="forbid", frozen=True):
    """Config of the warm start. `weights` (see `model.named`) are continued from; otherwise the sizes make a new model.

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
        hidden_BTH, embedding_VH = model(input_ids_BT, attention_BT), model.wte.embedding[...]
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
    """Runs every stage and returns the folder of the trained weights."""
    tokenizer = Tokenizer.load(config.tokenizer)
    architecture, graphdef, params = _initial(config, tokenizer)
    optimiser = make_optimiser(config)
    opt_state = optimiser.init(params)
    text_step, moves_step = (make_step(loss(graphdef), optimiser) for loss in (text_loss, soft_moves.make_loss))
    feeds = _feeds(config, tokenizer, architecture.max_position_embeddings)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    done, started = 0, time.time()
    with (out / "sft.jsonl").open("w") as log, progress_bar() as progress:
        for number, stage in enumerate(config.stages):
            steps = config.steps(stage)
            bar = progress.add_task(f"stage {number}", total=steps)
            step = moves_step if stage.tables else text_step
            for batch in itertools.islice(feeds[number], steps):
                params, opt_state, loss = step(params, opt_state, *batch)
                done += 1
                progress.update(bar, advance=1)
                if done % LOG_EVERY == 0:
                    mean, rate = round(float(loss), 4), done * config.batch_size / (time.time() - started)
                    record = {"step": done, "stage": number, "loss": mean, "rows_per_second": round(rate, 1)}
                    print(json.dumps(record), file=log, flush=True)
                    progress.update(bar, description=f"stage {number}, loss {mean:.3f}, {rate:.0f} rows/s")
            said = said_of_style(stage.prompt_style)
            save_hf(out / f"stage{number}", architecture, params, tokenizer, said)
    final = out / f"stage{len(config.stages) - 1}"
    provenance = {
        "command": "python -m jax_grpo.sft " + " ".join(sys.argv[1:]),
        "config": config.model_dump(),
        "seconds": round(time.time() - started),
        "rows": done * config.batch_size,
        "data": " and ".join(dict.fromkeys(itertools.chain(*map(_data, config.stages)))),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    (final / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    return final


def _feeds(config: SFTConfig, tokenizer: Tokenizer, context: int) -> list[Iterator[Sequence[np.ndarray]]]:
    """Each stage's endless batches, of one stream of random numbers; sources are read, and refused, before anything is compiled."""
    rng, labelled = random.Random(config.seed), read_packaged("train")
    feeds: list[Iterator[Sequence[np.ndarray]]] = []
    for stage in config.stages:
        if stage.tables is not None:
            positions = load_positions(PromptsConfig(source=stage.tables), config.seed)
            own_side = stage.prompt_style == OWN_SIDE
            moves = soft_moves.batches(
                positions, tokenizer, config.batch_size, context, rng, stage.tau, stage.uniform, own_side
            )
            feeds.append(itertools.chain([next(moves)], moves))
        else:
            texts = rows(stage.mixture or {}, labelled, rng, config.followed)
            feeds.append(batches(texts, tokenizer, config.batch_size, context, rng))
    return feeds


def _data(stage: Stage) -> Iterator[str]:
    """What a stage's examples are made of, for people."""
    yield from map(DATA.__getitem__, stage.mixture or ())
    if stage.tables is not None:
        yield f"every legal move's value from {stage.tables}"


def _initial(config: SFTConfig, tokenizer: Tokenizer) -> tuple[GPT2Config, Any, Any]:
    """Sizes, graph and params of the config's weights, or of a new model."""
    if config.weights is not None:
        described = {"weights": config.weights, "tokenizer": config.tokenizer, "compute_dtype": config.compute_dtype}
        architecture, _, graphdef, params = load_policy(ModelConfig.model_validate(described), config.seed, context=1)
        return architecture, graphdef, params
    sizes = (config.num_layers, config.num_heads, config.hidden_size, config.max_position_embeddings)
    architecture = GPT2Config(tokenizer.vocab_size, *sizes)
    model = GPT2(architecture, rngs=nnx.Rngs(config.seed), compute_dtype=jnp.dtype(config.compute_dtype))
    return architecture, *nnx.split(model, nnx.Param)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.sft", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    args, overrides = parser.parse_known_args(argv)
    try:
        config = load_yaml(SFTConfig, args.config, overrides)
    except ConfigError as error:
        raise SystemExit(f"ConfigError: {error}") from error
    try:
        print("weights:", train(config))
    except (PositionFileError, NotATable) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
