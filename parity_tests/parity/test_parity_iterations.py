"""Whole iterations by both trainers on the same rollouts: epochs, minibatches, micro-batches, adaptive beta, guardrail.

The reference is given tokens, masks and rewards; old and reference log-probabilities, advantages, which rows a step trains on and
when an iteration ends it finds itself.
"""

import dataclasses
import json
import math

import chex
import jax
import numpy as np
import pytest
import torch
from both import show

from jax_grpo.batch import record
from jax_grpo.chess.positions.sources import selfplay_positions
from jax_grpo.config import Config
from jax_grpo.iteration.metrics import over_steps
from jax_grpo.model.weights import save_hf, to_hf
from jax_grpo.programs import unscored, with_logps
from jax_grpo.system.phases import Phases
from jax_grpo.trainer import Trainer
from torch_ref import train as torch_train
from torch_ref.batch import from_arrays
from torch_ref.compare import TOLERANCES, observable, tensor_errors
from torch_ref.options import Options
from torch_ref.parity import ROLLOUT, ROUNDING, STORAGE, several, whole_iterations
from torch_ref.update import start

ALLOWED = TOLERANCES["float64"]


def tiny(**sections) -> Config:
    """4 prompts x 4 completions of up to 6 letters in float64; 2 epochs x 2 minibatches x 2 micro-batches, adaptive beta."""
    base: dict = {
        "iterations": 3,
        "run_dir": "unused",
        "seed": 3,
        "model": {
            "tokenizer": "chess", "num_layers": 1, "num_heads": 2, "hidden_size": 16, "max_position_embeddings": 96,
            "compute_dtype": "float64", "param_dtype": "float64",
        },
        "task": {"name": "length", "length_cap": 6},
        "prompts": {"source": "positions.jsonl", "per_iteration": 4, "max_prompt_tokens": 80},
        "rollout": {"group_size": 4, "max_new_tokens": 6},
        "kl": {"beta": 0.1, "adaptive": True, "target": 0.002, "beta_bounds": [1e-4, 5.0]},
        "update": {"epochs": 2, "minibatches": 2, "micro_batches": 2, "learning_rate": 1e-2, "weight_decay": 0.1},
    }  # fmt: skip
    for name, value in sections.items():
        base[name] = base.get(name, {}) | value if isinstance(value, dict) else value
    return Config.model_validate(base)


@pytest.fixture(autouse=True)
def x64(tmp_path, monkeypatch):
    rows = [json.dumps({"fen": position.fen}) for position in selfplay_positions(2, 0)[:40]]
    (tmp_path / "positions.jsonl").write_text(
        "\n".join(rows)
    )  # the packaged ones take longer to read than to learn from
    monkeypatch.chdir(tmp_path)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


