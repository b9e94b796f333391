"""Episodes of several turns: what was sampled with kept caches is what whole sequences give, in both implementations and in
`transformers`; observations are read and not trained on.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import played_episodes
import pytest
import torch
import transformers
from both import jax_policy, jax_step, objective, settings, show, torch_model, torch_step, weights
from conftest import arrays_of
from flax import nnx, struct
from played_episodes import (
    CAPS,
    CHESS,
    GROUP,
    OBSERVED,
    PENALISED,
    PROMPTS,
    SEVENS,
    SIZES,
    TURNS,
    Made,
    Talk,
    episodes_config,
    play,
)
from test_parity import LEVELS

import torch_ref.model
import torch_ref.options
import torch_ref.train
from jax_grpo.batch import Batch, GroupedTokens, record
from jax_grpo.config import Config
from jax_grpo.model.flops import completions_work
from jax_grpo.model.weights import to_hf
from jax_grpo.objective import AGGREGATIONS
from jax_grpo.rollout.generate import row_keys, uniforms
from jax_grpo.update import init_state, make_step
from torch_ref.compare import TOLERANCES, difference, logp_error, scalar_errors, tensor_errors


@pytest.fixture(scope="module")
def made() -> Made:
    actual = play(Talk())
    turns = [len(episode.turns) for episode in actual.played.episodes]
    assert set(turns) == {1, 2, TURNS}, "some episodes end early"
    assert len({str(episode) for episode in actual.played.episodes}) > 4
    return actual


def contiguous(made: Made) -> list[tuple[np.ndarray, np.ndarray]]:
    """By row: the tokens that were read, without any padding, and the places of those that the model wrote."""
    flat = made.tokens.flat()
    rows = []
    for ids, read, written in zip(
        *map(np.asarray, (flat.input_ids_BT, flat.attention_mask_BT)), _written(made), strict=True
    ):
        rows.append((ids[read == 1], np.flatnonzero(written[read == 1])))
    return rows


def _written(made: Made) -> np.ndarray:
    """1 on the tokens that the model wrote, [B, T]."""
    columns = made.tokens.flat().input_ids_BT.shape[1] - made.batch.mask_BS.shape[1]
    return np.pad(np.asarray(made.batch.mask_BS), ((0, 0), (columns, 0)))


def recorded(made: Made) -> np.ndarray:
    """Log-probabilities as sampled, of the written tokens in order."""
    mask = np.asarray(made.batch.mask_BS) == 1
    return np.asarray(made.batch.sampling_logp_BS)[mask]


# What was sampled ------------------------------------------------------------------------------------------------------


def test_windows_hold_what_was_said(made):
    """Completions on the left of their windows, observations on the right of theirs, and nothing after an episode's end."""
    windows, (ids, wrote, read) = (
        episodes_config().windows(),
        (np.asarray(x).reshape(len(PROMPTS) * GROUP, -1) for x in (made.played[0], made.played[1], made.played[4])),
    )
    assert ids.shape[1] == windows.columns == 3 * 20 + 2 * 6
    caps = np.repeat(CAPS, GROUP)
    for row, episode in enumerate(made.played.episodes):
        for turn in range(TURNS):
            begin, end = windows.begin(turn), windows.begin(turn) + windows.completion
            length = wrote[row, begin:end].sum()
            assert (wrote[row, begin:end] == (np.arange(20) < length)).all() and (
                read[row, begin:end] == wrote[row, begin:end]
            ).all()
            if turn >= len(episode.turns):
                assert not read[row, begin - OBSERVED :].any()
                continue
            assert 1 <= length <= caps[row]
            text = CHESS.decode(ids[row, begin : begin + length].tolist())
            assert SEVENS.truncate(text, 0)[0] == episode.turns[turn].completion
            between = slice(end, windows.begin(turn + 1)) if turn + 1 < TURNS else slice(0, 0)
            goes_on = turn + 1 < len(episode.turns)
            expected = CHESS.encode(episode.turns[turn].observation) if goes_on else []
            assert ids[row, between][read[row, between] == 1].tolist() == expected
            assert not goes_on or read[row, between.stop - 1] == 1, "its last column predicts the next completion"
            assert not wrote[row, between].any()
    # A token with a 7 ends a completion: one without was cut at its cap, in whichever turn.
    cuts = [
        ["7" not in CHESS.decode(ids[row][columns][wrote[row][columns] == 1].tolist()) for columns in written]
        for row, episode in enumerate(made.played.episodes)
        for written in [[slice(windows.begin(t), windows.begin(t) + 20) for t in range(len(episode.turns))]]
    ]
    stopped = np.asarray(made.played.stopped_PG).reshape(-1)
    ends = list(zip(made.played.episodes, cuts, strict=True))
    assert stopped.tolist() == [episode.done and not any(cut) for episode, cut in ends]
    assert any(episode.done and any(cut) and not cut[-1] for episode, cut in ends), (
        "one was cut before its last turn alone"
    )
    assert {episode.cut for episode in made.played.episodes} == {True, False} and set(stopped.tolist()) == {True, False}


