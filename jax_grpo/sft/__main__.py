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
from typing import Any, NamedTuple

import chess
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic
from flax import nnx

from jax_grpo.config import ConfigError, load_yaml
from jax_grpo.config.sections import ModelConfig
from jax_grpo.lm_head.materialised import token_logprobs
from jax_grpo.model.gpt2 import GPT2, GPT2Config
from jax_grpo.model.named import load_policy
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import save_hf
from jax_grpo.optimiser import decays
from jax_grpo.positions.dataset import read_packaged
from jax_grpo.positions.position import Position, recent_moves
from jax_grpo.positions.random_play import random_positions
from jax_grpo.positions.rookworld import PolicyRow, format_policy_row, policy_prompt, state_prompt
from jax_grpo.system.compilation import training_options
from jax_grpo.system.progress import progress_bar
from jax_grpo.tasks.environment import draw_move, next_state
from jax_grpo.tasks.instructions.lessons import FOLLOWED, lesson

GAMES, LABELS = "random games (python-chess)", "the packaged positions labelled by Stockfish"
DATA = {  # the first teaches the rules faster than one move can
    "legal_moves": GAMES,
    "best_move": LABELS,
    "policy": LABELS,
    "environment": GAMES,
    "instructions": "prompts and answers drawn by jax_grpo.tasks.instructions",
}
KINDS = tuple(DATA)
LENGTH_MULTIPLE = 32  # batches are padded to a multiple, so that only a few shapes are compiled
CHUNK_BATCHES = 16  # rows are sorted by length within this many batches
LOG_EVERY = 20  # steps between lines of `sft.jsonl`


class Stage(pydantic.BaseModel, extra="forbid", frozen=True):
    """One part of the training: `rows` examples of a mixture, at a peak learning rate, cosine to a tenth of it."""

    mixture: dict[str, float]
    rows: int = pydantic.Field(gt=0)
    learning_rate: float = pydantic.Field(gt=0)

    @pydantic.field_validator("mixture")
    @classmethod
    def _known_kinds(cls, mixture: dict[str, float]) -> dict[str, float]:
        unknown = sorted(set(mixture) - set(KINDS))
        if unknown or not mixture or min(mixture.values()) <= 0:
            raise ValueError(f"expected positive weights for some of {', '.join(KINDS)}; found {mixture}")
        return mixture


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


class Row(NamedTuple):
    """`completion` is what the loss is taken on; end-of-text follows it."""

    prompt: str
    completion: str


def legal_moves_row(board: chess.Board, rng: random.Random) -> Row:
    """All legal moves after `B:` or `M:`: a model that samples the first move of such a list plays legal chess."""
    moves = [move.uci() for move in board.legal_moves]
    rng.shuffle(moves)
    return Row(policy_prompt(board.fen(), rng.choice(["M:", "B:"])), "".join(f" {move}" for move in moves))


def best_move_row(position: Position) -> Row:
    return Row(policy_prompt(position.fen, "B:"), f" {position.moves[0]}")


def policy_row(position: Position, rng: random.Random) -> Row:
    """A RookWorld policy row with four spaces between fields; moves in random order, evaluations aligned with them."""
    order = rng.sample(range(len(position.moves)), len(position.moves))
    moves = tuple(position.moves[i] for i in order)
    evaluations = tuple(round(position.evaluations[i], 2) for i in order)
    row, prompt = PolicyRow(position.fen, moves, evaluations, position.moves[0]), policy_prompt(position.fen, "M:")
    return Row(prompt, format_policy_row(row).removeprefix(prompt))


def environment_row(board: chess.Board, rng: random.Random) -> Row:
    """`A: <FEN>+<uci>+<history>+` and the state after it; a few moves are illegal and leave the board as it was."""
    move = draw_move(board, rng, illegal_fraction=0.05)
    return Row(state_prompt(board.fen(), move.uci(), recent_moves(board)), next_state(board, move))


def rows(
    mixture: dict[str, float], positions: Sequence[Position], rng: random.Random, followed: float = FOLLOWED
) -> Iterator[Row]:
    """Endless rows, each kind (see `KINDS`) drawn with its weight; `best_move` and `policy` need labelled positions."""
    boards = random_positions(rng)

    def board() -> chess.Board:
        return next(itertools.islice(boards, rng.randint(0, 4), None))  # neighbours differ by one move: skip some

    makers: dict[str, Callable[[], Row]] = {
        "legal_moves": lambda: legal_moves_row(board(), rng),
        "best_move": lambda: best_move_row(rng.choice(positions)),
        "policy": lambda: policy_row(rng.choice(positions), rng),
        "environment": lambda: environment_row(board(), rng),
        "instructions": lambda: Row(*lesson(rng.getrandbits(64), followed)),
    }
    kinds, weights = list(mixture), list(mixture.values())
    while True:
        yield makers[rng.choices(kinds, weights)[0]]()