# The coefficient of the entropy bonus goes up and down, and the bonus comes and goes, with entropies on both sides of the target.
HELD = {"entropy_target": 6.363, "entropy_step": 0.02, "entropy_coefficient": 0.05}


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, marks=pytest.mark.slow),  # by default the tests below take these steps
        {
            "objective": {"name": "sapo", "importance_level": "sequence", "entropy_quantile": 0.3} | HELD,
            "advantage": {"scale": "none"},
            "model": {"vocab_size": 900},  # the tokenizer has fewer tokens: a third of the softmax would be of nothing
        },
        {
            "advantage": {"baseline": "opo", "scale": "maxrl"},
            "lm_head": {"implementation": "chunked"},
            "kl": {"reference_every": 3, "reference_mix": 0.6},  # in the middle of an iteration, and at its end
        },
        pytest.param({"kl": {"reference_every": 2}}, marks=pytest.mark.slow),
        pytest.param(
            {
                "objective": {"name": "gmpo", "epsilon_low": 0.01, "epsilon_high": 0.01, "aggregation": "grpo"}
                | {"mismatch_cap": 1.5, "mismatch_mode": "sequence_mask"}
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"objective": {"name": "dppo_kl", "epsilon_high": 1e-4}, "lm_head": {"implementation": "chunked"}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"objective": {"name": "vespo"}}, marks=pytest.mark.slow),
        pytest.param(
            {
                "objective": {"name": "clip_cov", "cov_share": 0.2, "cov_bounds": [0.0, 5.0]},
                "lm_head": {"implementation": "chunked"},
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"objective": {"name": "kl_cov", "cov_share": 0.2}}, marks=pytest.mark.slow),
        pytest.param({"objective": HELD, "lm_head": {"implementation": "chunked"}}, marks=pytest.mark.slow),
        pytest.param(
            {"advantage": {"pass_at_k": 2, "scale": "none"}, "lm_head": {"implementation": "chunked"}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "clip",
        "sapo, sequence, top entropy, entropy held, wide embedding",
        "OPO, MaxRL, fused head, a reference that follows",
        "a copied reference",
        "GMPO",
        "DPPO",
        "VESPO",
        "Clip-Cov, fused head",
        "KL-Cov",
        "entropy held, fused head",
        "pass@2, fused head",
    ],
)
def test_both_trainers_take_the_same_iterations(tmp_path, sections):
    actual = whole_iterations(tiny(**sections), tmp_path)
    assert actual["config"] == {"epochs": 2, "minibatches": 2, "micro_batches": 2, "adaptive": True}
    metrics = actual["metrics"]
    assert [step["optimizer_step"] for step in metrics] == [4, 8, 12] and {step["steps"] for step in metrics} == {4}
    moves = "reference_every" in sections.get("kl", {})
    assert len({0.1, *(step["beta"] for step in metrics)}) == 4 or moves, "beta moves"
    assert all(step["beta"] != 0.1 for step in metrics), "up, and behind a move of the reference down by as much"
    assert all(step["ratio/deviation"] > 1e-3 and step["kl/mean"] > 1e-5 for step in metrics), (
        "off policy by the last step"
    )
    assert all(step["logp_mismatch/max"] < 1e-10 for step in metrics), "sampled from the distribution that is trained"
    if "entropy_target" in sections.get("objective", {}):
        entropy, applied = ([step[name] for step in metrics] for name in ("entropy", "entropy_bonus/applied"))
        assert entropy[0] > HELD["entropy_target"] > entropy[-1] and applied[0] == 0 < applied[-1], (entropy, applied)
        assert {"entropy_bonus/applied", "entropy_bonus/coefficient"} <= set(actual["iterations"][0])
    for number, errors in enumerate(actual["iterations"]):
        assert {"loss", "kl/mean", "beta", "optimizer_step", "learning_rate", "grad_norm", "clip_fraction/high"} <= set(
            errors
        )
        assert moves == ({"kl/before_move", "kl/after_move"} <= set(errors))
        assert not moves or metrics[number]["kl/after_move"] < 0.7 * metrics[number]["kl/before_move"], "it follows"
        show(f"iteration {number}", errors, ALLOWED.scalars)
    show("change", actual["change"], ALLOWED.change)


def test_the_report_compares_several_steps_whatever_the_configs_own_number():
    config = tiny(update={"epochs": 1, "minibatches": 1, "micro_batches": 1}, kl={"adaptive": False, "beta": 0.04})
    made = several(config)
    assert (made.update.epochs, made.update.minibatches, made.update.micro_batches) == (2, 2, 2) and made.kl.adaptive
    alone = several(tiny(prompts={"per_iteration": 1}, update={"minibatches": 1, "micro_batches": 1}))
    assert (alone.update.epochs, alone.update.minibatches, alone.update.micro_batches) == (2, 1, 2)
    assert not several(tiny(kl={"beta": 0.0, "adaptive": False})).kl.adaptive


