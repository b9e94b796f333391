"""Memory of generation with GPT-2 small compiled for a GPU: prompts' keys and values kept once a prompt, or once a completion.

    JAX_PLATFORMS=cpu python -m jax_grpo.bench.rollout_memory --json rollout_memory.json

The second is the same program given every prompt G times with one completion each, as a trainer does that repeats its prompts.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_grpo import targets
from jax_grpo.bench.step_memory import GPT2_SMALL
from jax_grpo.memory.compiled import compile_program
from jax_grpo.memory.shapes import Program
from jax_grpo.model import GPT2
from jax_grpo.rollout import make_generate, padded_length
from jax_grpo.sampling import Sampling

STOP = np.zeros((2, GPT2_SMALL.vocab_size), np.int32)


def program_of(prompts: int, group: int, width: int, cap: int, compacts: bool) -> Program:
    """Generation of so many completions from float32 parameters, computed in bfloat16."""
    build = nnx.eval_shape(lambda: GPT2(GPT2_SMALL, rngs=nnx.Rngs(0), compute_dtype=jnp.bfloat16))
    graphdef, params = nnx.split(build, nnx.Param)
    generate = make_generate(
        graphdef, vocab_size=GPT2_SMALL.vocab_size, pad_id=0, group_size=group, max_new_tokens=cap, sampling=Sampling(),
        stop_table_SV=STOP, accept_state=1, compacts=compacts,
    )  # fmt: skip

    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    asked = (params, int32(prompts, width), int32(prompts, width), int32(prompts), int32(prompts), int32(), int32())
    return Program("rollout", generate, asked, ("parameters",))


def measure(target: str, prompts: int, group: int, width: int, cap: int, compacts: bool) -> dict[str, Any]:
    """Bytes of the keys and values of all prompts and completions, and of the whole program."""
    compiled = compile_program(target, program_of(prompts, group, width, cap, compacts))
    tokens = prompts * width + prompts * group * (cap - 1)
    cache = 2 * GPT2_SMALL.num_layers * GPT2_SMALL.hidden_size * tokens * jnp.dtype(jnp.bfloat16).itemsize
    return {
        "caches": cache,
        "program": compiled.total,
        "arguments": compiled.arguments,
        "temporaries": compiled.temporaries,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.bench.rollout_memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=46)
    parser.add_argument("--new-tokens", type=int, default=144)
    parser.add_argument("--target", default="rtx4090", choices=targets.known())
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args(argv)
    width = padded_length(asked.prompt_tokens)
    rows = {
        "shared": (asked.prompts, asked.group, True),
        "shared, no compaction": (asked.prompts, asked.group, False),
        "not shared": (asked.prompts * asked.group, 1, False),
    }
    print("| prompts' keys and values | caches GB | whole program GB |\n|---|---|---|")
    found = {}
    for name, (prompts, group, compacts) in rows.items():
        found[name] = measure(asked.target, prompts, group, width, asked.new_tokens, compacts)
        print(f"| {name} | {found[name]['caches'] / 1e9:.2f} | {found[name]['program'] / 1e9:.2f} |", flush=True)
    if asked.json:
        record = {
            "target": asked.target,
            "jax": jax.__version__,
            "asked": vars(asked) | {"width": width},
            "variants": found,
        }
        Path(asked.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
