"""Heads that never hold all logits give the materialised head's loss, gradients, log-probabilities and entropies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import config, relative_error
from flax import nnx, struct
from jax.extend.core import jaxprs_in_params

from jax_grpo.batch import Batch
from jax_grpo.config import Config, ConfigError, load_config
from jax_grpo.config.model import ModelConfig
from jax_grpo.lm_head import FUSED_LOSSES, LM_HEADS
from jax_grpo.lm_head.loops import IDLE, LEARNS
from jax_grpo.lm_head.tiles import Tiling
from jax_grpo.model.architecture import Architecture
from jax_grpo.policy.named import load_policy
from jax_grpo.update import make_gradient
from torch_ref.compare import difference, relative_l2

B, S, H, V = 16, 6, 32, 131  # 96 tokens: one and a half tiles of 64; an odd vocabulary, padded to 256 rows
HEADS = {
    "chunked": {"implementation": "chunked", "chunk_tokens": 64},
    "chunked by vocabulary": {"implementation": "chunked", "chunk_tokens": 64, "chunk_vocab": 128},
    "pallas": {"implementation": "pallas", "chunk_tokens": 64},
    "pallas by vocabulary": {"implementation": "pallas", "chunk_tokens": 64, "chunk_vocab": 128},
}
SETTINGS = {
    "clip, k3": ({}, {}),
    "two-sided clip, k1, mismatch": ({"delta": 1.3, "mismatch_cap": 1.1}, {"estimator": "k1"}),
    "cispo, no KL": ({"name": "cispo", "epsilon_high": 1.1, "aggregation": "grpo"}, {"beta": 0.0}),
    "sapo, k2 corrected": ({"name": "sapo", "aggregation": "luspo"}, {"estimator": "k2", "importance_corrected": True}),
    "reinforce, entropy bonus, truncated masked": (
        {"name": "reinforce", "entropy_coefficient": 0.3, "mask_truncated": True},
        {"beta": 0.0},
    ),
    "clip, top-entropy mask, no KL": ({"entropy_quantile": 0.6, "aggregation": "dr_grpo"}, {"beta": 0.0}),
    "sequence level, k3": ({"importance_level": "sequence"}, {}),
    "DPPO, token mask": (
        {
            "name": "dppo_tv",
            "epsilon_high": 0.002,
            "mismatch_cap": 1.2,
            "mismatch_floor": 0.8,
            "mismatch_mode": "token_mask",
        },
        {},
    ),
    "GMPO, sequence mask": (
        {"name": "gmpo", "aggregation": "grpo", "mismatch_cap": 1.5, "mismatch_mode": "sequence_mask"},
        {},
    ),
    "VESPO, k1": ({"name": "vespo"}, {"estimator": "k1"}),
    "KL-Cov, no KL": ({"name": "kl_cov", "cov_share": 0.2, "cov_penalty": 0.5}, {"beta": 0.0}),
}


class HeadOnly(nnx.Module):
    """A policy whose hidden states are parameters: the head's two gradients without a transformer before it."""

    def __init__(self, hidden_BSH, embedding_VH, vocab_size: int, compute_dtype):
        self.hidden = nnx.Param(hidden_BSH)
        self.wte = nnx.Embed(*embedding_VH.shape, rngs=nnx.Rngs(0))
        self.wte.embedding = nnx.Param(embedding_VH)
        self.config = Architecture(vocab_size, 1, 1, embedding_VH.shape[1], 8)
        self.compute_dtype, self.vocabulary = compute_dtype, vocab_size

    @property
    def head_VH(self):
        return self.wte.embedding[...]


@struct.dataclass
class HeadTokens:
    index_B: jax.Array
    targets_BS: jax.Array

    def predictions(self, model):
        return model.hidden[...][self.index_B].astype(model.compute_dtype), self.targets_BS