class Twins:
    """Both trainers with the same weights, and one recorded rollout that both learn from."""

    def __init__(self, config: Config, folder):
        self.ours = Trainer(config)
        save_hf(folder, self.ours.policy.architecture, self.ours.state.params, self.ours.tokenizer)
        weights = config.model.model_copy(update={"weights": str(folder)})
        self.theirs = torch_train.Trainer(config.model_copy(update={"model": weights}), Options())
        self.begin = {n: p.detach().numpy().copy() for n, p in self.theirs.state.model.named_parameters()}
        self.fresh = jax.tree.map(np.array, self.ours.state)  # the update donates it
        draw = self.ours._draw(0, Phases())
        self.scored = self.ours._reward(0, draw)
        batch = unscored(*draw.tokens, draw.rollout)
        batch = with_logps(config.learning(), self.ours.score, self.ours.state.params, self.ours.reference, batch)
        self.batch = self.ours._with_advantages(batch, self.scored)

    def learn(self, stopped_B: np.ndarray | None = None, iteration: int = 0) -> tuple[list[dict], list[dict]]:
        """Metrics of every optimiser step of an iteration on the rollout, by `jax_grpo` and by `torch_ref`."""
        config, batch = self.ours.config, self.batch
        if stopped_B is not None:
            batch = dataclasses.replace(batch, stopped_B=jax.numpy.asarray(stopped_B))
        arrays = record(batch, self.scored.rewards_B, self.ours.group_ids())
        shared = from_arrays({name: arrays[name] for name in ROLLOUT}, config.learning(), dtype=STORAGE["float64"])
        ours = [{n: float(x) for n, x in step.items()} for step in self.ours._optimise(batch, iteration)]
        return ours, self.theirs.optimise(self.theirs.scored(shared), iteration)

    def begin_again(self, config: Config) -> None:
        """The first weights and the same rollout for a config that compiles to the same programs."""
        self.ours.config, self.ours.state = config, jax.tree.map(jax.numpy.array, self.fresh)
        self.theirs.config, model = config, self.theirs.state.model
        model.load_state_dict({name: torch.from_numpy(x) for name, x in self.begin.items()})
        self.theirs.state = start(model, config.learning())

    def require_same(self, ours: list[dict], theirs: list[dict]) -> None:
        assert len(ours) == len(theirs)
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            for name in a.keys() & b.keys() - set(ROUNDING):
                same = abs(a[name] - b[name]) <= ALLOWED.scalars * max(abs(b[name]), ALLOWED.floor)
                assert same or (math.isnan(a[name]) and math.isnan(b[name]) and a["empty"]), (
                    number,
                    name,
                    a[name],
                    b[name],
                )
        actual = to_hf(self.ours.state.params, self.ours.policy.architecture)
        moved = {f"change/{n}": x - self.begin[n] for n, x in actual.items()}
        named = self.theirs.state.model.named_parameters()
        expected = {f"change/{n}": p.detach().numpy() - self.begin[n] for n, p in named}
        show("change", tensor_errors(observable(moved), observable(expected), "change/"), ALLOWED.change)


def test_empty_minibatches_are_left_out_by_both(tmp_path):
    twins = Twins(tiny(objective={"mask_truncated": True}), tmp_path)
    order_P = np.random.default_rng((3, 0, 0)).permutation(4)  # seed, iteration, epoch
    stopped_PG = np.ones((4, 4), bool)
    stopped_PG[order_P[2:]] = False  # the second minibatch of the first epoch
    stopped_PG[0, 1] = stopped_PG[1, 2] = stopped_PG[2, 3] = False
    ours, theirs = twins.learn(stopped_PG.reshape(-1))
    assert [step["empty"] for step in theirs][:2] == [False, True]
    twins.require_same(ours, theirs)
    taken = sum(not step["empty"] for step in theirs)
    assert int(twins.ours.state.optimizer_step) == twins.theirs.state.step == taken < 4
    assert float(over_steps(ours)["kl/mean"]) > 0 and over_steps(ours)["empty_steps"] == 4 - taken

    before = jax.tree.map(np.array, (twins.ours.state.params, twins.ours.state.beta))
    ours, theirs = twins.learn(np.zeros(16, bool), 1)  # AdamW has moments to move along
    twins.require_same(ours, theirs)
    chex.assert_trees_all_equal((twins.ours.state.params, twins.ours.state.beta), before)
    for actual in (over_steps(ours), torch_train.over_steps(theirs)):
        assert math.isnan(actual["kl/mean"]) and math.isnan(actual["loss"]) and actual["empty_steps"] == 8 - taken


def test_the_guardrail_ends_an_iteration_behind_the_step_that_sees_it(tmp_path):
    guarded = {"beta": 0.01, "adaptive": False, "target": 1e-9}
    twins = Twins(tiny(kl=guarded, update={"minibatches": 4, "micro_batches": 1}), tmp_path)
    ours, theirs = twins.learn()
    twins.require_same(ours, theirs)
    kl = [step["kl/mean"] for step in ours]
    assert len(kl) == 8 and abs(kl[0]) < 1e-12 and kl[1] > 1e-4, "far beyond twice the target, and only logged"
    # Twice this target is first passed in the second of the first epoch's four steps.
    held = tiny(
        kl=guarded | {"target": kl[1] / 4, "guardrail": "end_epoch"}, update={"minibatches": 4, "micro_batches": 1}
    )
    twins.begin_again(held)
    ours, theirs = twins.learn()
    assert len(ours) == 2 and [step["kl/mean"] for step in ours] == kl[:2], "no step of the second epoch either"
    assert int(twins.ours.state.optimizer_step) == twins.theirs.state.step == 2, "the step that saw it was taken"
    twins.require_same(ours, theirs)
    metrics, *_ = twins.ours.iterate(1)  # the schedule and the prompts go on where they are
    assert 2 < metrics["optimizer_step"] < 2 + 8 and metrics["kl/beyond_guardrail"] == 1
