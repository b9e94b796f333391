"""What each setting that saves memory saves: the update of a config compiled for a target, one setting changed at a time.

    JAX_PLATFORMS=cpu python -m jax_grpo.bench.knobs --config configs/rookworld_4090.yaml --target rtx4090 --json knobs.json

Bytes are of the device while the update runs, resident arrays included. Times are `bench.remat`'s, `update`'s and `optimiser`'s.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from jax_grpo.config import load_config
from jax_grpo.memory.largest import bytes_of

PALLAS = ("--lm_head.implementation", "pallas")
NARROW = ("--lm_head.chunk_vocab", "4096")
REMAT = ("--model.remat", "true")
HALF_MOMENT = ("--update.first_moment_dtype", "bfloat16")
OFFLOADED = ("--update.offload_optimizer", "true")
HALF_REFERENCE = ("--kl.reference_dtype", "bfloat16")
KNOBS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "update.micro_batches 1": ("--update.micro_batches", "1"),
    "update.micro_batches 8": ("--update.micro_batches", "8"),
    "update.micro_batches 16": ("--update.micro_batches", "16"),
    "model.remat": REMAT,
    "model.remat, remat_keeps matmuls": (*REMAT, "--model.remat_keeps", "matmuls"),
    "kl.reference_dtype bfloat16": HALF_REFERENCE,
    "update.first_moment_dtype bfloat16": HALF_MOMENT,
    "update.offload_optimizer": OFFLOADED,
    "lm_head.logits_dtype bfloat16": ("--lm_head.logits_dtype", "bfloat16"),
    "lm_head chunked": ("--lm_head.implementation", "chunked"),
    "lm_head chunked, chunk_vocab 4096": ("--lm_head.implementation", "chunked", *NARROW),
    "lm_head pallas": PALLAS,
    "lm_head pallas, chunk_vocab 4096": (*PALLAS, *NARROW),
    "all that save": (
        *REMAT,
        *HALF_REFERENCE,
        *HALF_MOMENT,
        *OFFLOADED,
        *PALLAS,
        *NARROW,
        "--update.micro_batches",
        "16",
    ),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.bench.knobs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--target", default="rtx4090")
    parser.add_argument("--knobs", help=f"separated by semicolons: {'; '.join(KNOBS)}")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args(argv)
    names = [name.strip() for name in arguments.knobs.split(";")] if arguments.knobs else list(KNOBS)
    if unknown := [name for name in names if name not in KNOBS]:
        raise SystemExit(f"--knobs {unknown[0]!r}: expected some of {'; '.join(KNOBS)}")
    command = "python -m jax_grpo.bench.knobs " + " ".join(sys.argv[1:] if argv is None else argv)
    record: dict[str, Any] = {"command": command, "target": arguments.target, "knobs": {}}
    print("| setting | device, GB | against the first, MB | compiled in s |\n|---|---|---|---|")
    for name in names:
        started = time.perf_counter()
        needed = bytes_of(load_config(arguments.config, KNOBS[name]), "update", arguments.target)
        seconds = time.perf_counter() - started
        record["knobs"][name] = {"overrides": KNOBS[name], "bytes": needed, "compile_s": seconds}
        change = (needed - record["knobs"][names[0]]["bytes"]) / 1e6
        print(f"| {name} | {needed / 1e9:.2f} | {change:+.0f} | {seconds:.1f} |", flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