def head_problem(dtype, compute_dtype=None, hidden=None, embedding=None, vocab_size=V):
    """(graphdef, params, batch): unequal masks, a group without signal, old log-probabilities on both sides of the clip."""
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(B, S, H)) if hidden is None else hidden
    rows, steps = hidden.shape[:2]
    embedding = rng.normal(size=(256, H)) * 0.4 if embedding is None else embedding
    model = HeadOnly(jnp.asarray(hidden, dtype), jnp.asarray(embedding, dtype), vocab_size, compute_dtype or dtype)
    graphdef, params = nnx.split(model, nnx.Param)
    targets = jnp.asarray(rng.integers(0, vocab_size, (rows, steps)), jnp.int32)
    logp, entropy = LM_HEADS["materialised"](
        jnp.asarray(hidden, dtype), jnp.asarray(embedding, dtype), targets, vocab_size=vocab_size, temperature=0.8
    )
    advantages = rng.normal(size=rows)
    advantages[4:8] = 0
    old, ref, sampling = (logp + 0.3 * rng.normal(size=logp.shape) for _ in range(3))
    mask = np.arange(steps) < rng.integers(1, steps + 1, (rows, 1))
    batch = Batch(
        HeadTokens(jnp.arange(rows), targets),
        jnp.asarray(mask, jnp.int32),
        jnp.asarray(advantages, dtype),
        jnp.asarray(rng.random(rows) < 0.8),
        # Where masked, anything may stand.
        *(jnp.asarray(np.where(mask, x, np.nan), dtype) for x in (old, ref, sampling)),
        entropy_BS=entropy.astype(dtype),
    )
    return graphdef, params, batch


def settings(setting: str, **sections) -> Config:
    objective, kl = SETTINGS[setting]
    rollout = {"group_size": 4, "max_new_tokens": S, "temperature": 0.8}
    return config(objective=objective, kl=kl, rollout=rollout, **sections)


@functools.cache
def reference(setting: str, dtype: str, compute_dtype: str, parts: int = 1):
    return gradient(setting, {"implementation": "materialised"}, dtype, compute_dtype, parts)


def gradient(setting: str, head: dict, dtype: str, compute_dtype: str, parts: int = 1):
    graphdef, params, batch = head_problem(jnp.dtype(dtype), jnp.dtype(compute_dtype))
    if SETTINGS[setting][1].get("beta") == 0:
        batch = dataclasses.replace(batch, ref_logp_BS=None)
    update = {"learning_rate": 1e-3, "micro_batches": parts}
    found = jax.jit(make_gradient(graphdef, settings(setting, lm_head=head, update=update).learning()))(
        params, batch, jnp.asarray(0.1, jnp.promote_types(dtype, jnp.float32))
    )
    return jax.tree.map(np.asarray, (*found, batch.mask_BS))


def compare(found, wanted, tolerance: float, why: str):
    (loss, grads, logp, entropy, mask), (ref_loss, ref_grads, ref_logp, ref_entropy, _) = found, wanted
    errors = {
        "loss": relative_l2("loss", loss, ref_loss),
        "gradients": relative_error(grads, ref_grads),
        "logp": difference("logp", np.where(mask, logp, 0), np.where(mask, ref_logp, 0)),
        "entropy": difference("entropy", np.where(mask, entropy, 0), np.where(mask, ref_entropy, 0)),
    }
    print(", ".join(f"{name} {error:.1e}" for name, error in errors.items()), f"(tolerance {tolerance:.0e}: {why})")
    assert all(np.abs(g).max() > 1e-4 for g in jax.tree.leaves(ref_grads)), "the reference has a gradient"
    # Tokens that `mask_truncated` leaves out are idle in a fused head: nobody reads their log-probabilities.
    assert errors["loss"] < tolerance and errors["gradients"] < tolerance
    return errors


# Each setting with one of the heads by default, in turn; with the others when slow tests run.
EVERY = [
    pytest.param(setting, head, marks=[pytest.mark.slow] if (row - column) % len(HEADS) else [])
    for row, setting in enumerate(SETTINGS)
    for column, head in enumerate(HEADS)
]


