"""FLOPs by formula agree with what XLA counts, and a rate that no device has is an error."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, config, tiny_model, training_batch
from flax import nnx

from jax_grpo.batch import Batch, FlatTokens
from jax_grpo.bench.machine import matmul_rate
from jax_grpo.iteration import metrics
from jax_grpo.iteration.metrics import of_iteration
from jax_grpo.iteration.reward import Samples
from jax_grpo.lm_head import FUSED_LOSSES, LM_HEADS
from jax_grpo.loss import TokenTerms, token_terms, update_work
from jax_grpo.model import flops
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.programs import phase_flops
from jax_grpo.rollout.generate import PromptTokens, Rollout
from jax_grpo.system import devices
from jax_grpo.tasks.base import Headline, Logged, Prompt, as_component
from jax_grpo.trainer import Trainer
from jax_grpo.update import make_gradient, make_score

SIZES = Architecture(vocab_size=2048, num_layers=2, num_heads=4, hidden_size=256, max_position_embeddings=64)
ROWS, LENGTH = 4, 64
DENSE = flops.Work(ROWS * LENGTH, ROWS * LENGTH**2, ROWS * LENGTH)  # XLA's attention multiplies masked pairs too


def counted(function, *arguments) -> float:
    """XLA's count for the program before optimisation."""
    analysis = jax.jit(function).lower(*arguments).cost_analysis()
    return (analysis[0] if isinstance(analysis, list) else analysis)["flops"]


def problem():
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(SIZES, rngs=nnx.Rngs(0))), nnx.Param)
    ids, numbers = jnp.zeros((ROWS, LENGTH), jnp.int32), jnp.zeros((ROWS, LENGTH))
    batch = Batch(FlatTokens(ids, ids), ids, jnp.zeros(ROWS), jnp.ones(ROWS, bool), numbers, numbers)
    return graphdef, params, batch


@pytest.mark.parametrize("what", ["forward", "training"])
def test_the_formula_agrees_with_xlas_count(what):
    graphdef, params, batch = problem()
    settings = config(model={"hidden_size": 256, "num_heads": 4, "max_position_embeddings": 64})
    programs = {
        "forward": lambda: counted(make_score(graphdef, settings.learning()), params, batch),
        "training": lambda: counted(make_gradient(graphdef, settings.learning()), params, batch, jnp.float32(0.1)),
    }
    passes = {"forward": 1, "training": 1 + flops.BACKWARD}
    formula, xla = passes[what] * flops.forward(SIZES, DENSE), programs[what]()
    print(f"{what}: formula {formula:.4e}, XLA {xla:.4e}, ratio {formula / xla:.4f} (tolerance 5 %)")
    assert formula == pytest.approx(xla, rel=0.05)


@pytest.mark.parametrize("window", [1, 3, 4, 50])
def test_a_layer_with_a_window_has_the_pairs_that_lie_in_it(window):
    prompt, completion = (
        np.array([[0, 1, 1, 1, 1], [1] * 5]),
        np.array([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [1, 1, 1]]]),
    )
    pairs = 0
    for p, c_G in zip(prompt.sum(-1), completion.sum(-1), strict=True):
        pairs += sum(min(i + 1, window) for i in range(p))
        pairs += sum(min(p + i + 1, window) for c in c_G for i in range(c - 1))
    work = flops.completions_work(prompt, completion, window)
    assert work.in_window == pairs and work._replace(in_window=0) == flops.completions_work(prompt, completion)
    layers = (True, False, True)
    sizes = dataclasses.replace(TINY, num_layers=3, window=window, window_layers=layers)
    whole = dataclasses.replace(TINY, num_layers=3)
    fewer = 2 * (work.pairs - pairs) * 4 * TINY.num_heads * TINY.head_dim
    assert flops.forward(whole, work) - flops.forward(sizes, work) == pytest.approx(fewer)


def test_a_prompt_is_counted_once_and_a_token_sees_what_stands_before_it():
    prompt, completion = (
        np.array([[0, 1, 1, 1]]),
        np.array([[[1, 1, 0], [1, 0, 0]]]),
    )  # 3 tokens; 2 and 1 of completions
    # The prompt: 3 tokens and 1 + 2 + 3 pairs. The first completion's first token: one more, and it sees 4 keys.
    assert flops.completions_work(prompt, completion) == flops.Work(tokens=4, pairs=10, predicted=3)


