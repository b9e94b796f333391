"""What the installed JAX makes of the Pallas kernels: a row a kernel and card of the table in docs/results/launches/README.md.

    JAX_PLATFORMS=cpu python docs/experiments/compile_kernels.py

Not part of the package. Compiles for cards that need not be there (the extra `aot`) and compares the interpreted kernels with XLA's
own way on this CPU. Exit status 1 if a kernel does not compile, spills registers, or differs. Where jax_triton is installed
(`jax-triton`, and torch), the same of the kernels in Triton's language, whose interpreter needs a process of its own.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_grpo import triton as seam
from jax_grpo.bench import lm_head
from jax_grpo.lm_head import PALLAS
from jax_grpo.lm_head.loops import XLA
from jax_grpo.lm_head.tiles import Columns
from jax_grpo.memory.compile import CannotCompile, assembled, compile_program
from jax_grpo.memory.programs import Program
from jax_grpo.model.architecture import Architecture, Rope
from jax_grpo.model.attention import BLOCKS, KV, Seen, attend
from jax_grpo.model.decoder import Decoder

CARDS = ("rtx4090", "h200")
P, G, T, C = 8, 8, 80, 144  # configs/rookworld_4090.yaml
SHARED = {"num_kv_heads": 6, "rope": Rope(), "window": 128}  # a head of keys for two of queries
SIZES = Architecture(
    vocab_size=131, num_layers=1, num_heads=12, hidden_size=768, max_position_embeddings=1024, **SHARED
)
# Relative to the largest: of bfloat16's 8 bits two roundings more; an entropy is a difference of numbers of 20 nats.
CLOSE = {"float32": 1e-5, "bfloat16": 0.02}
DUMPS = "JAX_TRITON_DUMP_DIR"  # where jax_triton, which reads it once, writes a folder with PTX for each kernel


def head(name: str) -> Any:
    """The LM head's loss and gradients of the tiny problem."""
    shape = lm_head.SHAPES["tiny"]
    arrays = {key: jnp.asarray(x) for key, x in lm_head.arrays(shape, masked=0.25).items()}
    hidden_TH, embedding_VH = arrays.pop("hidden").astype(jnp.bfloat16), arrays.pop("embedding")
    return jax.jit(lm_head.step_of(name, shape))(hidden_TH, embedding_VH, arrays)


def decoding(
    kernel: bool, sizes: Architecture = SIZES, dtype: Any = jnp.bfloat16, group: int = G
) -> tuple[Any, tuple[Any, ...]]:
    """A decode step's attention in a model of one layer, and its arguments, of which the last is each prompt's padding."""
    how = {"compute_dtype": dtype, "decode_kernel": kernel}
    graphdef, params = nnx.split(Decoder(sizes, rngs=nnx.Rngs(0), **how), nnx.Param)
    rng = np.random.default_rng(0)
    shapes = [(P, sizes.kv_heads, T, 64)] * 2 + [(P, group, sizes.kv_heads, C - 1, 64)] * 2
    caches = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    token_PG = jnp.asarray(rng.integers(0, 131, (P, group)), jnp.int32)

    def step(params, token_PG, prompt_k, prompt_v, own_k, own_v, padding_P1):
        model, mask_PT = nnx.merge(graphdef, params), (jnp.arange(T) >= padding_P1).astype(jnp.int32)
        at_PG, done = jnp.broadcast_to(T + 100 - padding_P1, (P, group)), jnp.int32(100)
        return model.decode(token_PG, at_PG, [KV(prompt_k, prompt_v)], mask_PT, [[KV(own_k, own_v)]], done)

    return jax.jit(step), (params, token_PG, *caches, jnp.zeros((P, 1), jnp.int32))