@pytest.mark.default_cases(
    "DPPO, token mask-pallas by vocabulary",
    "GMPO, sequence mask-chunked",
    "KL-Cov, no KL-pallas",
    "cispo, no KL-pallas",
    "clip, k3-chunked",
    "clip, top-entropy mask, no KL-chunked by vocabulary",
)
@pytest.mark.parametrize(("setting", "head"), EVERY)
def test_every_objective_has_the_materialised_heads_loss_and_gradients(setting, head, x64):
    errors = compare(
        gradient(setting, HEADS[head], "float64", "float64"), reference(setting, "float64", "float64"), 1e-9, "float64"
    )
    if "truncated" not in setting:
        assert errors["logp"] < 1e-9 and errors["entropy"] < 1e-9


def test_without_cached_old_logprobs_the_current_ones_are_held_constant(x64):
    graphdef, params, batch = head_problem(jnp.float64)
    batch = dataclasses.replace(batch, old_logp_BS=None)
    found = [
        (
            *jax.jit(make_gradient(graphdef, settings("clip, k3", lm_head=head).learning()))(params, batch, 0.1),
            batch.mask_BS,
        )
        for head in (HEADS["chunked"], {"implementation": "materialised"})
    ]
    compare(*found, 1e-9, "float64")


@pytest.mark.slow_cases("chunked")
@pytest.mark.parametrize("head", ["chunked", "pallas by vocabulary"])
def test_micro_batches_and_float32_change_nothing_but_rounding(head):
    errors = compare(
        gradient("clip, k3", HEADS[head], "float32", "float32", parts=2),
        reference("clip, k3", "float32", "float32"),
        1e-5,
        "float32 sums of 131 terms in another order",
    )
    assert errors["logp"] < 2e-5 and errors["entropy"] < 2e-5


@pytest.mark.parametrize("head", ["chunked by vocabulary", "pallas"])
def test_bfloat16_compute_differs_by_the_rounding_of_the_logits_gradient(head):
    errors = compare(
        gradient("clip, k3", HEADS[head], "float32", "bfloat16"),
        reference("clip, k3", "float32", "bfloat16"),
        1e-2,
        "2^-8 of each element of the logits' gradient and of the hidden states' gradient",
    )
    assert errors["logp"] < 2e-5, "logits are float32 either way"


@pytest.mark.slow
@pytest.mark.parametrize("head", ["chunked", "pallas by vocabulary"])
def test_trained_weights_agree_too(head):
    policy = load_policy(ModelConfig(weights="packaged:rook-small", tokenizer="chess"), 0, 64)
    model = nnx.merge(policy.graphdef, policy.params)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, (B, S)), jnp.int32)
    hidden = model(ids, jnp.ones_like(ids))
    graphdef, params, batch = head_problem(
        jnp.float32, hidden=hidden, embedding=model.head_VH, vocab_size=model.config.vocab_size
    )
    found = [
        jax.jit(make_gradient(graphdef, settings("clip, k3", lm_head=lm_head).learning()))(
            params, batch, jnp.float32(0.1)
        )
        for lm_head in (HEADS[head], {"implementation": "materialised"})
    ]
    errors = compare(*((*f, batch.mask_BS) for f in found), 1e-4, "float32, logits of trained size")
    assert errors["logp"] < 1e-4


def simple_loss(rows, logp_C, entropy_C):
    weight_C, bonus_C, scale = rows
    return scale * (weight_C * logp_C + bonus_C * entropy_C)


def simple_problem(tokens: int = 192):
    rng = np.random.default_rng(5)
    hidden, embedding = rng.normal(size=(1, tokens, H)), rng.normal(size=(256, H))
    rows = tuple(jnp.asarray(rng.normal(size=tokens)) for _ in range(2))
    return jnp.asarray(hidden), jnp.asarray(embedding), jnp.asarray(rng.integers(0, V, (1, tokens)), jnp.int32), rows


