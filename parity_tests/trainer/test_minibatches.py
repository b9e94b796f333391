"""mu epochs of minibatches, end to end: the trainer's steps against the reference's on a batch that is cut by hand.

Whatever is handed to the wrong row on the way (an advantage, a log-probability, a mask) makes other parameters.
"""

import jax
import numpy as np
from both import WIDTHS, show, torch_model

import torch_ref.batch
from jax_grpo.batch import GroupedTokens, record, split
from jax_grpo.config import load_config
from jax_grpo.model.weights import to_hf
from jax_grpo.trainer import Trainer
from torch_ref.compare import TOLERANCES, difference, observable, tensor_errors
from torch_ref.update import optimiser_step, start

PROMPTS, GROUP, EPOCHS, MINIBATCHES, ITERATION = 6, 4, 2, 3, 5
SETTINGS = {
    "model.param_dtype": "float64",
    "model.compute_dtype": "float64",
    "prompts.per_iteration": PROMPTS,
    "rollout.group_size": GROUP,
    "rollout.max_new_tokens": 12,
    "update.epochs": EPOCHS,
    "update.minibatches": MINIBATCHES,
    "update.micro_batches": 2,
    "update.learning_rate": 3e-3,
    "update.max_grad_norm": 0.3,
    "kl.beta": 0.2,
    "kl.adaptive": "true",
    "kl.target": 0.01,
    "objective.importance_level": "sequence",
    "task.length_cap": 12,
}


def fullest(tokens: GroupedTokens, parts: int) -> int:
    """Real tokens of the fullest micro-batch: no row of padding in that one."""
    pieces = split(tokens, parts)
    masks = zip(pieces.prompt_mask_PT, pieces.completion_mask_PGC[..., :-1], strict=True)
    return max(int(prompt.sum() + completion.sum()) for prompt, completion in masks)


def test_the_trainers_minibatches_are_those_cut_by_hand(x64, tmp_path, request, monkeypatch):
    monkeypatch.setattr("jax_grpo.batch.rows_without_padding", fullest)
    toy = str(request.config.rootpath / "configs" / "length_toy.yaml")
    overrides = [text for name, value in SETTINGS.items() for text in (f"--{name}", str(value))]
    config = load_config(toy, [*overrides, "--run_dir", str(tmp_path)])
    trainer = Trainer(config)
    architecture = trainer.policy.architecture
    updated, update = [], trainer.update
    trainer.update = lambda state, batch, base: (updated.append(batch.tokens), update(state, batch, base))[1]
    before = {name: x.copy() for name, x in to_hf(trainer.state.params, architecture).items()}
    metrics, scored, batch = trainer.iterate(ITERATION)
    after = to_hf(trainer.state.params, architecture)
    assert [tokens.rows for tokens in updated] == [fullest(jax.device_get(tokens), 2) for tokens in updated]
    with_padding = (updated[0].prompt_mask_PT.size + updated[0].completion_mask_PGC[..., :-1].size) // 2
    assert len({tokens.rows for tokens in updated}) > 1 and all(tokens.rows < with_padding for tokens in updated)

    arrays = record(batch, scored.rewards_B, trainer.group_ids())
    advantages = arrays["advantages"].reshape(PROMPTS, GROUP)
    assert len(np.unique(advantages.round(6), axis=0)) == PROMPTS, "another group's advantages are other numbers"
    model = torch_model(before, "float64", architecture)
    reference = start(model, config.learning())
    for epoch in range(EPOCHS):
        order = np.random.default_rng((config.seed, ITERATION, epoch)).permutation(PROMPTS)
        assert (order != np.arange(PROMPTS)).any()
        for groups in np.split(order, MINIBATCHES):
            rows = np.concatenate([np.arange(GROUP * group, GROUP * group + GROUP) for group in groups])
            piece = torch_ref.batch.from_arrays(
                {name: x[rows] for name, x in arrays.items()}, config.learning(), dtype=WIDTHS["float64"]
            )
            theirs = optimiser_step(reference, piece, config.learning())
    assert reference.step == trainer.state.optimizer_step == EPOCHS * MINIBATCHES
    moved = {name: x - before[name] for name, x in after.items()}
    expected = {name: p.detach().numpy() - before[name] for name, p in model.named_parameters()}
    show("change", tensor_errors(observable(moved), observable(expected), ""), TOLERANCES["float64"].change or 0.0)
    names = ("kl/mean", "beta", "ratio/deviation", "entropy", "clip_fraction/low", "logp_mismatch/mean")
    show("last step", {name: difference(name, metrics[name], theirs[name]) for name in names}, 1e-10)
    assert metrics["ratio/first_deviation"] < 1e-9 and metrics["ratio/deviation"] > 1e-3