def batches(
    source: Iterator[Row], tokenizer: Tokenizer, batch_size: int, max_length: int, rng: random.Random
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Right-padded (input_ids, attention_mask, loss_mask), each [B, T], of similar length; longer rows are left out."""
    while True:
        chunk = [next(source) for _ in range(batch_size * CHUNK_BATCHES)]
        prompts = tokenizer.encode_batch([row.prompt for row in chunk])
        completions = tokenizer.encode_batch([row.completion for row in chunk])
        tokens = [(len(p), [*p, *c, tokenizer.eos_id]) for p, c in zip(prompts, completions, strict=True)]
        tokens = sorted((row for row in tokens if len(row[1]) <= max_length), key=lambda row: len(row[1]))
        groups = [tokens[i : i + batch_size] for i in range(0, len(tokens) - batch_size + 1, batch_size)]
        rng.shuffle(groups)
        for group in groups:
            length = min(-(-len(group[-1][1]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, max_length)
            input_ids_BT = np.full((batch_size, length), tokenizer.pad_id, np.int32)
            attention_BT, loss_BT = np.zeros((2, batch_size, length), np.int32)
            for i, (prompt_length, ids) in enumerate(group):
                input_ids_BT[i, : len(ids)] = ids
                attention_BT[i, : len(ids)] = 1
                loss_BT[i, prompt_length : len(ids)] = 1
            yield input_ids_BT, attention_BT, loss_BT


def make_step(graphdef: Any, optimiser: optax.GradientTransformation, vocab_size: int):
    """Jitted, donated `(params, opt_state, ids, attention, loss_mask) -> (params, opt_state, loss)`; loss in nats/token."""

    def loss_fn(params, input_ids_BT, attention_BT, loss_BT):
        model = nnx.merge(graphdef, params)
        hidden_BTH, embedding_VH = model(input_ids_BT, attention_BT), model.wte.embedding[...]
        logp_BT, _ = token_logprobs(
            hidden_BTH[:, :-1], embedding_VH, input_ids_BT[:, 1:], vocab_size=vocab_size, temperature=1.0
        )
        mask_BT = loss_BT[:, 1:]
        return -jnp.sum(logp_BT * mask_BT) / jnp.sum(mask_BT)

    def step(params, opt_state, input_ids_BT, attention_BT, loss_BT):
        loss, grads = jax.value_and_grad(loss_fn)(params, input_ids_BT, attention_BT, loss_BT)
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
    opt_state, step = optimiser.init(params), make_step(graphdef, optimiser, architecture.vocab_size)
    rng, positions = random.Random(config.seed), read_packaged("train")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    done, started = 0, time.time()
    with (out / "sft.jsonl").open("w") as log, progress_bar() as progress:
        for number, stage in enumerate(config.stages):
            steps = config.steps(stage)
            bar = progress.add_task(f"stage {number}", total=steps)
            examples, context = (
                rows(stage.mixture, positions, rng, config.followed),
                architecture.max_position_embeddings,
            )
            for batch in itertools.islice(batches(examples, tokenizer, config.batch_size, context, rng), steps):
                params, opt_state, loss = step(params, opt_state, *batch)
                done += 1
                progress.update(bar, advance=1)
                if done % LOG_EVERY == 0:
                    mean, rate = round(float(loss), 4), done * config.batch_size / (time.time() - started)
                    record = {"step": done, "stage": number, "loss": mean, "rows_per_second": round(rate, 1)}
                    print(json.dumps(record), file=log, flush=True)
                    progress.update(bar, description=f"stage {number}, loss {mean:.3f}, {rate:.0f} rows/s")
            save_hf(out / f"stage{number}", architecture, params, tokenizer)
    final = out / f"stage{len(config.stages) - 1}"
    provenance = {
        "command": "python -m jax_grpo.sft " + " ".join(sys.argv[1:]),
        "config": config.model_dump(),
        "seconds": round(time.time() - started),
        "rows": done * config.batch_size,
        "data": " and ".join(dict.fromkeys(DATA[kind] for stage in config.stages for kind in stage.mixture)),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    (final / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    return final


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
    print("weights:", train(config))


if __name__ == "__main__":
    main()
