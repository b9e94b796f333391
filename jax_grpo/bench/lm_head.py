"""LM heads: their memory compiled for a GPU, which need not be there; and on a device that is, their time and peak, with peers.

    python -m jax_grpo.bench.lm_head --shape s2 --target rtx4090 --json s2.json
    python -m jax_grpo.bench.lm_head --shape s2 --target local --json s2.json

A head gives GRPO's clipped loss, summed over tokens and divided by T, and its gradients in hidden states and embedding.
`materialised` is what trainers write, `best` a plain head written as well as it can be. Peers are PyTorch's compiled plain head and
Liger's fused linear GRPO loss, which needs a GPU.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_grpo.bench.machine import finished, milliseconds
from jax_grpo.bench.problems import ADVANTAGE
from jax_grpo.bench.runner import Bench, NotHere, Prepared, main, torch_device
from jax_grpo.config.objectives import Clip
from jax_grpo.config.sections import VOCAB_MULTIPLE
from jax_grpo.lm_head import FUSED_LOSSES, LM_HEADS
from jax_grpo.lm_head.loops import IDLE, LEARNS
from jax_grpo.lm_head.tiles import WHOLE, Tiling
from jax_grpo.memory.compile import compile_program
from jax_grpo.memory.dumps import wide_dots
from jax_grpo.memory.programs import Program
from jax_grpo.model import flops
from jax_grpo.objective.surrogates import surrogate
from jax_grpo.system import devices

OBJECTIVE = Clip()
SEQUENCE = 128  # tokens that share an advantage
STEPS = 20  # of the problem with half of its tokens masked
LOCAL = "local"  # the target that heads run on and are timed
Rows = dict[str, Any]  # of each token [T]: `targets`, `advantages`, `old_logp` and `mask`, of JAX or of PyTorch


class Shape(NamedTuple):
    """T tokens, H width, V rows of the embedding, of which `vocab_size` are tokens, in a dtype; the device compiled for."""

    tokens: int
    width: int
    rows: int
    vocab_size: int
    param_dtype: str = "bfloat16"
    target: str = LOCAL


SHAPES = {
    "s2": Shape(16384, 768, 50304, 50257),
    "s1": Shape(8192, 4096, 151936, 151936),
    "tiny": Shape(256, 64, 256, 256),
}


def parse_shape(text: str) -> Shape:
    """A shape of T,H,V with the embedding padded as the model pads it. A ValueError says what was expected."""
    try:
        tokens, width, vocab = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"--shape {text!r}: expected {', '.join(SHAPES)} or T,H,V, as in 4096,768,50257") from None
    if min(tokens, width, vocab) < 1:
        raise ValueError(f"--shape {text!r}: T, H and V must be at least 1")
    return Shape(tokens, width, -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, vocab)


def _best(hidden_1TH, embedding_VH, targets_1T, **_):
    """It takes padding rows for tokens, which costs it nothing."""
    logits_1TV = (hidden_1TH @ embedding_VH.astype(hidden_1TH.dtype).T).astype(jnp.float32)
    of_targets = jnp.arange(logits_1TV.shape[-1]) == targets_1T[..., None]
    return jnp.sum(jnp.where(of_targets, logits_1TV, 0), axis=-1) - jax.nn.logsumexp(logits_1TV, axis=-1), None


class Head(NamedTuple):
    """A way to call an implementation: a fused one is given the loss of each token, the others return log-probabilities."""

    implementation: str
    tiling: Tiling = WHOLE
    fused: bool = False


IMPLEMENTATIONS = LM_HEADS | {"best": _best}
SMALL, HALF = Tiling(tokens=4096, vocab=4096), Tiling(logits_dtype="bfloat16")
HEADS = {
    "materialised": Head("materialised"),
    "materialised-bf16": Head("materialised", HALF),
    "chunked": Head("chunked", fused=True),
    "chunked-bf16": Head("chunked", HALF, fused=True),
    "chunked-two-passes": Head("chunked"),
    "chunked-small": Head("chunked", SMALL, fused=True),
    "pallas": Head("pallas", fused=True),
    "pallas-bf16": Head("pallas", HALF, fused=True),
    "pallas-small": Head("pallas", SMALL, fused=True),
    "best": Head("best"),
}


def step_of(name: str, shape: Shape) -> Callable:
    """The head's loss and its gradients in hidden states and embedding."""
    head = HEADS[name]
    how = {"vocab_size": shape.vocab_size, "temperature": 1.0, "tiling": head.tiling}

    def losses(rows_C: Rows, logp_C: jax.Array, entropy_C: Any = None) -> jax.Array:
        """Clipped losses of tokens, each divided by the tokens of the batch."""
        loss_C = surrogate(logp_C, rows_C["old_logp"], rows_C["advantages"], rows_C["mask"], OBJECTIVE)
        return loss_C / shape.tokens

    def loss(hidden_TH: jax.Array, embedding_VH: jax.Array, rows: Rows) -> jax.Array:
        tokens = (hidden_TH[None], embedding_VH, rows["targets"][None])
        if not head.fused:
            return jnp.sum(losses(rows, IMPLEMENTATIONS[head.implementation](*tokens, **how)[0][0]))
        work_1T = jnp.where(rows["mask"] > 0, LEARNS, IDLE)[None]
        return FUSED_LOSSES[head.implementation](*tokens, work_1T, losses, rows, **how)[0]

    return jax.value_and_grad(loss, argnums=(0, 1))