def test_padding_is_no_work():
    prompt, completion = np.ones((2, 5), int), np.ones((2, 3, 4), int)
    padded = np.pad(prompt, ((0, 0), (3, 0))), np.pad(completion, ((0, 0), (0, 0), (0, 7)))
    assert flops.completions_work(*padded) == flops.completions_work(prompt, completion)


def samples_of(batch, rollout, texts, components, rewards_B) -> Samples:
    tokens = PromptTokens(np.asarray(batch.tokens.prompt_ids_PT), np.asarray(batch.tokens.prompt_mask_PT))
    group = np.zeros((4, 4), np.float32), np.zeros(4, bool)
    return Samples([Prompt("p", 0)] * 16, tokens, rollout, texts, components, rewards_B, *group, Logged({}, {}))


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_an_iterations_update_is_credited_for_the_steps_it_took(steps):
    """Each is on its share of the batch: with two minibatches the fourth step ends the second epoch."""
    graphdef, params = tiny_model()
    batch, two = training_batch(graphdef, params), config(update={"epochs": 2, "minibatches": 2})
    rollout = Rollout(batch.tokens.completion_ids_PGC, batch.tokens.completion_mask_PGC, None, jnp.ones((4, 4), bool))  # pyright: ignore
    samples = samples_of(batch, rollout, ["x"] * 16, {}, np.zeros(16, np.float32))
    step = {"empty": False, "nonfinite_in_a_row": 0, "ratio/deviation": 0.0, "kl/mean": 0.0}
    seconds = dict.fromkeys(("rollout", "reward", "score", "update"), 2.0)
    metrics = of_iteration(two, TINY, samples, batch, [step] * steps, seconds, [samples])
    forward, backward = (flops.forward(TINY, work) for work in update_work(batch, two.learning()))
    expected = steps / 2 * (forward + flops.BACKWARD * backward)
    assert metrics["flops_per_second/update"] * 2.0 == pytest.approx(expected)


def test_more_than_the_peak_is_refused_with_the_numbers():
    assert devices.utilisation(5e11, 1.0, 1e12, "update") == 0.5
    with pytest.raises(devices.ImpossibleRate, match=r"update: 2.000e\+12 FLOPs in 1.000000 s are 200.0% of"):
        devices.utilisation(2e12, 1.0, 1e12, "update")


def test_rates_are_of_each_phase_and_without_a_known_peak_there_is_no_mfu():
    one = flops.forward(SIZES, flops.Work(10, 100, 10))
    work, seconds = {"rollout": one, "score": 0.0, "update": 3 * one}, {"rollout": 2.0, "score": 1.0, "update": 1.0}
    out = devices.rates(work, seconds, None)
    assert out == {"flops_per_second/rollout": one / 2, "flops_per_second/update": 3 * one}
    assert devices.rates(work, seconds, 4 * one)["mfu/update"] == pytest.approx(0.75)
    assert devices.device_peak("cpu", "float32") is None


def test_the_measured_peak_is_of_this_machine():
    assert 1e8 < matmul_rate(128) < 1e15


def with_constant_rows(batch):
    """Rows 1 and 6 and the whole last group have no advantage; row 2 and the whole group 1 are cut at the cap."""
    advantages_B = batch.advantages_B.at[jnp.array([1, 6, 12, 13, 14, 15])].set(0)
    stopped_B = batch.stopped_B.at[jnp.array([2, 4, 5, 6, 7])].set(False)
    return dataclasses.replace(batch, advantages_B=advantages_B, stopped_B=stopped_B)


