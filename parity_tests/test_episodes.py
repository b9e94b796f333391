"""Episodes of several turns: what was sampled with kept caches is what whole sequences give, in both implementations and in
`transformers`; observations are read and not trained on; one turn is the run without episodes.
"""

import dataclasses
import functools
import itertools
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
import torch
import transformers
from both import jax_policy, jax_step, objective, settings, show, torch_model, torch_step, weights
from conftest import config, shapes_given
from flax import nnx, struct
from short_runs import cut_and_whole, lines_without_times
from test_parity import LEVELS

import torch_ref.model
import torch_ref.options
import torch_ref.train
from jax_grpo.batch import Batch, GroupedTokens, record
from jax_grpo.config import Config, ConfigError, load_config
from jax_grpo.config.tasks import TaskConfig
from jax_grpo.memory.programs import LATER_TURNS, run_of
from jax_grpo.model.flops import completions_work
from jax_grpo.model.gpt2 import GPT2Config
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import to_hf
from jax_grpo.objective import AGGREGATIONS
from jax_grpo.positions.dataset import heldout_positions
from jax_grpo.programs import unscored
from jax_grpo.report.records import read_records, sample_rows
from jax_grpo.rollout import decoding
from jax_grpo.rollout.episodes import Episodes, ObservationTooLong, Played
from jax_grpo.rollout.generate import Kept, encode_prompts, row_keys, uniforms
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import Texts
from jax_grpo.system.phases import Phases
from jax_grpo.tasks.base import Prompt, RewardError
from jax_grpo.tasks.episodes import EpisodicTask
from jax_grpo.tasks.guess import GuessTask
from jax_grpo.tasks.stop import StopRule, word_stop
from jax_grpo.tasks.toy import LengthTask
from jax_grpo.train import make_evaluator, train
from jax_grpo.trainer import Trainer
from jax_grpo.update import init_state, make_step
from torch_ref.compare import TOLERANCES, difference, logp_error, scalar_errors, tensor_errors

CHESS = Tokenizer.load("chess")
SIZES = GPT2Config(vocab_size=585, num_layers=2, num_heads=2, hidden_size=16, max_position_embeddings=96)
TURNS, OBSERVED, GROUP = 3, 6, 2
CAPS = [20, 3, 20, 5]  # of the prompts: half of them go on, into a second chunk of the cache
PROMPTS = [Prompt(text, 0, max_new_tokens=cap) for text, cap in zip(["a", "b c d", "e2e4 w", "9"], CAPS, strict=True)]
STATE_7 = np.zeros((2, 256), np.int32)
STATE_7[0, ord("7")], STATE_7[1] = 1, 1
SEVENS = StopRule(STATE_7, 1, np.zeros((2, 256), bool))  # one token in ten has a 7, and ends a completion
PENALISED = Sampling(temperature=0.7, repetition_penalty=1.3)


class Answering:
    """Answers with one to six letters, and ends an episode in one of `ends` cases."""

    def __init__(self, ends: int, draw: tuple[int, ...] = ()):
        self.ends, self.draw = ends, draw

    def step(self, completion: str) -> tuple[str, bool]:
        number = zlib.crc32(completion.encode())
        return " answer"[: 2 + number % 5], number // 7 % self.ends == 0


class Talk(EpisodicTask):
    """A prompt's own text says nothing of how long its episodes are."""

    name, component_weights, stop_rule = "talk", {"turns": 1.0}, SEVENS

    def __init__(self, ends: int = 4, over=()):
        self.ends, self.over, self.begun = ends, over, 0

    def reset(self, prompt):
        self.begun += 1
        # 1: the first answer is the last
        return Answering(1 if self.begun - 1 in self.over else self.ends, prompt.draw)

    def score(self, prompts, episodes):
        return {"turns": np.array([len(episode.turns) for episode in episodes], np.float32)}


class Made(NamedTuple):
    played: Played
    tokens: GroupedTokens
    batch: Batch
    kept: Kept