def abstract(shape: Shape) -> tuple[Any, Any, Rows]:
    """Shapes and dtypes of a head's arguments."""
    hidden_TH = jax.ShapeDtypeStruct((shape.tokens, shape.width), jnp.bfloat16)
    embedding_VH = jax.ShapeDtypeStruct((shape.rows, shape.width), jnp.dtype(shape.param_dtype))
    rows = dict.fromkeys(("advantages", "old_logp", "mask"), jax.ShapeDtypeStruct((shape.tokens,), jnp.float32))
    return hidden_TH, embedding_VH, rows | {"targets": jax.ShapeDtypeStruct((shape.tokens,), jnp.int32)}


def arrays(shape: Shape, masked: float) -> dict[str, np.ndarray]:
    """The problem of every implementation, `masked` of its tokens without a loss; logits have standard deviation 2.

    Old log-probabilities are 0.3 nats and more off the true ones, so that both sides of the clip are met: their log-sum-exps are
    those of endlessly many normal logits.
    """
    rng, tokens = np.random.default_rng(0), shape.tokens
    hidden_TH = rng.standard_normal((tokens, shape.width), np.float32)
    embedding_VH = np.float32(2 / shape.width**0.5) * rng.standard_normal((shape.rows, shape.width), np.float32)
    targets_T = rng.integers(0, shape.vocab_size, tokens).astype(np.int32)
    logit_T = np.einsum("th,th->t", hidden_TH, embedding_VH[targets_T])
    variance_T = 4 / shape.width * np.square(hidden_TH).sum(-1)
    noise_T = np.float32(0.3) * rng.standard_normal(tokens, np.float32)
    advantages = ADVANTAGE + rng.standard_normal(-(-tokens // SEQUENCE), np.float32)
    return {
        "hidden": hidden_TH,
        "embedding": embedding_VH,
        "targets": targets_T,
        "advantages": np.repeat(advantages, SEQUENCE)[:tokens],
        "old_logp": (logit_T - np.log(shape.vocab_size) - variance_T / 2 + noise_T).astype(np.float32),
        "mask": (rng.random(tokens) >= masked).astype(np.float32),
    }


def _prepared(shape: Shape, step_with: Callable[[float], Callable[[], Any]], norm: Callable) -> Prepared:
    """A variant whose step, made for a share of masked tokens, returns the loss and both gradients; `norm` is theirs."""

    def check(result: Any) -> dict[str, float]:
        loss, gradients = result
        return {"loss": float(loss), "grad_norm": float(norm(gradients))}

    def after() -> dict[str, float]:
        step = step_with(0.5)
        finished(step())  # compiles
        return {"half_masked_ms": statistics.median(milliseconds(step, STEPS))}

    work = (1 + flops.BACKWARD) * flops.head(shape.tokens, shape.width, shape.rows)
    return Prepared(step_with(0.0), {"dtype": "bfloat16", "flops": work}, check, after)


def _jax(name: str, shape: Shape) -> Prepared | dict[str, Any]:
    if shape.target != LOCAL:
        return _compiled(name, shape)

    def step_with(masked: float) -> Callable[[], Any]:
        rows: Rows = {name: jnp.asarray(x) for name, x in arrays(shape, masked).items()}
        hidden_TH = rows.pop("hidden").astype(jnp.bfloat16)
        embedding_VH = rows.pop("embedding").astype(shape.param_dtype)
        return partial(jax.jit(step_of(name, shape)), hidden_TH, embedding_VH, rows)

    return _prepared(shape, step_with, lambda gradients: optax.tree.norm(optax.tree.cast(gradients, jnp.float32)))


def _compiled(name: str, shape: Shape) -> dict[str, Any]:
    """What a head's loss and gradients need on the target, in bytes, and its kernels; nothing runs."""
    jax.config.update("jax_platforms", "cpu")  # with a GPU platform asked for, JAX looks for a driver first
    program = Program(name, jax.jit(step_of(name, shape)), abstract(shape))
    report = compile_program(shape.target, program, kernels="lm_head")
    sizes = {size: getattr(report, size) for size in ("arguments", "outputs", "temporaries", "total")}
    dots = len(wide_dots(report.hlo))
    notes = [f"{size} {bytes_ / 1e6:.0f} MB" for size, bytes_ in sizes.items()] + [f"{dots} float32 matmuls"]
    kernel = "{name}: {registers} registers, {spilled} B spilled, {shared} B shared"
    return sizes | {
        "device_peak_bytes": report.total,
        "largest": [[live.size, live.place, live.shape] for live in report.live[:5]],
        "float32_dots": dots,
        "kernels": list(map(vars, report.kernels)),
        "notes": notes + [kernel.format_map(vars(facts)) for facts in report.kernels],
    }


def _torch_plain(shape: Shape, rows: Rows) -> Callable:
    import torch

    from torch_ref.objective import clip

    def loss(hidden_TH, embedding_VH):
        logits_TV = hidden_TH @ embedding_VH[: shape.vocab_size].T
        logp_TV = torch.log_softmax(logits_TV.float(), dim=-1)
        logp_T = logp_TV.gather(1, rows["targets"][:, None])[:, 0]
        loss_T = clip(torch.exp(logp_T - rows["old_logp"]), logp_T, rows["advantages"], OBJECTIVE)
        return (loss_T * rows["mask"]).sum() / shape.tokens

    return torch.compile(loss)


def _liger(shape: Shape, rows: Rows) -> Callable:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    head = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")
    by_sequence = {name: x.view(-1, SEQUENCE) for name, x in rows.items()}
    share = float(rows["mask"].mean())  # `bnpo` divides by the tokens with a loss, the others by all

    def loss(hidden_TH, embedding_VH):
        value, _ = head(
            _input=hidden_TH.view(-1, SEQUENCE, shape.width), lin_weight=embedding_VH[: shape.vocab_size],
            selected_token_ids=by_sequence["targets"], attention_mask=by_sequence["mask"],
            advantages=by_sequence["advantages"][:, 0], old_per_token_logps=by_sequence["old_logp"],
        )  # fmt: skip
        return value * share

    return loss


def _torch(make: Callable[[Shape, Rows], Callable], shape: Shape) -> Prepared:
    """A head of PyTorch's on the same problem.

    Raises ValueError: the tokens are no whole sequences; ImportError: the peer is not installed; NotHere: XLA's compiler compiles
    none of PyTorch's.
    """
    import torch
    from torch.nn.utils import get_total_norm

    if shape.target != LOCAL:
        raise NotHere("PyTorch's heads are not compiled for a device that is not here")
    device = torch_device()
    if shape.tokens % SEQUENCE:
        raise ValueError(f"{shape.tokens} tokens are no multiple of the peers' sequences of {SEQUENCE}")

    def step_with(masked: float) -> Callable[[], Any]:
        rows = {name: torch.from_numpy(x).to(device) for name, x in arrays(shape, masked).items()}
        hidden_TH = rows.pop("hidden").bfloat16().requires_grad_()
        embedding_VH = rows.pop("embedding").to(getattr(torch, shape.param_dtype)).requires_grad_()
        rows["targets"] = rows["targets"].long()
        loss = make(shape, rows)

        def step() -> Any:
            value = loss(hidden_TH, embedding_VH.to(hidden_TH.dtype))
            return value.detach(), torch.autograd.grad(value, (hidden_TH, embedding_VH))

        return step

    return _prepared(shape, step_with, lambda gradients: get_total_norm([x.float() for x in gradients]))


VARIANTS = {name: partial(_jax, name) for name in HEADS} | {
    "torch-compile": partial(_torch, _torch_plain),
    "liger": partial(_torch, _liger),
}
OPTIONS = {"target": (LOCAL, *devices.known())}
BENCH = Bench("jax_grpo.bench.lm_head", __doc__, VARIANTS, SHAPES, parse_shape, Shape._make, OPTIONS)

if __name__ == "__main__":
    main(BENCH)