@pytest.mark.parametrize(
    ("options", "kl"),
    [({}, 0.0), ({}, 0.1), ({"mask_truncated": True}, 0.0), ({"mask_truncated": True}, 0.1), ({"entropy_quantile": 0.5}, 0.0),
     ({"entropy_coefficient": 0.01}, 0.0)],
)  # fmt: skip
def test_the_update_is_credited_for_the_tokens_that_have_a_gradient_and_no_others(options, kl):
    """Counted by differentiating the loss in every token's log-probability and entropy, one row at a time."""
    settings = config(objective=options, kl={"beta": kl})
    batch = with_constant_rows(training_batch(*tiny_model()))
    if kl == 0:
        batch = dataclasses.replace(batch, ref_logp_BS=None)
    entropy_BS = jnp.abs(jnp.asarray(np.random.default_rng(1).normal(size=batch.mask_BS.shape), jnp.float32)) + 0.1
    batch = dataclasses.replace(batch, entropy_BS=entropy_BS if "entropy_quantile" in options else None)
    terms = token_terms(batch, kl, settings.learning(), jnp.float32)
    mask_BS = terms.mask_BS

    def total(logp_BS, entropy_BS):
        return jnp.sum(terms.loss(logp_BS, entropy_BS))

    # On-policy, so that no clip hides a gradient; the KL term's is 0 only where both models agree, which noise prevents.
    gradients = jax.grad(total, (0, 1))(batch.old_logp_BS, entropy_BS)
    learns_PGC = np.asarray((gradients[0] != 0) | (gradients[1] != 0)).reshape(4, 4, 6)
    read_PGC = np.asarray(mask_BS != 0).reshape(4, 4, 6)
    tokens, expected = batch.tokens, []
    for wanted_PGC in (read_PGC, learns_PGC):
        work = np.zeros(3, np.int64)
        for prompt in range(4):
            if wanted_PGC[prompt].any():
                length = int(tokens.prompt_mask_PT[prompt].sum())
                work += (length, sum(range(1, length + 1)), 0)
                for row in np.flatnonzero(wanted_PGC[prompt].any(-1)):
                    read = int(tokens.completion_mask_PGC[prompt, row].sum()) - 1
                    keys = sum(length + i for i in range(1, read + 1))
                    work += (read, keys, int(wanted_PGC[prompt, row].sum()))
        expected.append(tuple(work))
    actual = update_work(batch, settings.learning())
    print(options, kl, "forward", actual[0], "backward", actual[1], "of", int(batch.mask_BS.sum()), "tokens")
    assert [tuple(work)[:3] for work in actual] == expected
    assert actual[1].predicted <= actual[0].predicted
    if not options and kl == 0:
        assert actual[1].predicted < actual[0].predicted == int(batch.mask_BS.sum()), (
            "constant rows are there to be told"
        )


@pytest.mark.slow_cases("chunked")
@pytest.mark.parametrize("head", ["chunked", "materialised"])
def test_the_heads_gradient_is_zero_on_exactly_the_rows_that_are_not_credited(head):
    """What the programs do: the head's gradient in the hidden states has as many rows as the backward pass is credited for."""
    graphdef, params = tiny_model()
    settings = config(kl={"beta": 0.0}, lm_head={"implementation": head})
    batch = with_constant_rows(training_batch(graphdef, params))
    # Without cached log-probabilities the ratio is 1 and no clip takes a gradient, which is known only after the forward pass.
    batch = dataclasses.replace(batch, ref_logp_BS=None, old_logp_BS=None)
    hidden_BSH, targets_BS = batch.tokens.predictions(nnx.merge(graphdef, params))
    embedding_VH = nnx.merge(graphdef, params).wte.embedding[...]
    terms = token_terms(batch, jnp.float32(0), settings.learning(), jnp.float32)
    common = {"vocab_size": TINY.vocab_size, "temperature": 1.0}

    def loss(hidden_BSH):
        if head == "materialised":
            logp_BS, entropy_BS = LM_HEADS[head](hidden_BSH, embedding_VH, targets_BS, **common)
            return jnp.sum(terms.loss(logp_BS, entropy_BS))

        rows, work_BS = terms.by_token(), terms.head_work()
        return FUSED_LOSSES[head](hidden_BSH, embedding_VH, targets_BS, work_BS, TokenTerms.loss, rows, **common)[0]

    rows = int((np.abs(np.asarray(jax.grad(loss)(hidden_BSH))).max(-1) > 0).sum())
    credited = update_work(batch, settings.learning())[1].predicted
    print(f"{head}: {rows} rows with a gradient, {credited} credited, {int(batch.mask_BS.sum())} tokens")
    assert rows == credited < int(batch.mask_BS.sum())


