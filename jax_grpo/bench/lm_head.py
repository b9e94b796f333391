"""Memory of LM heads compiled for a GPU, which need not be there; and on a device that is, their time and peak bytes.

Each variant runs in a process of its own, so that no other's arrays, workspace or peak are in its numbers. The memory is that
of one program, from arguments to gradients; time is the median of the steps, each waited for.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jax_grpo import targets
from jax_grpo.bench.machine import line_of, machine
from jax_grpo.process_failure import failure

PARAM_DTYPES = ("bfloat16", "float32")
STEPS = 20
MASKED = (0.0, 0.5)
PEERS = ("torch-compile", "liger")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grpo.bench.lm_head", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--shape", default="s2", help="s1, s2, or T,H,V")
    parser.add_argument("--target", default="local", choices=[*targets.known(), "local"])
    parser.add_argument("--implementation", help="comma-separated variants; all of them otherwise")
    parser.add_argument("--param-dtype", default="bfloat16", choices=PARAM_DTYPES, help="of the embedding")
    parser.add_argument("--json", metavar="FILE", help="where to write the raw data")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def compiled_record(name: str, shape: Any, param_dtype: str, target: str) -> dict[str, Any]:
    """What a variant's loss and gradients need on the target, in bytes."""
    import jax
    import jax.numpy as jnp

    from jax_grpo import aot
    from jax_grpo.bench.lm_head_variants import VARIANTS, abstract

    step = jax.value_and_grad(VARIANTS[name](shape), argnums=(0, 1))
    report = aot.compile_for(target, step, *abstract(shape, jnp.bfloat16, jnp.dtype(param_dtype))).report
    return {
        "arguments": report.arguments,
        "outputs": report.outputs,
        "temporaries": report.temporaries,
        "total": report.total,
        "largest": [[buffer.size, buffer.kind, *buffer.shapes] for buffer in report.buffers[:5]],
        "float32_dots": len(report.wide_dots),
        "kernels": [vars(kernel) for kernel in report.kernels],
    }


def measured_record(name: str, shape: Any, param_dtype: str) -> dict[str, Any]:
    """Medians in milliseconds and peak bytes of a variant on the first device here; checks that it computed something."""
    import jax
    import jax.numpy as jnp

    from jax_grpo.bench.lm_head_variants import VARIANTS, problem
    from jax_grpo.flops import BACKWARD, head

    device = jax.devices()[0]
    record: dict[str, Any] = {"device": device.device_kind}
    for masked in MASKED:
        hidden_TH, embedding_VH, rows = problem(shape, jnp.bfloat16, jnp.dtype(param_dtype), masked)
        step = jax.jit(jax.value_and_grad(VARIANTS[name](shape), argnums=(0, 1)))
        _, grads = jax.block_until_ready(step(hidden_TH, embedding_VH, rows))
        norms = [float(jnp.linalg.norm(g.astype(jnp.float32))) for g in grads]
        assert all(0 < norm < float("inf") for norm in norms), f"{name}: gradient norms {norms}"
        milliseconds = []
        for _ in range(STEPS):
            grads = None  # the previous gradients must not be alive beside the next
            started = time.perf_counter()
            _, grads = jax.block_until_ready(step(hidden_TH, embedding_VH, rows))
            milliseconds.append(1e3 * (time.perf_counter() - started))
        flops = (1 + BACKWARD) * head((1 - masked) * shape.tokens, shape.width, shape.rows)
        median = statistics.median(milliseconds)
        record[f"masked {masked:.0%}"] = {
            "median_ms": median,
            "min_ms": min(milliseconds),
            "max_ms": max(milliseconds),
            "teraflops_per_second_of_three_matmuls": flops / median * 1e-9,
            "gradient_norms": norms,
        }
    # Absent on the CPU, whose allocator keeps no such count.
    record["peak_bytes_in_use"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return record


def parse_shape(text: str) -> Any:
    """A `Shape` by name, or of T,H,V with the embedding padded as the model pads it.

    Raises:
        ValueError: neither; says what was expected.
    """
    from jax_grpo.bench.lm_head_variants import SHAPES, Shape
    from jax_grpo.layers import VOCAB_MULTIPLE

    if text in SHAPES:
        return SHAPES[text]
    try:
        tokens, width, vocab = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"--shape {text!r}: expected {', '.join(SHAPES)} or T,H,V, as in 4096,768,50257") from None
    if min(tokens, width, vocab) < 1:
        raise ValueError(f"--shape {text!r}: T, H and V must be at least 1")
    return Shape(tokens, width, -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, vocab)


