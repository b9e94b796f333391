"""How many completions change with what else is in their batch: the same prompts generated all at once, and a few at a time.

    python -m jax_grpo.bench.batch_dependence --config configs/quickstart.yaml --json batch_dependence.json

The random number that draws a token depends on (seed, step, prompt, sample) only. The probabilities that it is compared with are
matmuls' results, and a matmul over other rows may sum in another order: in bfloat16 that moves a probability by up to a part in a
hundred, and where a random number lies between the two a completion takes another way. Says how often; times nothing.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_grpo.bench.machine import line_of, machine
from jax_grpo.config import Config, load_config
from jax_grpo.loading import load_policy
from jax_grpo.programs import context, make_programs
from jax_grpo.prompts import PromptDataset, load_positions
from jax_grpo.rollout import encode_prompts
from jax_grpo.tasks import make_task

DTYPES = ("float32", "bfloat16")


def completions(config: Config, prompts: int, at_once: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask [P, G, C] of the first prompts' completions, `at_once` prompts in a batch, all of one width."""
    policy = load_policy(config.model, config.seed, context(config))
    task = make_task(config.task)
    try:
        dataset = PromptDataset(load_positions(config.prompts, config.seed), config.seed)
        asked = [task.prompt(position, number) for number, position in dataset.batch(0, prompts)]
        generate = make_programs(config, policy.graphdef, policy.tokenizer, task).generate
    finally:
        task.close()
    tokens = encode_prompts([prompt.text for prompt in asked], policy.tokenizer, config.prompts.max_prompt_tokens)
    states = np.array([prompt.start_state for prompt in asked], np.int32)
    ids, masks = [], []
    for first in range(0, prompts, at_once):
        rows = slice(first, first + at_once)
        numbers = np.arange(prompts, dtype=np.int32)[rows]
        found = generate(
            policy.params, tokens.ids_PT[rows], tokens.mask_PT[rows], states[rows], numbers, config.seed, jnp.int32(0)
        )
        ids.append(np.asarray(found.completion_ids_PGC))
        masks.append(np.asarray(found.completion_mask_PGC))
    return np.concatenate(ids), np.concatenate(masks)


def compared(config: Config, prompts: int, at_once: int) -> dict[str, Any]:
    """Completions, and how many of them are not token for token the same."""
    (ids_PGC, mask_PGC), (few_ids_PGC, few_mask_PGC) = (completions(config, prompts, n) for n in (prompts, at_once))
    same_PGC = (mask_PGC == few_mask_PGC) & ((ids_PGC == few_ids_PGC) | (mask_PGC == 0))
    differ = int((~same_PGC.all(-1)).sum())
    return {"completions": same_PGC[..., 0].size, "differ": differ, "tokens": float(mask_PGC.sum(-1).mean())}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.bench.batch_dependence", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--config", required=True, help="of a run; any --section.key value overrides it")
    parser.add_argument("--prompts", type=int, default=32, help="of the one batch")
    parser.add_argument("--at-once", type=int, default=4, help="prompts of each of the others")
    parser.add_argument("--json", metavar="FILE")
    arguments, overrides = parser.parse_known_args(argv)
    if not 0 < arguments.at_once < arguments.prompts:
        parser.error(f"--at-once {arguments.at_once}: expected at least 1 and fewer than --prompts {arguments.prompts}")
    command = f"python -m jax_grpo.bench.batch_dependence {' '.join(sys.argv[1:] if argv is None else argv)}"
    record: dict[str, Any] = {"command": command, "machine": machine(), "dtypes": {}}
    print(
        f"# {command}\n# {line_of(record['machine'])}\n| computed in | completions | tokens each | differ |\n|---|---|---|---|"
    )
    for dtype in DTYPES:
        config = load_config(arguments.config, [*overrides, "--model.compute_dtype", dtype])
        found = record["dtypes"][dtype] = compared(config, arguments.prompts, arguments.at_once)
        share = found["differ"] / found["completions"]
        print(
            f"| {dtype} | {found['completions']} | {found['tokens']:.1f} | {found['differ']} ({share:.1%}) |",
            flush=True,
        )
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