@pytest.mark.slow  # a run; the count itself is tested above
def test_a_run_without_signal_is_credited_for_no_backward_pass(tmp_path):
    """No completion earns anything, and there is no KL term: the update's rate is that of its forward pass."""
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "count to {n}"}}\n' for n in range(8)))
    settings = config(
        run_dir=str(tmp_path / "run"),
        model={"tokenizer": "chess", "num_layers": 1, "hidden_size": 16, "max_position_embeddings": 128},
        task={"name": "prompts"},
        prompts={"source": str(tmp_path / "prompts.jsonl"), "max_prompt_tokens": 80},
        kl={"beta": 0.0},
    )
    trainer = Trainer(settings, rewards=[lambda completions, **_: [0.0] * len(completions)])
    metrics, _, batch = trainer.iterate(0)
    everything = flops.completions_work(batch.tokens.prompt_mask_PT, batch.tokens.completion_mask_PGC)
    done = metrics["flops_per_second/update"] * metrics["time/update"]
    assert done == pytest.approx(flops.forward(trainer.policy.architecture, everything), rel=1e-6)


@pytest.mark.parametrize(("kl", "beyond"), [(0.01, 0.0), (1.0, 1.0), (np.nan, np.nan), (None, 0.0)])
def test_an_iterations_numbers_are_what_hands_compute(kl, beyond, monkeypatch):
    monkeypatch.setattr(metrics, "device_peak", lambda kind, dtype: 1e12)  # of a CPU none is known
    graphdef, params = tiny_model()
    batch, settings = training_batch(graphdef, params), config(kl={"beta": 0.1}, mesh={"data": 2})
    mask_PGC = np.asarray(batch.tokens.completion_mask_PGC)
    stopped_PG = np.ones((4, 4), bool)
    stopped_PG[0], stopped_PG[1, 0] = False, False
    rollout = Rollout(batch.tokens.completion_ids_PGC, mask_PGC, np.zeros(mask_PGC.shape), stopped_PG)
    legal_B, rewards_B = np.repeat([1.0, 0.0], [12, 4]), np.arange(16.0)
    texts = ["a", "b", "b", "b"] + ["a", "b", "c", "d"] * 3
    logged = Logged({"own": [1.0, 3.0]}, {})
    samples = samples_of(batch, rollout, texts, {"legal": as_component(legal_B)}, rewards_B)._replace(logged=logged)
    first = {"empty": False, "nonfinite_in_a_row": 0, "loss": 1.0, "ratio/deviation": 0.25, "beta": 0.5, "kl/mean": 0.0}
    last = first | {"loss": 4.0, "ratio/deviation": 0.75, "beta": 0.25, "kl/mean": kl}
    if kl is None:  # none was measured
        kl = first.pop("kl/mean")
        del last["kl/mean"]
    empty = first | {"empty": True, "loss": np.nan, "ratio/deviation": np.nan}
    samples = samples._replace(flat_P=np.array([True, False, False, True]))
    seconds = {"rollout": 2.0, "score": 1.0, "reward": 3.0, "update": 5.0, "iteration": 12.0}
    legal = Headline("legal", "legal_move_rate", "legal", "legal moves", "share")
    actual = metrics.of_iteration(
        settings, TINY, samples, batch, [empty, first, last], seconds, [samples], None, [legal]
    )
    expected = {
        "loss": 2.5, "ratio/deviation": 0.75, "ratio/first_deviation": 0.25, "beta": 0.25,
        "kl/mean": kl, "kl/p95": 0.0, "kl/beyond_guardrail": beyond,
        "reward/mean": 7.5, "reward/std": np.sqrt(255 / 12), "reward/legal/mean": 0.75, "reward/legal/std": np.sqrt(0.1875),
        "legal_move_rate": 0.75, "log/own": 2.0, "groups_without_signal": 2, "completion_length/mean": mask_PGC.sum() / 16,
        "truncated_fraction": 5 / 16, "completions/distinct": (0.5 + 3) / 4,
        "time/rollout": 2.0, "time/score": 1.0, "time/reward": 3.0, "time/update": 5.0, "time/iteration": 12.0,
        "tokens_per_second": mask_PGC.sum() / 2.0,
    }  # fmt: skip
    # Scoring ran beside the rewards: of it only the two phases' time together is known.
    took = {"rollout": 2, "score": 4, "update": 5}
    for name, work in phase_flops(settings.learning(), TINY, batch, 3, []).items():
        expected |= {f"flops_per_second/{name}": work / took[name], f"mfu/{name}": work / took[name] / 2e12}
    actual = {name: value for name, value in actual.items() if not name.startswith("memory/")}
    assert actual == pytest.approx(expected, nan_ok=True)
