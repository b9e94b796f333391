"""Memory of a whole training step (forward, backward, AdamW) compiled for a GPU, by LM head, and the largest batch that fits.

The step is `update.make_update` of GPT-2 small with float32 masters and bfloat16 compute, one micro-batch, rows of equal length.
Sequences are added until the program is larger than the device; what a driver and an allocator need is not in the figures.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo import aot
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
        return GPT2(GPT2_SMALL, rngs=nnx.Rngs(0), compute_dtype=jnp.bfloat16, remat=remat)

    graphdef, params = nnx.split(nnx.eval_shape(build), nnx.Param)
    state = jax.eval_shape(lambda params: init_state(params, config), params)
    per_token, per_row = jnp.zeros((rows, length)), jnp.zeros(rows)
    ids = jnp.zeros((rows, length), jnp.int32)
    batch = Batch(FlatTokens(ids, ids), ids, per_row, jnp.ones(rows, bool), per_token, per_token)
    update = make_update(graphdef, config, total_steps=1)
    return aot.compile_for(target, update, state, batch, donate=(0,)).report


def largest_batch(head: str, length: int, remat: bool, target: str, measured: dict[int, int]) -> int:
    """Sequences that fit, in steps of `STEP`; `measured` holds totals by sequences, two at least, and gets those compiled here.

    Totals are nearly straight in the number of sequences: the line through the last two points says where to look next.
    """
    capacity = 0
    while True:
        (low, low_bytes), (high, high_bytes) = sorted(measured.items())[-2:]
        slope = (high_bytes - low_bytes) / (high - low)
        capacity = capacity or report(head, high, length, remat, target).device
        guess = int((capacity - high_bytes) / slope + high) // STEP * STEP
        for rows in (guess, guess + STEP):
            if rows not in measured:
                measured[rows] = report(head, rows, length, remat, target).total
        if measured[guess] <= capacity < measured[guess + STEP]:
            return guess
        if measured[guess] > capacity:  # the line was too flat: step down
            while measured.setdefault(guess, report(head, guess, length, remat, target).total) > capacity:
                guess -= STEP
            return guess


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.bench.step_memory", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", default="rtx4090", choices=list(aot.TARGETS))
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
                half = arguments.rows // 2
                measured = {
                    half: report(head, half, arguments.length, arguments.remat, arguments.target).total,
                    arguments.rows: made.total,
                }
                most = largest_batch(head, arguments.length, arguments.remat, arguments.target, measured)
                records[head] |= {"largest_batch": most, "totals_by_rows": measured}
                print(f"{'':20} largest batch {most} x {arguments.length}", flush=True)
    except aot.CannotCompile as error:
        raise SystemExit(f"CannotCompile: {error}") from error
    if arguments.json:
        about = {
            "target": arguments.target,
            "rows": arguments.rows,
            "length": arguments.length,
            "remat": arguments.remat,
        }
        Path(arguments.json).write_text(json.dumps(about | {"jax": jax.__version__, "heads": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
