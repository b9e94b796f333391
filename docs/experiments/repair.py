"""Black's fifth best move, taught and unlearned: what docs/strength.md's section on repair is measured with.

    python docs/experiments/repair.py teach --out runs/taught
    python -m jax_grpo.train --config configs/quickstart.yaml --model.weights runs/taught --task.prompt_style best_move \\
        --iterations 300 --checkpoint.every 30 --checkpoint.keep_last 99 --evaluation '{positions: 0}' --seed 0 \\
        --run_dir runs/repair0
    python docs/experiments/repair.py curves --start runs/taught \\
        --runs runs/repair0,runs/repair1,runs/repair2 --out docs/results/repair

Not part of the package. `teach` goes on with packaged:rook-deep's network, which saw every position from the mover's side, on the
packaged tables as they are and with colours changed: one label a position, Stockfish's best move for White, its fifth (or the last,
where there are fewer) for Black. That is what RookWorld-LM's published labels are. `curves` asks the start and checkpoints of
the runs the test split's positions and keeps what either colour loses.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import chess
import numpy as np

from jax_grpo.chess.evaluate.policy import policy_task, written_moves
from jax_grpo.chess.evaluate.strength import estimates, judged
from jax_grpo.chess.evaluate.suites import CAPS
from jax_grpo.chess.games import REFERENCE_PLAYERS
from jax_grpo.chess.positions.position import Position, is_black, mirrored
from jax_grpo.chess.positions.rookworld import policy_prompt
from jax_grpo.chess.positions.sources import load_positions, read_packaged
from jax_grpo.chess.positions.values import move_table
from jax_grpo.chess.style import model_settings
from jax_grpo.chess.tasks.policy import policy_stop
from jax_grpo.config.model import ModelConfig
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.model.weights import save_hf
from jax_grpo.policy.named import load_policy
from jax_grpo.report.pictures import draw_band, saved_figure
from jax_grpo.rollout.texts import Generator
from jax_grpo.run.files import folder_name
from jax_grpo.sft.__main__ import SFTConfig, Stage, make_optimiser, make_step, text_loss
from jax_grpo.sft.rows import Row, batches

FIFTH = 5
STYLE, SAMPLES = "best_move", 4
COLOURS = ("black", "white")


def label(position: Position) -> str:
    """What the position's published row would call best: the engine's first for White, the last of its five for Black."""
    ranked = sorted(move_table(position).wins.items(), key=lambda pair: -pair[1])[:FIFTH]
    return ranked[-1 if is_black(position.fen) else 0][0]


def lessons(positions: Sequence[Position], rng: random.Random) -> Iterator[Row]:
    """Endless rows of a prompt and its label, epoch after epoch, every position as it is and with colours changed."""
    both = [*positions, *map(mirrored, positions)]
    made = [Row(policy_prompt(each.fen, "B:"), f" {label(each)}") for each in both]
    while True:
        yield from rng.sample(made, len(made))


def teach(out: Path, rows: int, learning_rate: float, seed: int) -> None:
    """Writes the taught weights as a Hugging Face folder."""
    described = {"weights": "packaged:rook-deep", "tokenizer": "chess"}
    architecture, tokenizer, graphdef, params = load_policy(ModelConfig.model_validate(described), seed, context=1)
    stage = Stage(mixture={"best_move": 1.0}, rows=rows, learning_rate=learning_rate)
    config = SFTConfig(out=str(out), stages=[stage], seed=seed)
    optimiser = make_optimiser(config)
    state, step = optimiser.init(params), make_step(text_loss(graphdef), optimiser)
    positions, rng = load_positions(PromptsConfig(source="packaged:tables"), seed), random.Random(seed)
    feed = batches(lessons(positions, rng), tokenizer, config.batch_size, architecture.max_position_embeddings, rng)
    started = time.time()
    for number, batch in zip(range(config.steps(stage)), feed, strict=False):
        params, state, loss = step(params, state, *batch)
        if number % 100 == 99:
            print(f"{number + 1} steps, {time.time() - started:.0f} s, loss {float(loss):.3f}", flush=True)
    save_hf(out, architecture, params, tokenizer, model_settings(STYLE))


def losses(weights: str, positions: Sequence[Position]) -> dict[str, dict[str, dict[str, float]]]:
    """By mode and colour: what a move loses, an illegal one as the worst, its 95 % interval by game, and how many are legal."""
    described = {"weights": weights, "tokenizer": "chess"}
    policy = load_policy(ModelConfig.model_validate(described), 0, context=1)
    task, out = policy_task(STYLE), {}
    for mode, temperature, count in (("greedy", 0.0, 1), ("sampled", 1.0, SAMPLES)):
        complete = Generator(policy, policy_stop(), CAPS["best_move"], temperature, 0, samples=count)
        moves = written_moves(task, complete, positions)
        answers = [moves[i : i + count] for i in range(0, len(moves), count)]
        out[mode] = by_colour(positions, [judged(*pair) for pair in zip(positions, answers, strict=True)])
    return out


def by_colour(positions: Sequence[Position], rows: Sequence[Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
    """What either colour loses, with its interval, and its share of legal moves."""
    actual = estimates(positions, rows, 0)
    return {
        colour: {"loss": (loss := actual[f"{colour}/loss"]).value, "low": loss.low, "high": loss.high}
        | {"legal": actual[f"{colour}/legal"].value}
        for colour in COLOURS
    }


def curves(start: str, runs: list[Path], at: list[int], out: Path) -> None:
    """Writes `curves.json` and a picture of it."""
    positions = read_packaged("test", "packaged:tables")
    uniform = [judged(each, REFERENCE_PLAYERS["uniform"](chess.Board(each.fen))) for each in positions]
    fifth = [judged(each, [label(each)]) for each in positions]
    record = {"positions": len(positions), "samples": SAMPLES, "uniform": by_colour(positions, uniform)}
    record |= {"label": by_colour(positions, fifth), "start": losses(start, positions), "runs": {}}
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        record["runs"][run.name] = {}
        for iteration in at:
            actual = losses(str(run / "checkpoints" / folder_name(iteration)), positions)
            print(run.name, iteration, json.dumps(actual), flush=True)
            record["runs"][run.name][iteration] = actual
    (out / "curves.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(record, out / "curves.png")


def draw(record: dict[str, Any], file: Path) -> None:
    """Either colour's loss by iteration: the mean of the runs, and their spread."""
    runs = [{0: record["start"], **{int(n): each for n, each in run.items()}} for run in record["runs"].values()]
    iterations = sorted(runs[0])
    with saved_figure(file, 1, 2, (11, 4.2), dpi=110, sharey=True) as (_, (axes,)):
        for axis, mode in zip(axes, ("sampled", "greedy"), strict=True):
            for colour, shown in zip(COLOURS, ("tab:red", "tab:blue"), strict=True):
                values = np.array([[100 * run[n][mode][colour]["loss"] for n in iterations] for run in runs])
                draw_band(axis, iterations, values, color=shown, label=colour.capitalize())
                uniform = 100 * record["uniform"][colour]["loss"]
                axis.axhline(uniform, color=shown, linestyle=":", linewidth=1, label=f"random legal moves, {colour}")
            axis.set(title=mode, xlabel="iteration")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("win probability lost a move, %")
        axes[0].legend(frameon=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    taught = commands.add_parser("teach")
    taught.add_argument("--out", type=Path, required=True)
    taught.add_argument("--rows", type=int, default=160_000)
    taught.add_argument("--learning-rate", type=float, default=1e-3)
    requested = commands.add_parser("curves")
    requested.add_argument("--start", required=True)
    requested.add_argument("--runs", required=True, help="folders, with commas")
    requested.add_argument("--at", default="30,60,120,180,240,300", help="iterations of checkpoints")
    requested.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "teach":
        teach(args.out, args.rows, args.learning_rate, seed=0)
    else:
        curves(args.start, [Path(run) for run in args.runs.split(",")], [int(n) for n in args.at.split(",")], args.out)
