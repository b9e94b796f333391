"""What an iteration draws and trains on, with refill and with a curriculum: the same in both implementations, in float64."""

import jax
import numpy as np
import pytest
import torch
from both import show
from sparse_runs import GROUP, Shaped, Sparse, begins_with_signal, sparse_config, write_positions

from jax_grpo.batch import record
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import save_hf, to_hf
from jax_grpo.programs import unscored
from jax_grpo.rollout.generate import decode_completions
from jax_grpo.tasks.stop import word_stop
from jax_grpo.trainer import Trainer
from torch_ref import train as torch_train
from torch_ref.compare import TOLERANCES, observable, scalar_errors, tensor_errors
from torch_ref.options import Options
from torch_ref.parity import ROUNDING
from torch_ref.rollout import Rollout as TorchRollout


@pytest.fixture(autouse=True)
def positions(tmp_path, monkeypatch):
    monkeypatch.chdir(write_positions(tmp_path))


class Answers:
    """In the place of the reference's sampler: what `jax_grpo` sampled for these prompts, in the order of its draws.

    What to draw, which groups to keep and what to learn from them the reference finds by itself.
    """

    device = torch.device("cpu")

    def __init__(self, drawn: list[tuple]):
        self._drawn = drawn

    def complete(self, prompts, generator) -> TorchRollout:
        draw = self._drawn.pop(0)
        rows = [prompt for prompt in draw.prompts for _ in range(GROUP)]
        assert [prompt.text for prompt in prompts] == [prompt.text for prompt in rows]
        arrays = record(unscored(*draw.tokens, draw.rollout), np.zeros(len(rows)), np.zeros(len(rows)))
        arrays = {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}
        texts = decode_completions(draw.rollout, TOKENIZER, word_stop(), [0] * len(rows))
        names = ("input_ids", "attention_mask", "completion_mask", "sampling_logp")
        return TorchRollout(texts, *(arrays[name] for name in names), arrays["stopped"].bool())


TOKENIZER = Tokenizer.load("chess")
FLOAT64 = {"compute_dtype": "float64", "param_dtype": "float64"}
# Prompts that are not paid are never passed; some of the others are solved.
CURRICULUM = {"passed": 0.3, "again": 0.5, "revisit": 0.3, "solved": 0.25}
BY_CURRICULUM = {"prompts": {"curriculum": CURRICULUM}}
SEVERAL = {"epochs": 2, "minibatches": 2, "micro_batches": 2, "learning_rate": 1e-2, "weight_decay": 0.1}


def columns_used(arrays: dict) -> dict[str, np.ndarray]:
    """A batch's tokens and masks, without columns that are padding alone, and 0 where a row has none."""
    mask = np.asarray(arrays["attention_mask"])
    used = mask.any(0)
    return {
        name: (np.asarray(arrays[name]) * mask)[:, used] for name in ("attention_mask", "completion_mask", "input_ids")
    }