def test_each_episode_has_numbers_of_its_own(made):
    """Seed, iteration, prompt and sample: what is random in an environment follows from them."""
    draws = [episode.environment.draw for episode in made.played.episodes]
    assert draws == [(5, 2, prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(GROUP)]


def test_sampling_logprobs_are_those_of_whole_sequences_in_both_implementations_and_transformers(made):
    """Caches of the prompt, of compacted completions in two chunks, and of earlier turns, against nothing but the token ids."""
    expected, errors = recorded(made), {}
    temperature, written = PENALISED.temperature, made.batch.mask_BS == 1
    with jax.enable_x64(True):
        policy = jax_policy(weights(4.0, SIZES), "float64", SIZES)
        model = nnx.merge(policy.graphdef, policy.params)
        for layout, tokens, mask in (
            ("grouped", made.tokens, written),
            ("flat", made.tokens.flat(), _written(made) == 1),
        ):
            hidden, targets = jax.jit(lambda tokens: tokens.predictions(model))(tokens)
            logits = hidden[mask] @ model.head_VH[: SIZES.vocab_size].T / temperature
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[mask][:, None], -1)[:, 0]
            errors[f"jax_grpo, {layout}"] = difference(layout, logp, expected)
    theirs = torch_model(weights(4.0, SIZES), "float64", SIZES)
    flat = made.tokens.flat()
    tensors = (
        torch.from_numpy(np.array(x)).long() for x in (flat.input_ids_BT, flat.attention_mask_BT, _written(made))
    )
    with torch.no_grad():
        logp, _ = torch_ref.model.score(theirs, *tensors, temperature)
    errors["torch_ref"] = difference("torch_ref", logp.numpy()[_written(made) == 1], expected)
    hub = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=SIZES.vocab_size, n_layer=2, n_head=2, n_embd=16, n_positions=96, bos_token_id=0, eos_token_id=0
        )
    ).eval()
    hub = hub.double()
    hub.load_state_dict({n: torch.from_numpy(x) for n, x in weights(4.0, SIZES).items()}, strict=False)
    actual = []
    for ids, places in contiguous(made):
        with torch.no_grad():
            logits = hub(torch.from_numpy(ids[None]).long()).logits[0] / temperature
        actual.append(torch.log_softmax(logits, -1)[places - 1, torch.from_numpy(ids[places]).long()].numpy())
    errors["transformers"] = difference("transformers", np.concatenate(actual), expected)
    show("log-probabilities", errors, 1e-10)


@pytest.mark.slow  # another pair of programs; by default whole sequences prove the compacted ones
def test_compaction_changes_no_token(made):
    ours, theirs = arrays_of(made.played), arrays_of(play(Talk(), compacts=False).played)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-12, err_msg=name)


