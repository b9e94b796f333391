"""Memory of a whole training step (forward, backward, AdamW) compiled for a GPU, by LM head, and the largest batch that fits.

The step is `update.make_update` of GPT-2 small with float32 masters and bfloat16 compute, one micro-batch, rows of equal length.
Sequences are added until the program is larger than the device; what a driver and an allocator need is not in the figures.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo import aot, targets
from jax_grpo.batch import Batch, FlatTokens
from jax_grpo.config import Config
from jax_grpo.model import GPT2, GPT2Config
from jax_grpo.update import init_state, make_update

GPT2_SMALL = GPT2Config(vocab_size=50257, num_layers=12, num_heads=12, hidden_size=768, max_position_embeddings=1024)
HEADS: dict[str, dict[str, Any]] = {
    "materialised": {"implementation": "materialised"},
    "materialised-bf16": {"implementation": "materialised", "logits_dtype": "bfloat16"},
    "chunked": {"implementation": "chunked"},
    "pallas-bf16": {"implementation": "pallas", "logits_dtype": "bfloat16"},
    "pallas-small": {"implementation": "pallas", "chunk_tokens": 4096, "chunk_vocab": 4096},
}
STEP = 8  # sequences by which the largest batch is found: 8 x 192 rows are whole tiles of every matmul


def settings(head: str, remat: bool) -> Config:
    """A step of clipped GRPO with a KL term and cached old and reference log-probabilities."""
    model = {
        "num_layers": GPT2_SMALL.num_layers,
        "num_heads": GPT2_SMALL.num_heads,
        "hidden_size": GPT2_SMALL.hidden_size,
        "max_position_embeddings": GPT2_SMALL.max_position_embeddings,
        "compute_dtype": "bfloat16",
        "remat": remat,
    }
    return Config.model_validate({"iterations": 1, "run_dir": "none", "model": model, "lm_head": HEADS[head]})


def report(head: str, rows: int, length: int, remat: bool, target: str) -> aot.Report:
    """The step on `rows` sequences of `length` tokens, compiled for the target."""
    config = settings(head, remat)

    def build() -> GPT2:
        return GPT2(GPT2_SMALL, rngs=nnx.Rngs(0), compute_dtype=jnp.bfloat16, remat="all" if remat else False)

    graphdef, params = nnx.split(nnx.eval_shape(build), nnx.Param)
    state = jax.eval_shape(lambda params: init_state(params, config), params)
    per_token, per_row = jnp.zeros((rows, length)), jnp.zeros(rows)
    ids = jnp.zeros((rows, length), jnp.int32)
    batch = Batch(FlatTokens(ids, ids), ids, per_row, jnp.ones(rows, bool), per_token, per_token)
    update = make_update(graphdef, config, total_steps=1)
    return aot.compile_for(target, update, state, batch).report


def largest_batch(total_of: Callable[[int], int], rows: int, empty: int, capacity: int) -> int:
    """Sequences that fit, in steps of `STEP`, given the total bytes of a step by sequences.

    Totals are nearly straight in the number of sequences, so few programs are compiled: the line through the last two
    points says where to look next, and neighbours on both sides of the limit end the search.

    Args:
        total_of: bytes of the step on so many sequences.
        rows: sequences to start from.
        empty: about what the step needs without any.
        capacity: bytes of the device.
    """
    known = {0: empty, rows: total_of(rows)}

    def total(count: int) -> int:
        if count not in known:
            known[count] = total_of(count)
        return known[count]

    (low, low_bytes), (high, high_bytes) = sorted(known.items())
    guess = max(STEP, int(low + (capacity - low_bytes) * (high - low) / (high_bytes - low_bytes)) // STEP * STEP)
    slope = (total(guess) - high_bytes) / (guess - high) if guess != high else (high_bytes - low_bytes) / high
    guess = max(STEP, int(guess + (capacity - total(guess)) / slope) // STEP * STEP)
    while total(guess) > capacity and guess > STEP:
        guess -= STEP
    while total(guess + STEP) <= capacity:
        guess += STEP
    return guess


def write(arguments: argparse.Namespace, records: dict[str, Any]) -> None:
    """The records so far as JSON, if a file is asked for: a search over batches takes minutes a head."""
    if arguments.json:
        about = {name: getattr(arguments, name) for name in ("target", "rows", "length", "remat")}
        Path(arguments.json).write_text(json.dumps(about | {"jax": jax.__version__, "heads": records}, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.bench.step_memory", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", default="rtx4090", choices=targets.known())
    parser.add_argument("--rows", type=int, default=64, help="sequences")
    parser.add_argument("--length", type=int, default=192, help="tokens of a sequence")
    parser.add_argument("--remat", action="store_true", help="recompute blocks in the backward pass")
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--largest", action="store_true", help="also find the largest batch that fits")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args(argv)
    heads = arguments.heads.split(",")
    if unknown := [head for head in heads if head not in HEADS]:
        raise SystemExit(f"--heads {unknown[0]!r}: expected some of {', '.join(HEADS)}")
    print(f"# {sys.executable} -m jax_grpo.bench.step_memory {' '.join(sys.argv[1:] if argv is None else argv)}")
    records = {}
    try:
        for head in heads:
            made = report(head, arguments.rows, arguments.length, arguments.remat, arguments.target)
            records[head] = {
                "arguments": made.arguments,
                "temporaries": made.temporaries,
                "total": made.total,
                "largest": [[buffer.size, buffer.kind, *buffer.shapes] for buffer in made.buffers],
                "float32_dots": len(made.wide_dots),
            }
            print(
                f"{head:20} {made.total / 1e9:6.2f} GB",
                [f"{b.size / 1e6:.0f} MB {b.shapes[0]}" for b in made.buffers[:4]],
            )
            if arguments.largest:
                totals = {arguments.rows: made.total}

                def total_of(rows: int, head=head, totals=totals) -> int:
                    if rows not in totals:
                        totals[rows] = report(head, rows, arguments.length, arguments.remat, arguments.target).total
                    return totals[rows]

                empty = made.arguments * 4 // 3  # parameters and two moments, and gradients
                most = largest_batch(total_of, arguments.rows, empty, made.device)
                records[head] |= {"largest_batch": most, "totals_by_rows": totals}
                print(f"{'':20} largest batch {most} x {arguments.length}", flush=True)
            write(arguments, records)
    except aot.CannotCompile as error:
        raise SystemExit(f"CannotCompile: {error}") from error


if __name__ == "__main__":
    main()
