"""The optimiser step: invariant to cuts, to padding and to layout; guarded; its schedule and its direction."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from both import uncompiled
from conftest import TINY, config, model_logp, relative_error, tiny_model, training_batch
from flax import nnx

from jax_grpo import update as update_module
from jax_grpo.advantages import group_advantages
from jax_grpo.batch import GroupedTokens, minibatches, split
from jax_grpo.config.learning import AdvantageConfig, UpdateConfig
from jax_grpo.model.decoder import Decoder
from jax_grpo.objective import AGGREGATIONS
from jax_grpo.optimiser import adamw, reference_copy, schedule
from jax_grpo.update import TrainState, init_state, make_gradient, make_score, make_step, make_update

BETA = jnp.float32(0.1)


def _flat(batch):
    """The same batch with one row a completion, aligned to token positions."""
    width = batch.tokens.prompt_ids_PT.shape[1]

    def pad(x):
        return None if x is None else jnp.pad(x, ((0, 0), (width, 0)))

    names = ("mask_BS", "old_logp_BS", "ref_logp_BS", "sampling_logp_BS", "entropy_BS")
    return dataclasses.replace(batch, tokens=batch.tokens.flat(), **{name: pad(getattr(batch, name)) for name in names})


@pytest.mark.slow  # by default test_parity has both implementations agree at one and at two micro-batches
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_number_of_micro_batches_gives_the_same_gradient(aggregation, x64):
    graphdef, params = tiny_model(jnp.float64)
    batch = training_batch(graphdef, params, dtype=jnp.float64)
    results = []
    for parts in (1, 2, 4, 8):
        settings = config(
            objective={"aggregation": aggregation}, update={"learning_rate": 1e-3, "micro_batches": parts}
        )
        with uncompiled("float64", "layouts"):  # four programs of each aggregation would take a minute to compile
            results.append(make_gradient(graphdef, settings.learning())(params, batch, jnp.float64(0.1)))
    for loss, grads, *_ in results[1:]:
        error = relative_error(grads, results[0][1])
        print(
            f"{aggregation}: loss {abs(loss - results[0][0]):.1e}, gradients {error:.1e} (tolerance 1e-12: float64 rounding)"
        )
        assert abs(loss - results[0][0]) < 1e-12 and error < 1e-12
    assert optax.tree.norm(results[0][1]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        {"entropy_coefficient": 0.1, "importance_level": "sequence", "mask_truncated": True},
        {},
        {"entropy_coefficient": 0.1},
        {"importance_level": "sequence"},
        {"mask_truncated": True},
    ],
)
def test_grouped_and_flat_layouts_give_the_same_step(extra, x64):
    graphdef, params = tiny_model(jnp.float64)
    batch = dataclasses.replace(training_batch(graphdef, params, dtype=jnp.float64), stopped_B=jnp.arange(16) % 3 != 0)
    gradient = jax.jit(make_gradient(graphdef, config(objective=extra).learning()))
    loss, grads, logp, _ = gradient(params, batch, jnp.float64(0.1))
    flat_loss, flat_grads, flat_logp, _ = gradient(params, _flat(batch), jnp.float64(0.1))
    assert abs(loss - flat_loss) < 1e-12 and relative_error(grads, flat_grads) < 1e-11
    np.testing.assert_allclose(
        np.where(batch.mask_BS, logp, 0), np.where(batch.mask_BS, flat_logp[:, -6:], 0), atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["all", "dots"])
def test_recomputing_blocks_changes_neither_scores_nor_loss_nor_gradients(remat, x64):
    plain, params = tiny_model(jnp.float64)
    again, _ = tiny_model(jnp.float64, remat=remat)
    batch = training_batch(plain, params, dtype=jnp.float64)
    # Two micro-batches: blocks are recomputed inside a scan.
    settings = config(update={"learning_rate": 1e-3, "micro_batches": 2}).learning()
    results = [
        (
            make_score(graphdef, settings)(params, batch),
            jax.jit(make_gradient(graphdef, settings))(params, batch, 0.1),
        )
        for graphdef in (plain, again)
    ]
    (score, (loss, grads, *_)), (score_again, (loss_again, grads_again, *_)) = results
    error = relative_error(grads_again, grads)
    print(f"{remat}: loss {abs(loss - loss_again):.1e}, gradients {error:.1e} (tolerance 1e-12: float64 rounding)")
    assert abs(loss - loss_again) < 1e-12 and error < 1e-12 and optax.tree.norm(grads) > 1e-2
    np.testing.assert_allclose(score_again[0], score[0], atol=1e-12)


@pytest.mark.slow
def test_prompt_only_padding_changes_nothing(x64):
    graphdef, params = tiny_model(jnp.float64)
    batch = training_batch(graphdef, params, dtype=jnp.float64)
    tokens = batch.tokens
    wider = GroupedTokens(
        jnp.pad(tokens.prompt_ids_PT, ((0, 0), (7, 0)), constant_values=3),
        jnp.pad(tokens.prompt_mask_PT, ((0, 0), (7, 0))),
        tokens.completion_ids_PGC,
        tokens.completion_mask_PGC,
    )
    gradient = jax.jit(make_gradient(graphdef, config().learning()))
    loss, grads, *_ = gradient(params, batch, jnp.float64(0.1))
    wide_loss, wide_grads, *_ = gradient(params, dataclasses.replace(batch, tokens=wider), jnp.float64(0.1))
    # the position embedding of an extra padding column is not read by any real token: all gradients agree
    assert abs(loss - wide_loss) < 1e-12 and relative_error(wide_grads, grads) < 1e-12


@pytest.mark.slow
def test_raising_one_reward_raises_that_samples_logprob_and_no_other_groups_advantage():
    graphdef, params = tiny_model()
    batch = training_batch(graphdef, params)
    rewards = jnp.zeros(16).at[5].set(1.0)
    advantages, _ = group_advantages(rewards.reshape(4, 4), AdvantageConfig(scale="none"))
    assert (np.asarray(advantages)[[0, 2, 3]] == 0).all()
    batch = dataclasses.replace(batch, advantages_B=advantages.reshape(-1), old_logp_BS=None, ref_logp_BS=None)
    settings = config(kl={"beta": 0.0}, update={"learning_rate": 1e-3})
    before = model_logp(graphdef, params, batch.tokens)
    state, *_ = jax.jit(make_step(graphdef, settings.learning()))(init_state(params, settings.learning()), batch)
    after = model_logp(graphdef, state.params, batch.tokens)
    gain = ((after - before) * np.asarray(batch.mask_BS)).sum(1)
    assert gain[5] > 0 and gain[5] == gain.max()


def test_ratio_is_one_when_the_old_policy_is_the_current_one():
    graphdef, params = tiny_model()
    settings = config()
    batch = training_batch(graphdef, params)
    old, _ = make_score(graphdef, settings.learning())(params, batch)
    step = jax.jit(make_step(graphdef, settings.learning()))
    _, cached, *_ = step(init_state(params, settings.learning()), dataclasses.replace(batch, old_logp_BS=old))
    _, implied, *_ = step(init_state(params, settings.learning()), dataclasses.replace(batch, old_logp_BS=None))
    assert float(implied["ratio/mean"]) == 1.0
    assert abs(float(cached["ratio/mean"]) - 1) < 1e-6
    assert abs(float(cached["loss"] - implied["loss"])) < 1e-6


def test_metrics_see_both_clip_sides_and_the_kl():
    graphdef, params = tiny_model()
    _, metrics, *_ = jax.jit(make_step(graphdef, config().learning()))(
        init_state(params, config().learning()), training_batch(graphdef, params)
    )
    assert 0 < metrics["clip_fraction/low"] < 1 and 0 < metrics["clip_fraction/high"] < 1
    assert 0 < metrics["kl/mean"] < metrics["kl/p95"]
    assert metrics["grad_norm"] > 0 and metrics["logp_mismatch/max"] > 0


@pytest.mark.parametrize("poison", [jnp.nan, pytest.param(jnp.inf, marks=pytest.mark.slow)])
def test_a_nonfinite_step_is_skipped_and_counted_by_the_one_program(poison, monkeypatch):
    graphdef, params = tiny_model()
    settings = config(kl={"adaptive": True})
    batch = training_batch(graphdef, params)
    chex.clear_trace_counter()
    step = chex.assert_max_traces(
        make_step(graphdef, settings.learning()), n=1
    )  # a state of other types would be traced anew
    monkeypatch.setattr("jax_grpo.update.make_step", lambda *_: step)
    update = make_update(graphdef, settings.learning())
    state = init_state(jax.tree.map(jnp.copy, params), settings.learning())
    bad = dataclasses.replace(batch, advantages_B=batch.advantages_B.at[3].set(poison))
    state, metrics = update(state, bad)
    assert int(state.nonfinite_in_a_row) == 1 and int(metrics["nonfinite"]) == 1 and int(state.optimizer_step) == 0
    chex.assert_trees_all_equal((state.params, state.beta), (params, jnp.float32(0.04)))
    assert all((np.asarray(m) == 0).all() for m in jax.tree.leaves(state.opt_state))
    state, _ = update(state, batch)
    assert int(state.nonfinite_in_a_row) == 0 and int(state.nonfinite_total) == 1 and int(state.optimizer_step) == 1


def kept_on_the_device_and_offloaded(first_moment: str) -> list[TrainState]:
    """The states of two updates after three steps, of which one is skipped: moments beside the parameters, and in host memory."""
    graphdef, params = tiny_model()
    batch = training_batch(graphdef, params)
    bad = dataclasses.replace(batch, advantages_B=batch.advantages_B.at[3].set(jnp.nan))
    states = []
    for offloaded, kind in ((False, "device"), (True, "pinned_host")):
        settings = config(
            update={
                "learning_rate": 1e-2,
                "weight_decay": 0.1,
                "first_moment_dtype": first_moment,
                "offload_optimizer": offloaded,
            }
        )
        update, state = (
            make_update(graphdef, settings.learning()),
            init_state(jax.tree.map(jnp.copy, params), settings.learning()),
        )
        for data in (batch, bad, batch):
            assert {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim} == {kind}
            state, _ = update(state, data)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
        assert int(state.optimizer_step) == 2
        states.append(state)
    return states


@pytest.mark.slow
@pytest.mark.parametrize("first_moment", ["parameters", "bfloat16"])
def test_offloaded_moments_are_the_same_numbers_in_host_memory(first_moment):
    chex.assert_trees_all_equal(*kept_on_the_device_and_offloaded(first_moment))


@pytest.mark.parametrize("dtype", ["parameters", "bfloat16"])
def test_a_reference_in_host_memory_scores_the_same_numbers(dtype):
    graphdef, params = tiny_model()
    batch, scores = training_batch(graphdef, params), []
    for offloaded, kind in ((False, "device"), (True, "pinned_host")):
        learning = config(kl={"reference_dtype": dtype, "offload_reference": offloaded}).learning()
        reference = reference_copy(params, learning.kl)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(reference)} == {kind}
        scores.append(make_score(graphdef, learning)(reference, batch))
    chex.assert_trees_all_equal(*scores)
    assert {x.sharding.memory_kind for x in scores[1]} == {"device"}


@pytest.mark.slow
def test_gradients_are_clipped_by_global_norm_and_adamw_equals_optax():
    graphdef, params = tiny_model()
    settings = config(update={"learning_rate": 1e-2, "max_grad_norm": 0.05, "weight_decay": 0.1})
    batch = training_batch(graphdef, params)
    state, metrics, _, grads = jax.jit(make_step(graphdef, settings.learning()))(
        init_state(params, settings.learning()), batch
    )
    assert metrics["grad_norm"] > 0.05
    mask = jax.tree.map(lambda x: x.ndim >= 2, params)
    reference = optax.chain(
        optax.clip_by_global_norm(0.05), optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=mask)
    )
    updates, _ = reference.update(grads, reference.init(params), params)
    expected = optax.apply_updates(params, updates)
    # Tolerance: float32 rounding of a parameter of size 1 moved by 1e-2.
    assert relative_error(state.params, expected) < 1e-6


def test_schedule_at_its_corners():
    at = schedule(
        UpdateConfig(learning_rate=1.0, schedule="cosine", warmup_steps=4, final_learning_rate_fraction=0.1), 24
    )
    expected = {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 14: 0.55, 24: 0.1, 99: 0.1}
    for t, value in expected.items():
        assert float(at(t)) == pytest.approx(value, abs=1e-6), t
    assert float(schedule(UpdateConfig(learning_rate=2.0), 5)(0)) == 2.0


def test_weight_decay_leaves_biases_and_norms_alone():
    _, params = tiny_model()
    optimiser = adamw(UpdateConfig(weight_decay=0.5))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimiser.update(zero, optimiser.init(params), params)
    for update, param in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(update, -0.5 * param if param.ndim >= 2 else 0 * param)


@pytest.mark.slow
def test_bfloat16_compute_keeps_float32_masters_and_close_gradients():
    graphdef, params = tiny_model()
    half = nnx.split(nnx.eval_shape(lambda: Decoder(TINY, rngs=nnx.Rngs(0), compute_dtype=jnp.bfloat16)), nnx.Param)[0]
    batch = training_batch(graphdef, params, noise=0.05)
    _, exact, *_ = jax.jit(make_gradient(graphdef, config().learning()))(params, batch, BETA)
    _, rounded, *_ = jax.jit(make_gradient(half, config().learning()))(params, batch, BETA)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(rounded))
    norm = optax.tree.norm(jax.tree.map(jnp.subtract, exact, rounded)) / optax.global_norm(exact)
    print(f"bfloat16 gradients: relative L2 {float(norm):.3f}")
    assert 1e-4 < norm < 0.1


def test_cut_splits_groups_only_when_prompts_run_out():
    graphdef, params = tiny_model()
    batch = training_batch(graphdef, params)
    assert split(batch, 2).tokens.completion_ids_PGC.shape == (2, 2, 4, 6)
    assert split(batch, 8).tokens.completion_ids_PGC.shape == (8, 1, 2, 6)
    with pytest.raises(ValueError, match="16 completions do not divide into 3"):
        split(batch, 3)


def _compiled(layers: int, hidden: int = 32):
    """The update's program for a model of this size, 4 prompts x 4 completions of 6 tokens; and its parameters' bytes."""
    sizes = dataclasses.replace(TINY, num_layers=layers, hidden_size=hidden)
    shape = jax.eval_shape(lambda: nnx.split(Decoder(sizes, rngs=nnx.Rngs(0)), nnx.Param)[1])
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(sizes, rngs=nnx.Rngs(0))), nnx.Param)[0]
    settings = config()
    batch = training_batch(*tiny_model())
    state = jax.eval_shape(lambda params: init_state(params, settings.learning()), shape)
    compiled = make_update(graphdef, settings.learning()).lower(state, batch).compile()
    return compiled, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shape))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA:CPU makes of it")
def test_the_update_needs_one_copy_of_the_gradients_beside_its_state():
    compiled, params = _compiled(layers=2, hidden=512)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1.4 * params  # the rest are activations of 176 tokens; a second copy would be 2
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1e4, "the new state is in the old one's place"


@pytest.mark.slow  # compiles the update three times
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA:CPU makes of it")
def test_a_block_more_is_as_many_instructions_more_whatever_the_depth():
    """Else blocks are computed again in the ones behind them, which XLA:CPU does to sums that nothing keeps apart."""
    two, four, eight = (_compiled(layers)[0].as_text().count(" = ") for layers in (2, 4, 8))
    growth = ((eight - four) / 4) / ((four - two) / 2)
    print(f"{(four - two) / 2:.0f} instructions a block, {growth:.2f} times as many from the fourth on")
    assert growth < 1.1


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("parts", [1, 2])
def test_old_and_new_log_probabilities_come_from_micro_batches_of_one_shape(parts, monkeypatch):
    """Matmuls of other shapes round otherwise, in bfloat16 by a hundredth of a nat: a first ratio would not be 1."""
    graphdef, params = tiny_model()
    settings, batch = config(update={"minibatches": 2, "micro_batches": parts}), training_batch(graphdef, params)
    shapes, head = [], update_module.LM_HEADS["materialised"]

    def seen(hidden_BSH, *given, **options):
        shapes.append(hidden_BSH.shape)
        return head(hidden_BSH, *given, **options)

    monkeypatch.setitem(update_module.LM_HEADS, "materialised", seen)
    jax.eval_shape(make_score(graphdef, settings.learning()), params, batch)
    scored = len(shapes)
    first = next(minibatches(batch, 1, 2, 0, 0))
    jax.eval_shape(make_gradient(graphdef, settings.learning()), params, first, jnp.float32(0.1))
    assert 0 < scored < len(shapes) and {*shapes} == {(16 // 2 // parts, 6, TINY.hidden_size)}