def test_episodes_that_end_early_change_nothing_for_the_others(made):
    over = (0, 3, 5)
    other = play(Talk(over=over))
    assert [len(other.played.episodes[row].turns) for row in over] == [1, 1, 1]
    rest = [row for row in range(len(made.played.episodes)) if row not in over]
    assert sum(len(made.played.episodes[row].turns) for row in over) > 3
    for name in ("completion_ids_PGC", "completion_mask_PGC", "read_mask_PGC"):
        ours, theirs = (np.asarray(getattr(x.played, name)).reshape(8, -1)[rest] for x in (made, other))
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_what_was_read_counts_as_repeated(made):
    """The penalty holds for observations and earlier turns as for the prompt."""
    flat, expected = made.tokens.flat(), np.zeros((8, SIZES.padded_vocab_size), bool)
    for row, (ids, read) in enumerate(
        zip(np.asarray(flat.input_ids_BT), np.asarray(flat.attention_mask_BT), strict=True)
    ):
        expected[row, ids[read == 1]] = True
    seen = np.asarray(made.cache.seen_PGV).reshape(8, -1)
    assert (seen == expected).all(), "a row that is done waits with padding, which it did not write"


def test_work_counts_each_token_that_is_read_once(made):
    work = completions_work(made.tokens.prompt_mask_PT, made.tokens.completion_mask_PGC)
    rows, prompts = contiguous(made), np.asarray(made.tokens.prompt_mask_PT).sum(-1)
    read = [len(ids) - 1 - prompts[row // GROUP] for row, (ids, _) in enumerate(rows)]  # a last token is not read
    assert work.tokens == sum(read) + sum(prompts)


def test_a_token_is_drawn_by_the_number_of_its_column():
    """Where all tokens are as likely, the number alone decides: a later turn does not draw what the first one drew."""
    with pytest.MonkeyPatch.context() as patched:
        policy = played_episodes.program("float64", True)[0]
        nothing = policy._replace(params=jax.tree.map(jnp.zeros_like, policy.params))
        real = played_episodes.program
        patched.setattr(played_episodes, "program", lambda *which: (nothing, *real(*which)[1:]))
        actual = play(Talk())
    with jax.enable_x64(True):
        keys = row_keys(5, jnp.int32(2), jnp.arange(4), GROUP)
        numbers = uniforms(keys, episodes_config().windows().columns, jnp.float64)
    mask = np.asarray(actual.played.completion_mask_PGC) == 1
    seen = np.asarray(actual.cache.seen_PGV)
    assert seen.any() and mask[..., 26:].sum() > 10
    # equal logits: a penalty changes none of them
    expected = np.floor(np.asarray(numbers) * SIZES.vocab_size)
    np.testing.assert_array_equal(np.asarray(actual.played.completion_ids_PGC)[mask], expected[mask])


# The update ------------------------------------------------------------------------------------------------------------


def step_config(**sections) -> Config:
    base = settings(
        "float64", prompts={"per_iteration": 4}, rollout={"group_size": GROUP, "max_new_tokens": 20}, **sections
    )
    task = {"name": "guess", "episode": {"turns": TURNS, "max_observation_tokens": OBSERVED}}
    values = base.model_dump(exclude_unset=True) | {"task": task}
    values["model"]["max_position_embeddings"] = 96
    return Config.model_validate(values)


@struct.dataclass
class Relabelled(GroupedTokens):
    """Tokens of which others than what they are would have to be predicted, in some places."""

    expected_PGC: jax.Array

    def predictions(self, model):
        hidden_BSH, targets_BS = super().predictions(model)
        return hidden_BSH, self.expected_PGC.reshape(targets_BS.shape)


class Update(NamedTuple):
    """One optimiser step on the episodes, compiled, and the same batch as it is recorded."""

    step: Callable[[Batch], dict[str, np.ndarray]]
    batch: Batch  # ratios beyond both clip bounds; what the model did not write has no number
    arrays: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def update(made) -> Update:
    rng, mask = np.random.default_rng(0), np.asarray(made.batch.mask_BS) == 1
    logp = np.asarray(made.batch.sampling_logp_BS)
    near = [
        np.where(mask, logp + 0.4 * (rng.normal(size=logp.shape) + rng.normal(size=(8, 1))), np.nan) for _ in range(2)
    ]
    names = {"old_logp_BS": near[0], "ref_logp_BS": near[1], "sampling_logp_BS": np.where(mask, logp, np.nan)}
    batch = dataclasses.replace(made.batch, advantages_B=np.resize([1.0, -1.0, -0.5, 0.5], 8), **names)
    arrays = record(batch, np.arange(8.0), np.repeat(np.arange(4), GROUP), SIZES.vocab_size)
    settings = step_config(objective=objective("clip"))
    with jax.enable_x64(True):
        policy = jax_policy(weights(4.0, SIZES), "float64", SIZES)
        compiled = jax.jit(make_step(policy.graphdef, settings.learning()))

        def step(batch: Batch) -> dict[str, np.ndarray]:
            with jax.enable_x64(True):
                _, metrics, logp_BS, grads = compiled(init_state(policy.params, settings.learning()), batch)
                out = {name: np.asarray(value) for name, value in metrics.items()} | {"logp": np.asarray(logp_BS)}
                return out | {f"grad/{name}": value for name, value in to_hf(grads, SIZES).items()}

    tokens = Relabelled(**vars(batch.tokens), expected_PGC=batch.tokens.completion_ids_PGC)
    return Update(step, dataclasses.replace(batch, tokens=tokens), arrays)


def test_loss_kl_and_gradients_of_episodes_are_the_references(update):
    actual = update.step(update.batch)
    reference = torch_step(step_config(objective=objective("clip")), weights(4.0, SIZES), update.arrays, SIZES)
    allowed, columns = TOLERANCES["float64"], actual["logp"].shape[1]
    assert reference["clip_fraction/low"] > 0 and reference["clip_fraction/high"] > 0, "both clip sides act"
    mask = update.arrays["completion_mask"]
    show(
        "logp", {"logp": logp_error(actual["logp"], reference["logp"][:, -columns:], mask[:, -columns:])}, allowed.logp
    )
    show("loss and metrics", scalar_errors(actual, reference, "float64"), allowed.scalars)
    show("gradients", tensor_errors(actual, reference), allowed.gradients)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("name", "level"), [(n, v) for n in LEVELS for v in LEVELS[n]])
def test_every_objective_of_recorded_episodes_is_the_references(update, name, level, aggregation):
    made_of = weights(4.0, SIZES)
    top = {} if name == "gmpo" else {"entropy_quantile": 0.3}  # a sequence's loss has no tokens to leave out
    settings = step_config(objective=objective(name, aggregation=aggregation, importance_level=level, **top))
    actual = jax_step(settings, made_of, update.arrays, architecture=SIZES)
    reference = torch_step(settings, made_of, update.arrays, SIZES)
    allowed = TOLERANCES["float64"]
    show("loss and metrics", scalar_errors(actual, reference, "float64"), allowed.scalars)
    show("gradients", tensor_errors(actual, reference), allowed.gradients)


def test_observations_are_read_and_not_trained_on(update):
    """What would stand in an observation's place if the model had to write it is nothing to the loss; what stands there is."""
    tokens, plain = update.batch.tokens, update.step(update.batch)
    assert isinstance(tokens, Relabelled)
    ids, wrote = tokens.completion_ids_PGC, update.batch.mask_BS.reshape(tokens.completion_ids_PGC.shape) == 1
    observed = (tokens.completion_mask_PGC == 1) & ~wrote
    other = (ids + 7) % SIZES.vocab_size
    assert observed.sum() > 10
    expected = dataclasses.replace(tokens, expected_PGC=jnp.where(wrote, ids, other))
    relabelled = update.step(dataclasses.replace(update.batch, tokens=expected))
    for name, value in plain.items():
        if name != "logp":
            np.testing.assert_array_equal(value, relabelled[name], err_msg=name)
    assert (plain["logp"] != relabelled["logp"]).any(), "the labels were other ones"
    output = dataclasses.replace(tokens, completion_ids_PGC=jnp.where(observed, other, ids))
    heard = update.step(dataclasses.replace(update.batch, tokens=output))
    assert abs(heard["loss"] - plain["loss"]) > 1e-6
    assert max(tensor_errors(heard, plain).values()) > 1e-2