@pytest.mark.default_cases("curriculum")
@pytest.mark.parametrize(
    ("refill", "sections"),
    [
        ({"rounds": 3}, {"lm_head": {"implementation": "chunked"}, "advantage": {"scale": "batch"}}),
        ({"rounds": 1}, {"objective": {"aggregation": "grpo"}}),
        ({"rounds": 6, "tokens": 60}, {"advantage": {"pass_at_k": 3, "scale": "none"}}),
        ({"rounds": 2, "by": "paid/right"}, {"advantage": {"components": "gdpo"}}),
        ({"rounds": 2, "by": "paid/right"}, {"advantage": {"scale": "batch"}}),
        (None, {**BY_CURRICULUM, "lm_head": {"implementation": "chunked"}, "iterations": 6}),
        ({"rounds": 2}, BY_CURRICULUM),
    ],
    ids=[
        "fused head, batch scale",
        "partial batches",
        "budget of tokens, pass@3",
        "by an outcome, gdpo",
        "by an outcome, batch scale",
        "curriculum",
        "curriculum and refill",
    ],
)
def test_both_trainers_take_the_same_iterations_of_what_they_draw(refill, sections, tmp_path):
    """Epochs, minibatches, micro-batches, an adaptive beta, in float64."""
    adaptive = {"beta": 0.1, "adaptive": True, "target": 0.002, "beta_bounds": [1e-4, 5.0]}
    sections = {"model": FLOAT64, "update": SEVERAL, "kl": adaptive, "seed": 4} | sections
    settings = sparse_config(refill, **sections)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        kind = Shaped if refill and "by" in refill else Sparse
        ours = Trainer(settings, kind(kind.Settings()))
        save_hf(tmp_path, ours.policy.architecture, ours.state.params, ours.tokenizer)
        begin = {name: x.copy() for name, x in to_hf(ours.state.params, ours.policy.architecture).items()}
        weights = settings.model.model_copy(update={"weights": str(tmp_path)})
        plain = sparse_config(None, **sections)
        theirs = torch_train.Trainer(plain.model_copy(update={"model": weights}), Options())
        theirs.config = settings.model_copy(update={"model": weights})  # whose outcome is of the task that it is given
        theirs.task, drawn, generate = kind(kind.Settings()), [], ours._draw

        def remembered(*arguments):
            drawn.append(generate(*arguments))
            return drawn[-1]

        ours._draw, theirs.texts = remembered, Answers(drawn)
        taken = []
        for iteration in range(settings.iterations):
            metrics, scored, batch = ours.iterate(iteration)
            expected, samples, other, rewards_B = theirs.iterate(iteration)
            assert iteration > 0 or begins_with_signal(settings, batch)
            assert not drawn, "the reference drew as often"
            assert [row["prompt"] for row in samples] == [prompt.text for prompt in scored.prompts[::GROUP]]
            np.testing.assert_array_equal(rewards_B, scored.rewards_B)
            arrays = record(batch, scored.rewards_B, ours.group_ids())
            there = {
                name: getattr(other, f"{name}_BT").numpy()
                for name in ("attention_mask", "completion_mask", "input_ids")
            }
            here, there = columns_used(arrays), columns_used(there)
            for name, of_reference in there.items():
                np.testing.assert_array_equal(here[name], of_reference, err_msg=name)
            # float64 rounding of rewards of at most 1, and of the deviation of sixteen of them
            np.testing.assert_allclose(batch.advantages_B, other.advantages_B.numpy(), rtol=1e-10, atol=1e-12)
            names = expected.keys() & metrics.keys() - {*ROUNDING, "tokens_per_second"}
            names = {name for name in names if not name.startswith("time/")}
            assert {"groups_without_signal", "loss", "kl/mean", "beta"} <= names
            assert {"refill/discarded_tokens", "refill/reward"} <= names or refill is None
            assert {"curriculum/rate", "curriculum/again"} <= names or "prompts" not in sections
            errors = scalar_errors(
                {name: np.asarray(metrics[name], float) for name in names},
                {name: np.asarray(expected[name], float) for name in names},
                "float64",
            )
            # Rewards are float32, and their mean is taken in float32 by one side and in float64 by the other.
            rough = {
                name: errors.pop(name)
                for name in list(errors)
                if "reward" in name or ("mean" in name and "length" in name)
            }
            show(f"iteration {iteration}", errors, TOLERANCES["float64"].scalars)
            show("float32", {name: float(value) for name, value in rough.items()}, 1e-6)
            wanted = ("refill/rounds", "groups_without_signal", "curriculum/again", "curriculum/retired")
            taken.append([metrics.get(name, 0) for name in wanted])
        moved = {n: x - begin[n] for n, x in to_hf(ours.state.params, ours.policy.architecture).items()}
        after = {n: p.detach().numpy() - begin[n] for n, p in theirs.state.model.named_parameters()}
        show("change", tensor_errors(observable(moved), observable(after), ""), TOLERANCES["float64"].change)
    rounds, empty, again, retired = np.array(taken).max(0)
    print(
        f"at most {rounds} further rounds, {empty} slots left without signal, {again} prompts drawn again, {retired} retired"
    )
    assert (rounds > 0) == (refill is not None)
    if refill is not None and (refill["rounds"] == 1 or "tokens" in refill):
        assert empty > 0, "a partial batch"
    if "prompts" in sections:
        assert again > 0 < retired