def attention(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A layer's attention and its gradients in a group's layout, a head of keys for two of queries, and its arguments."""
    rng, heads = np.random.default_rng(0), 12
    shapes = [(P, G, C, heads, 64), *[(P, G, C, heads // 2, 64)] * 2, *[(P, T, heads // 2, 64)] * 2]
    at_PT, at_PGC = jnp.broadcast_to(jnp.arange(T), (P, T)), jnp.broadcast_to(T + jnp.arange(C), (P, G, C))

    def out(q, k, v, prompt_k, prompt_v):
        sets = [
            Seen(KV(prompt_k, prompt_v), at_PT, past=True, heads_first=False),
            Seen(KV(k, v), at_PGC, heads_first=False),
        ]
        return attend(q, "pge", at_PGC, sets, 8.0, blocks=BLOCKS[name])

    def both(*arrays):
        result, backwards = jax.vjp(out, *arrays)
        return result, backwards(result)

    return jax.jit(both), tuple(jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)


def difference(a: Any, b: Any) -> float:
    """The largest, relative to the largest number of each array."""
    pairs = [[np.asarray(x, np.float64) for x in pair] for pair in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def run_by_interpreter(*operands: jax.Array, kernel: Any, out_shape: Any, grid: Any, **settings: Any) -> Any:
    """`jax_triton.triton_call` on this CPU; Triton has read TRITON_INTERPRET when it was imported."""
    import torch

    shapes, tree = jax.tree.flatten(out_shape)
    aliases = {out: given for given, out in (settings.pop("input_output_aliases", None) or {}).items()}
    constants = {name: value for name, value in settings.items() if name.isupper()}

    def as_torch(x: np.ndarray) -> Any:
        bits = np.array(x).view(np.int16) if x.dtype == jnp.bfloat16 else np.array(x)
        return torch.from_numpy(bits).view(torch.bfloat16) if x.dtype == jnp.bfloat16 else torch.from_numpy(bits)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        arrays = [np.asarray(x) for x in arrays]
        empty = [np.full(one.shape, 77, one.dtype) for one in shapes]  # what a kernel forgets to write is no 0
        results = [as_torch(arrays[aliases[i]] if i in aliases else x) for i, x in enumerate(empty)]
        kernel[grid](*map(as_torch, arrays), *results, **constants)
        bits = [x.view(torch.int16) if x.dtype == torch.bfloat16 else x for x in results]
        return [x.numpy().view(one.dtype) for x, one in zip(bits, shapes, strict=True)]

    return jax.tree.unflatten(tree, jax.pure_callback(run, shapes, *operands))


def rows_of(kernels: Any, dtype: Any) -> Any:
    """Statistics, losses and gradients of rows of a padded vocabulary, in three blocks, at a temperature."""
    rng, columns = np.random.default_rng(0), Columns(4200, 0.7)
    logits_CV = jnp.asarray(4 * rng.normal(size=(8, 4224)), dtype)
    targets_C, weights_C = (
        jnp.asarray(rng.integers(0, 4200, 8), jnp.int32),
        jnp.asarray(rng.normal(size=8), jnp.float32),
    )

    def token_loss(weights_C, logp_C, entropy_C):
        return weights_C * jnp.exp(0.1 * logp_C) - 0.01 * entropy_C**2

    both = kernels.differentiate(logits_CV, targets_C, weights_C, token_loss, columns, dtype)
    return kernels.measure(logits_CV, targets_C, columns), both


def step_of(kernel: bool, sizes: Architecture, dtype: Any) -> Any:
    """A decode step after left-padded prompts, by parameters none of which is 0."""
    step, (params, *arguments, padding_P1) = decoding(kernel, sizes, dtype, 2)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), params)
    return step(params, *arguments, padding_P1 + 9 * jnp.arange(P)[:, None])


def judge() -> None:
    """Prints as JSON, by kernel and dtype, how far kernels in Triton's language are from XLA's own way, and from Pallas'."""
    import jax_triton
    import triton.language as tl
    from triton.runtime import interpreter

    cuts_bits_off = interpreter._convert_float

    def to_nearest(x: np.ndarray, given: Any, wanted: Any, rounding: Any) -> np.ndarray:
        """As cards round: the kernels' PTX has `cvt.rn.bf16.f32`."""
        if wanted == tl.bfloat16:
            return x.astype(jnp.bfloat16).view(np.uint16)
        return cuts_bits_off(x, given, wanted, rounding)

    interpreter._convert_float, jax_triton.triton_call = to_nearest, run_by_interpreter
    shared = dataclasses.replace(SIZES, num_heads=4, num_kv_heads=2, hidden_size=256)  # the interpreter is slow
    plain = dataclasses.replace(shared, **dict.fromkeys(SHARED))  # GPT-2: a bias, no window, keys for each head
    errors: dict[str, list[float]] = {}
    for dtype in CLOSE:
        number = jnp.dtype(dtype)
        cases = [("lm_head", partial(rows_of, PALLAS, number), partial(rows_of, XLA, number))]
        for sizes in (shared, plain):
            ways = [partial(step_of, by, sizes, number) for by in (True, False)]
            cases.append(("decode_attention", *ways))
        if dtype == "bfloat16":
            cases.append(("lm_head", partial(head, "pallas-bf16"), partial(head, "materialised")))
        for name, by_kernels, by_xla in cases:
            with mock.patch.object(seam, "backend", lambda: "jax_triton"):
                ours = by_kernels()
            both = [difference(ours, other()) for other in (by_xla, by_kernels)]
            before = errors.get(f"{name} {dtype}", [0.0, 0.0])
            errors[f"{name} {dtype}"] = list(map(max, before, both))
    print(json.dumps(errors))


def in_tritons_language(programs: dict[str, Program]) -> bool:
    """Prints the rows of the kernels that jax_triton compiles; whether they are fine."""
    import jax_triton

    command = [sys.executable, __file__, "interpreted"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, check=True)
    errors = json.loads(done.stdout)
    fine = all(max(both) < CLOSE[name.split()[1]] for name, both in errors.items())
    version, folder = f"{jax.__version__}, jax_triton {jax_triton.__version__}", Path(os.environ[DUMPS])
    for name, program in programs.items():
        both = "; ".join("{}: {:.1e}, {:.1e}".format(dtype, *errors[f"{name} {dtype}"]) for dtype in CLOSE)
        for card in CARDS:
            before = set(folder.iterdir())
            with mock.patch.object(seam, "backend", lambda: "jax_triton"):
                compile_program(card, program)
            made = []
            for dumped in set(folder.iterdir()) - before:
                shared = next(dumped.glob("*.compile_info")).read_text().split()[-1]
                made += [dataclasses.replace(one, shared=int(shared)) for one in assembled(dumped, "", card)]
            fine &= bool(made) and not any(one.spilled for one in made)
            made = sorted(made, key=lambda one: one.name)
            print(f"| {version} | {card} | {row(made)} | {both} |", flush=True)
    return fine


def row(kernels: Any) -> str:
    """Names of kernels, and what each needs."""
    names = ", ".join(one.name for one in kernels)
    figures = (f"{one.registers} registers, {one.shared} bytes shared, {one.spilled} spilled" for one in kernels)
    return f"{names or 'no such kernel'} | {'; '.join(figures)}"


def main() -> None:
    (step, arguments), (layer, queries) = decoding(True), attention("pallas")
    s2 = lm_head.SHAPES["s2"]
    kernels = {
        "lm_head": (
            difference(head("pallas-bf16"), head("materialised")),
            Program("head", jax.jit(lm_head.step_of("pallas-bf16", s2)), lm_head.abstract(s2)),
        ),
        "decode_attention": (
            difference(step(*arguments), decoding(False)[0](*arguments)),
            Program("decode", step, jax.eval_shape(lambda *x: x, *arguments)),
        ),
        "attention_": (
            difference(layer(*queries), attention("full")[0](*queries)),
            Program("attention", layer, jax.eval_shape(lambda *x: x, *queries)),
        ),
    }
    fine = True
    for name, (error, program) in kernels.items():
        for card in CARDS:
            try:
                compiled = compile_program(card, program, kernels=name).kernels
                made = "; ".join(
                    f"{one.registers} registers, {one.shared} bytes shared, {one.spilled} spilled" for one in compiled
                )
                fine &= bool(compiled) and not any(one.spilled for one in compiled)
            except (CannotCompile, jax.errors.JaxRuntimeError, NotImplementedError) as failure:
                made, fine = str(failure).splitlines()[0], False
            print(f"| {jax.__version__} | {card} | {name} | {made or 'no such kernel'} | {error:.1e} |", flush=True)
        fine &= error < CLOSE["bfloat16"]
    if importlib.util.find_spec("jax_triton") and importlib.util.find_spec("triton"):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {DUMPS: folder}):
            step, arguments = decoding(True)  # compiled anew, with other kernels
            by_name = {
                "lm_head": Program("head", jax.jit(lm_head.step_of("pallas-bf16", s2)), lm_head.abstract(s2)),
                "decode_attention": Program("decode", step, jax.eval_shape(lambda *x: x, *arguments)),
            }
            fine &= in_tritons_language(by_name)
    else:
        print("jax_triton is not installed: none of its kernels is compiled or compared")
    sys.exit(not fine)


if __name__ == "__main__":
    judge() if sys.argv[1:] == ["interpreted"] else main()
