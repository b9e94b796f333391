"""How far each LM head's gradients are from exact ones: float32 logits against logits rounded to bfloat16.

    XLA_FLAGS=--xla_allow_excess_precision=false python -m jax_grpo.bench.lm_head_accuracy

On the CPU, XLA leaves a rounding out where it can; the flag keeps it, as a GPU does by storing the logits.
"""

import jax
import jax.numpy as jnp

from jax_grpo.bench.lm_head_variants import VARIANTS, Shape, problem

SHAPE = Shape(tokens=1024, width=256, rows=4096, vocab_size=4096)
COMPARED = ("best", "materialised", "chunked", "chunked-small", "chunked-bf16")


def main() -> None:
    hidden_TH, embedding_VH, rows = problem(SHAPE, jnp.bfloat16, jnp.float32, masked=0.5)
    embedding_VH = embedding_VH.astype(jnp.bfloat16).astype(jnp.float32)  # the same products in every precision

    def gradients(name: str, dtype):
        return jax.jit(jax.grad(VARIANTS[name](SHAPE), argnums=(0, 1)))(hidden_TH.astype(dtype), embedding_VH, rows)

    with jax.default_matmul_precision("highest"):
        exact = gradients("materialised", jnp.float32)
    print("relative L2 error of the gradients in   hidden states   embedding")
    for name in COMPARED:
        found = gradients(name, jnp.bfloat16)
        errors = [
            float(jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y))
            for x, y in zip(found, exact, strict=True)
        ]
        print(f"{name:40}{errors[0]:13.4f}{errors[1]:12.4f}")


if __name__ == "__main__":
    main()