def run_child(arguments: argparse.Namespace) -> dict[str, Any]:
    """One variant's record, in this process."""
    shape = parse_shape(arguments.shape)
    if arguments.child in PEERS:
        from jax_grpo.bench.lm_head_peers import peer_record

        return peer_record(arguments.child, shape, arguments.param_dtype, STEPS, MASKED)
    if arguments.target == "local":
        return measured_record(arguments.child, shape, arguments.param_dtype)
    return compiled_record(arguments.child, shape, arguments.param_dtype, arguments.target)


def run_variant(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One variant's record, from a fresh process; `error` when it has none."""
    command = [sys.executable, "-m", "jax_grpo.bench.lm_head", "--child", name, "--shape", arguments.shape]
    command += ["--target", arguments.target, "--param-dtype", arguments.param_dtype]
    environment = dict(os.environ)
    if arguments.target != "local":
        environment["JAX_PLATFORMS"] = "cpu"  # with a GPU platform asked for, JAX looks for a driver first
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {"error": failure(done.stderr, done.returncode)}
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, record: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in record:
        return f"{name:20} {record['error'][:200]}"
    if "total" in record:
        sizes = "".join(f"{record[part] / 1e6:10.0f}" for part in ("arguments", "outputs", "temporaries", "total"))
        kernels = "; ".join(
            f"{k['name']} {k['registers']} regs, {k['spilled']} B spilled, {k['shared']} B shared"
            for k in record["kernels"]
        )
        return f"{name:20}{sizes}{record['float32_dots']:10}  {kernels}"
    times = "".join(f"{record[f'masked {masked:.0%}']['median_ms']:12.2f}" for masked in MASKED)
    peak = record["peak_bytes_in_use"]
    return f"{name:20}{times}{'-' if peak is None else f'{peak / 1e6:.0f}':>12}"


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    try:
        if arguments.child:
            print(json.dumps(run_child(arguments)))
            return
        parse_shape(arguments.shape)
        from jax_grpo.bench.lm_head_variants import VARIANTS

        known = [*VARIANTS, *PEERS]
        chosen = arguments.implementation.split(",") if arguments.implementation else list(VARIANTS)
        if not arguments.implementation and arguments.target == "local":
            chosen += PEERS
        if unknown := [name for name in chosen if name not in known]:
            raise ValueError(f"--implementation {unknown[0]!r}: expected some of {', '.join(known)}")
    except ValueError as error:
        raise SystemExit(f"ValueError: {error}") from error
    local = arguments.target == "local"
    print(f"# {sys.executable} -m jax_grpo.bench.lm_head {' '.join(sys.argv[1:] if argv is None else argv)}")
    print(f"# {line_of(machine())}")
    columns = (
        [f"masked {m:.0%} ms" for m in MASKED] + ["peak MB"]
        if local
        else ["arguments", "outputs", "temps", "total MB", "f32 dots"]
    )
    print(f"{'variant':20}" + "".join(f"{column:>{14 if local else 10}}" for column in columns))
    records = {}
    for name in chosen:
        records[name] = run_variant(name, arguments)
        print(row(name, records[name]), flush=True)
    if arguments.json:
        import jax

        about = {
            "shape": arguments.shape,
            "target": arguments.target,
            "param_dtype": arguments.param_dtype,
            "jax": jax.__version__,
            "machine": machine(),
        }
        Path(arguments.json).write_text(json.dumps(about | {"variants": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