def simple_gradient(head, hidden, embedding, targets, work, rows, **arguments):
    def loss(hidden, embedding):
        value, *aux = FUSED_LOSSES[head](
            hidden,
            embedding,
            targets,
            work,
            simple_loss,
            (*rows, jnp.asarray(2.0)),
            vocab_size=V,
            temperature=1.3,
            **arguments,
        )
        return value, aux

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, embedding)


@pytest.mark.parametrize("tiling", [Tiling(64), Tiling(64, 128)])
def test_idle_tokens_beyond_the_last_working_tile_are_never_read(tiling, x64):
    hidden, embedding, targets, rows = simple_problem()
    learns = np.random.default_rng(6).permutation(192) < 64
    work = jnp.where(learns, LEARNS, IDLE)[None]
    hidden = jnp.where(learns[None, :, None], hidden, jnp.nan)
    (value, (logp, _)), grads = simple_gradient("chunked", hidden, embedding, targets, work, rows, tiling=tiling)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)
    assert (np.asarray(logp)[0][~learns] == 0).all() and (np.asarray(grads[0])[0][~learns] == 0).all()
    assert (np.asarray(grads[0])[0][learns] != 0).any(axis=1).all()


@pytest.mark.parametrize("head", ["chunked", "pallas"])
@pytest.mark.parametrize("tiling", [Tiling(64), Tiling(64, 128)], ids=["rows", "columns"])
def test_the_embeddings_gradient_is_summed_wider_than_bfloat16(head, tiling):
    """One tile of tokens, so that nothing but the sum over them can fill the bits behind bfloat16's eight."""
    hidden, embedding, targets, rows = (jax.tree.map(lambda x: x.astype(jnp.float32), x) for x in simple_problem(64))
    given = hidden.astype(jnp.bfloat16), embedding, targets.astype(jnp.int32), jnp.full((1, 64), LEARNS)
    _, (_, gradient) = simple_gradient(head, *given, rows, tiling=tiling)
    used = np.asarray(gradient, np.float32)[:V]
    assert (used != used.astype(jnp.bfloat16).astype(np.float32)).mean() > 0.5


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)


@pytest.mark.parametrize("head", HEADS)
def test_no_array_has_all_logits_and_no_matmul_has_float32_operands(head):
    """Read off the traced program, kernels included: 1024 tokens in tiles of 64, bfloat16 compute, float32 masters."""
    tokens = 1024
    hidden, embedding = jnp.zeros((1, tokens, H), jnp.bfloat16), jnp.zeros((256, H), jnp.float32)
    rows = (jnp.zeros(tokens), jnp.zeros(tokens))
    name, tiling = HEADS[head]["implementation"], Tiling(64, HEADS[head].get("chunk_vocab"))
    targets, work = jnp.zeros((1, tokens), jnp.int32), jnp.full((1, tokens), LEARNS)
    trace = jax.make_jaxpr(lambda h, e: simple_gradient(name, h, e, targets, work, rows, tiling=tiling))(
        hidden, embedding
    )
    equations = list(_equations(trace.jaxpr))
    dots = [e for e in equations if e.primitive.name == "dot_general"]
    assert len(dots) >= 3 and all({str(v.aval.dtype) for v in e.invars} == {"bfloat16"} for e in dots)
    sizes = [v.aval.size for e in equations for v in e.outvars if hasattr(v.aval, "size")]
    assert max(sizes) < tokens * V, "an array of [T, V]"
    assert not [e for e in equations if e.primitive.name.startswith("scatter") and V in e.outvars[0].aval.shape]


def test_bad_tilings_are_refused_before_anything_is_compiled(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(config().resolved_yaml())
    for key, value, words in (
        ("chunk_tokens", "100", "lm_head.chunk_tokens"),
        ("chunk_vocab", "100", "lm_head.chunk_vocab"),
        ("implementation", "fused", "lm_head.implementation is 'fused'; expected one of"),
        ("logits_dtype", "bfloat16", "lm_head.logits_dtype bfloat16 needs model.compute_dtype bfloat16; it is float32"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(str(path), [f"--lm_head.{key}", value])