def episodes_config(turns: int = TURNS, cap: int = 20, observed: int = OBSERVED, **sections) -> Config:
    base: dict = {"task": {"name": "guess", "episode": {"turns": turns, "max_observation_tokens": observed}}}
    base |= {"rollout": {"max_new_tokens": cap, "group_size": GROUP, "temperature": PENALISED.temperature}}
    model = {"tokenizer": "chess", "max_position_embeddings": 96} | sections.pop("model", {})
    return config(**base, model=model, prompts={"per_iteration": len(PROMPTS), "max_prompt_tokens": 16}, **sections)


@functools.cache
def _program(dtype: str, compacts: bool):
    """The programs of both kinds of turn, and what they compute with."""
    windows = episodes_config().windows()
    policy = jax_policy(weights(4.0, SIZES), dtype, SIZES)
    texts = Texts(CHESS, SEVENS, windows.completion)
    programs = texts.episode_programs(policy.graphdef, windows, PENALISED, group_size=GROUP, compacts=compacts)
    return policy, windows, programs


def play(task, dtype: str = "float64", compacts: bool = True) -> Made:
    with jax.enable_x64(dtype == "float64"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(decoding, "LEAST_CHUNK", decoding.CHUNK_MULTIPLE)  # two chunks of the cache, and compaction
        policy, windows, (generate, next_turn) = _program(dtype, compacts)
        last = []

        def spied(*arguments):
            last[:] = next_turn(*arguments)
            return last

        player = Episodes(task, CHESS, windows, GROUP, generate, spied)
        tokens = encode_prompts([prompt.text for prompt in PROMPTS], CHESS, 16)
        played = player.play(policy.params, PROMPTS, tokens, np.arange(4, dtype=np.int32), 5, 2, Phases())
        batch = unscored(*map(jnp.asarray, tokens), played)
        return Made(played, batch.tokens, batch, last[1])


@pytest.fixture(scope="module")
def made() -> Made:
    found = play(Talk())
    turns = [len(episode.turns) for episode in found.played.episodes]
    assert set(turns) == {1, 2, TURNS}, "some episodes end early"
    assert len({str(episode) for episode in found.played.episodes}) > 4
    return found


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
    stopped = np.asarray(made.played.stopped_PG).reshape(-1)
    assert stopped.tolist() == [episode.done and not episode.cut for episode in made.played.episodes]
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
            logits = hidden[mask] @ model.wte.embedding[...][: SIZES.vocab_size].T / temperature
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
    found = []
    for ids, places in contiguous(made):
        with torch.no_grad():
            logits = hub(torch.from_numpy(ids[None]).long()).logits[0] / temperature
        found.append(torch.log_softmax(logits, -1)[places - 1, torch.from_numpy(ids[places]).long()].numpy())
    errors["transformers"] = difference("transformers", np.concatenate(found), expected)
    show("log-probabilities", errors, 1e-10)


@pytest.mark.slow  # another pair of programs; by default whole sequences prove the compacted ones
def test_compaction_changes_no_token(made):
    plain = play(Talk(), compacts=False)
    for name, ours, theirs in zip(Played._fields[:-1], made.played, plain.played, strict=False):
        np.testing.assert_allclose(ours, theirs, atol=1e-12, err_msg=name)


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
    seen = np.asarray(made.kept.seen_PGV).reshape(8, -1)
    # a row that is done goes on to draw padding, which is the end-of-text token
    assert (seen == expected)[:, 1:].all()


def test_work_counts_each_token_that_is_read_once(made):
    work = completions_work(made.tokens.prompt_mask_PT, made.tokens.completion_mask_PGC)
    rows, prompts = contiguous(made), np.asarray(made.tokens.prompt_mask_PT).sum(-1)
    read = [len(ids) - 1 - prompts[row // GROUP] for row, (ids, _) in enumerate(rows)]  # a last token is not read
    assert work.tokens == sum(read) + sum(prompts)


def test_a_token_is_drawn_by_the_number_of_its_column():
    """Where all tokens are as likely, the number alone decides: a later turn does not draw what the first one drew."""
    with pytest.MonkeyPatch.context() as patched:
        policy = _program("float64", True)[0]
        nothing = policy._replace(params=jax.tree.map(jnp.zeros_like, policy.params))
        patched.setitem(globals(), "_program", lambda *which, real=_program: (nothing, *real(*which)[1:]))
        found = play(Talk())
    with jax.enable_x64(True):
        keys = row_keys(5, jnp.int32(2), jnp.arange(4), GROUP)
        numbers = uniforms(keys, episodes_config().windows().columns, jnp.float64)
    mask = np.asarray(found.played.completion_mask_PGC) == 1
    seen = np.asarray(found.kept.seen_PGV)
    assert seen.any() and mask[..., 26:].sum() > 10
    # equal logits: a penalty changes none of them
    expected = np.floor(np.asarray(numbers) * SIZES.vocab_size)
    np.testing.assert_array_equal(np.asarray(found.played.completion_ids_PGC)[mask], expected[mask])


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
        compiled = jax.jit(make_step(policy.graphdef, settings, settings.optimizer_steps()))

        def step(batch: Batch) -> dict[str, np.ndarray]:
            with jax.enable_x64(True):
                _, metrics, logp_BS, grads = compiled(init_state(policy.params, settings), batch)
                out = {name: np.asarray(value) for name, value in metrics.items()} | {"logp": np.asarray(logp_BS)}
                return out | {f"grad/{name}": value for name, value in to_hf(grads, SIZES).items()}

    tokens = Relabelled(**vars(batch.tokens), expected_PGC=batch.tokens.completion_ids_PGC)
    return Update(step, dataclasses.replace(batch, tokens=tokens), arrays)


def test_loss_kl_and_gradients_of_episodes_are_the_references(update):
    found = update.step(update.batch)
    reference = torch_step(step_config(objective=objective("clip")), weights(4.0, SIZES), update.arrays, SIZES)
    allowed, columns = TOLERANCES["float64"], found["logp"].shape[1]
    assert reference["clip_fraction/low"] > 0 and reference["clip_fraction/high"] > 0, "both clip sides act"
    mask = update.arrays["completion_mask"]
    show("logp", {"logp": logp_error(found["logp"], reference["logp"][:, -columns:], mask[:, -columns:])}, allowed.logp)
    show("loss and metrics", scalar_errors(found, reference, "float64"), allowed.scalars)
    show("gradients", tensor_errors(found, reference), allowed.gradients)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("name", "level"), [(n, v) for n in LEVELS for v in LEVELS[n]])
def test_every_objective_of_recorded_episodes_is_the_references(update, name, level, aggregation):
    made_of = weights(4.0, SIZES)
    top = {} if name == "gmpo" else {"entropy_quantile": 0.3}  # a sequence's loss has no tokens to leave out
    settings = step_config(objective=objective(name, aggregation=aggregation, importance_level=level, **top))
    found = jax_step(settings, made_of, update.arrays, architecture=SIZES)
    reference = torch_step(settings, made_of, update.arrays, SIZES)
    allowed = TOLERANCES["float64"]
    show("loss and metrics", scalar_errors(found, reference, "float64"), allowed.scalars)
    show("gradients", tensor_errors(found, reference), allowed.gradients)


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
    said = dataclasses.replace(tokens, completion_ids_PGC=jnp.where(observed, other, ids))
    heard = update.step(dataclasses.replace(update.batch, tokens=said))
    assert abs(heard["loss"] - plain["loss"]) > 1e-6
    assert max(tensor_errors(heard, plain).values()) > 1e-2


# Whole runs ------------------------------------------------------------------------------------------------------------


class OneTurn(EpisodicTask):
    """The length task as an episode of one turn."""

    name, stop_rule = "length", word_stop()

    def __init__(self):
        self._task = LengthTask(TaskConfig(name="length"))
        self.component_weights, self.prompt = self._task.component_weights, self._task.prompt

    def reset(self, prompt):
        class Ends:
            def step(self, completion):
                return "", True  # which nobody reads

        return Ends()

    def score(self, prompts, episodes):
        return self._task.score(prompts, [episode.turns[0].completion for episode in episodes])


def test_an_episode_of_one_turn_is_bit_for_bit_the_run_without_episodes(tmp_path):
    sizes = {"num_layers": 1, "hidden_size": 16, "tokenizer": "chess", "max_position_embeddings": 128}
    shared: dict = {"model": sizes, "prompts": {"max_prompt_tokens": 80}, "kl": {"beta": 0.0}, "run_dir": str(tmp_path)}
    plain = Trainer(config(task={"name": "length"}, **shared))
    episode = Trainer(config(task={"episode": {"turns": 1}}, **shared), OneTurn())
    for iteration in range(3):
        (ours, scored, batch), (theirs, others, other) = episode.iterate(iteration), plain.iterate(iteration)
        timed = re.compile("time/|memory/|compile/|flops_per_second/|tokens_per_second|mfu/")
        ours, theirs = ({k: v for k, v in m.items() if not timed.match(k)} for m in (ours, theirs))
        assert ours == theirs and scored.completions == others.completions
        for mine, same in zip(jax.tree.leaves(batch), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(mine, same)
    for mine, same in zip(jax.tree.leaves(episode.state), jax.tree.leaves(plain.state), strict=True):
        np.testing.assert_array_equal(mine, same)
    assert ours["grad_norm"] > 0 and 0 < ours["truncated_fraction"] < 1


@pytest.fixture(scope="module")
def guessing(tmp_path_factory) -> tuple[Trainer, dict]:
    """A trainer of the number game, and the shapes that its programs were given."""
    folder = str(tmp_path_factory.mktemp("guess"))
    sizes = {"num_layers": 1, "hidden_size": 16}
    trainer = Trainer(episodes_config(turns=3, cap=2, observed=8, model=sizes, run_dir=folder, kl={"beta": 0.1}))
    return trainer, shapes_given(trainer, "generate", "next_turn", "score", "update")


@pytest.mark.slow  # four programs and their shapes
def test_a_run_of_episodes_compiles_each_program_once_and_tells_its_turns(guessing):
    trainer, seen = guessing
    metrics, scored, batch = trainer.iterate(0)
    compiled = {name: metrics[f"compile/{name}"] for name in ("generate", "next_turn", "update")}
    assert compiled == dict.fromkeys(compiled, 1), "one program for all later turns"
    again = trainer.iterate(1)[0]
    assert not any(again[f"compile/{name}"] for name in compiled) and len(seen["next_turn"]) >= 3
    turns = [len(episode.turns) for episode in scored.episodes]
    assert metrics["episode/turns/mean"] == np.mean(turns)
    assert metrics["completion_length/mean"] == np.asarray(batch.mask_BS).sum(-1).mean(), "observations are not written"
    assert metrics["truncated_fraction"] == pytest.approx(1 - np.asarray(scored.rollout.stopped_PG).mean())
    assert metrics["logp_mismatch/max"] < 2e-5
    rows = sample_rows(
        scored.prompts,
        scored.completions,
        scored.rewards_B,
        scored.components,
        trainer.config,
        episodes=scored.episodes,
    )
    assert rows[0]["completion"] == "".join("".join(turn) for turn in rows[0]["turns"]) and "truncated" in rows[0]
    planned = {
        program.name: [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(program.arguments)]
        for program in run_of(trainer.config).programs
    }
    assert planned["rollout"] == seen["generate"][0] and planned[LATER_TURNS] == seen["next_turn"][0]
    assert planned["reference"] == seen["score"][0] and planned["update"] == seen["update"][0]


@pytest.mark.slow  # three runs
def test_a_run_of_episodes_that_died_and_was_continued_is_the_run_that_did_not(tmp_path, monkeypatch):
    def settings(name: str) -> Config:
        sections: dict = {"kl": {"beta": 0.1, "adaptive": True}, "checkpoint": {"every": 1}, "iterations": 4}
        sections |= {"logging": {"samples_every": 1, "tensorboard": False}, "run_dir": str(tmp_path / name)}
        return episodes_config(turns=3, cap=2, observed=8, model={"num_layers": 1, "hidden_size": 16}, **sections)

    cut, whole = cut_and_whole(settings, monkeypatch)
    ours, theirs = lines_without_times(cut), lines_without_times(whole)
    assert ours == theirs and len(ours) == 4 and ours[3]["episode/turns/mean"] > 1
    for name in ("samples.jsonl", "weights/model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow  # four programs for 64 prompts
def test_held_out_episodes_are_played_to_their_end_greedy_and_sampled(tmp_path):
    sizes = {"num_layers": 1, "hidden_size": 16}
    settings = episodes_config(
        turns=3, cap=2, observed=8, model=sizes, run_dir=str(tmp_path), evaluation={"positions": 3}
    )
    trainer = Trainer(settings)
    evaluator = make_evaluator(trainer, heldout_positions(settings, trainer.positions))
    assert evaluator is not None
    found = evaluator(trainer.state.params)
    for mode in ("greedy", "sampled"):
        assert {f"eval/{mode}/{name}" for name in ("reward", "found", "sooner", "number")} <= set(found.metrics)
        assert len(found.completions[mode]) == 3 and all(2 <= text.count(":") <= 3 for text in found.completions[mode])
    assert len(set(found.completions["greedy"])) == 1 < len(set(found.completions["sampled"])), (
        "one prompt, and no guess is right"
    )
    names = [program.name for program in run_of(settings).programs]
    assert names[-4:] == [f"evaluation/{mode}{end}" for mode in ("greedy", "sampled") for end in ("", ", later turns")]


def test_the_references_training_refuses_a_task_that_answers(tmp_path):
    with pytest.raises(
        ConfigError, match=r"task\.name is guess, whose completions are answered: torch_ref\.train has one turn"
    ):
        torch_ref.train.Trainer(episodes_config(cap=2, run_dir=str(tmp_path)), torch_ref.options.Options())


class Faulty(Talk):
    """Answers what a test tells it to."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.calls = answer, 0

    def reset(self, prompt):
        task = self

        class Environment:
            def step(self, completion):
                task.calls += 1
                return task.answer(task.calls)

        return Environment()


def bad_move(call: int):
    if call == 3:
        raise ValueError("no such move")
    return " ok", False


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda call: (" far too long", False), ObservationTooLong, r"task 'talk', sample 0: prompt 'a', observation ' far too l"
         r".* has 13 tokens; expected 1 to task.episode.max_observation_tokens = 6"),
        (lambda call: ("", False), ObservationTooLong, r"observation '' has 0 tokens; expected 1 to"),
        (bad_move, RewardError, r"task 'talk', sample 2: prompt 'b c d', completion '.*': step raised ValueError: no such move"),
        (lambda call: " ok", RewardError, r"sample 0: prompt 'a', completion .*: step returned ' ok'; expected \(obs"),
        (lambda call: (3, True), RewardError, r"step returned \(3, True\); expected"),
    ],
    ids=["too long", "empty", "raises", "no pair", "no text"],
)  # fmt: skip
def test_an_answer_that_cannot_be_used_is_one_error_that_names_the_sample(answer, error, message):
    with pytest.raises(error, match=message):
        play(Faulty(answer))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"name": "guess", "episode": {"turns": 3, "max_observation_tokens": 1}},
          "objective": {"overlong_penalty": {"length": 2, "weight": 1.0}}},
         "objective.overlong_penalty is of one completion, and task.episode.turns is 3"),
        ({"task": {"name": "guess", "episode": {"turns": 3, "max_observation_tokens": 4}}},
         "prompts.max_prompt_tokens + task.episode.turns 3 x rollout.max_new_tokens + 2 x task.episode.max_observation_tokens = 34 "
         "exceeds model.max_position_embeddings 32"),
    ],
)  # fmt: skip
def test_settings_that_cannot_stand_beside_episodes_are_refused(sections, message):
    with pytest.raises(pydantic.ValidationError, match=re.escape(message)):
        config(**sections)


def test_turns_of_a_task_that_answers_nothing_are_refused_before_anything_is_compiled(tmp_path):
    wide = {"tokenizer": "chess", "max_position_embeddings": 256}
    settings = config(
        task={"episode": {"turns": 2}}, model=wide, prompts={"max_prompt_tokens": 80}, run_dir=str(tmp_path)
    )
    with pytest.raises(ConfigError, match=r"task\.episode\.turns is 2, but the task 'length' answers no completion"):
        Trainer(settings, LengthTask(TaskConfig(name="length")))


# The toy ---------------------------------------------------------------------------------------------------------------


def found_share(guesses, numbers: int, turns: int) -> float:
    """Share of the hidden numbers that a way of guessing finds; `guesses(answers so far)` gives the next guess."""
    task = GuessTask(TaskConfig(name="guess", guess_numbers=numbers, episode={"turns": turns}))
    found = []
    for number in range(1, numbers + 1):
        hidden, answers, done = task.reset(Prompt("", 0, answer=str(number))), [], False
        while not done:
            observation, done = hidden.step(f" {guesses(answers)}")
            answers.append(observation)
        found.append(hidden.found)
    return float(np.mean(found))


def halving(answers) -> int:
    low, high = 1, 7
    for answer in answers:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if answer == " higher:" else (low, middle - 1)
    return (low + high) // 2


def test_the_number_is_found_by_its_answers_and_not_without_them():
    assert found_share(halving, 7, 3) == 1
    blind = {found_share(lambda answers: order[len(answers)], 7, 3) for order in itertools.product(range(9), repeat=3)}  # noqa: B023
    assert max(blind) == 3 / 7


def test_the_hidden_numbers_are_of_the_prompt_and_even():
    task = GuessTask(TaskConfig(name="guess", episode={"turns": 3}))
    drawn = [int(task.prompt(None, seed).answer) for seed in range(700)]  # pyright: ignore[reportArgumentType]
    assert drawn == [int(task.prompt(None, seed).answer) for seed in range(700)]
    counts = np.bincount(drawn, minlength=8)[1:]
    assert len(counts) == 7 and abs(counts - 100).max() < 40, "four standard deviations"
    assert len({task.prompt(None, seed).text for seed in range(9)}) == 1, "nothing of it is in the prompt"
    for text, expected in {" 5": " 5", " 12": " 1", "  7 ": "  7", "x": "", " x": " "}.items():
        assert task.stop_rule.truncate(text, 0) == (expected, True)


@pytest.mark.slow  # some hundred iterations
def test_the_number_game_is_learnt_beyond_what_blind_guessing_can(tmp_path):
    """No policy that ignores the answers finds more than three of seven numbers; halving finds all: 20 x 512 episodes."""
    path = str(Path(__file__).parents[1] / "configs" / "guess.yaml")
    run = train(load_config(path, ["--run_dir", str(tmp_path / "run"), "--logging.samples_every", "0"]))
    found = [record["reward/found/mean"] for record in read_records(run / "metrics.jsonl")]
    print(
        f"found: {np.mean(found[:5]):.3f} at the start, {np.mean(found[-20:]):.3f} in the last 20; blindly at most {3 / 7:.3f}"
    )
    # 1 on the machine of docs/episodes.md; a run whose rounding leads it to begin with 3 or 5 can end at 6 of 7
    assert np.mean(found[:5]) < 3 / 7 and np.mean(found[-20:]) > 0.8
