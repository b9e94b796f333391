"""Refill: which groups an iteration trains on, what it cost, and that neither depends on where a run was stopped.

The task pays some prompts only, so that most groups have no signal, whatever the model writes.
"""

import dataclasses

import chex
import jax
import numpy as np
import pydantic
import pytest
import torch
from sparse_runs import GROUP, PROMPTS, Shaped, Sparse, begin_again, sparse_config, untimed, write_positions

from jax_grpo.config import ConfigError
from jax_grpo.config.sections import CheckpointConfig, CurriculumConfig, RefillConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.iteration.draw import PromptSampler
from jax_grpo.iteration.refill import alike, batch_of, slots
from jax_grpo.iteration.reward import Samples
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.prompts.curriculum import Curriculum
from jax_grpo.prompts.dataset import PromptDataset
from jax_grpo.report.console import Console
from jax_grpo.rollout.generate import PromptTokens, PromptTooLong, Rollout
from jax_grpo.run.checkpoints import Checkpoints, load
from jax_grpo.system.compilation import compilations
from jax_grpo.system.phases import Phases
from jax_grpo.tasks.base import Component, Logged, Prompt, Task, total_reward
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tasks.toy import LengthTask
from jax_grpo.trainer import Trainer
from torch_ref.refill import silent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the positions are."""
    return write_positions(tmp_path_factory.mktemp("refill"))


@pytest.fixture(autouse=True)
def positions(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def trainer(folder) -> Trainer:
    """With at most five further rounds; its programs serve several tests."""
    settings = sparse_config({"rounds": 5}, prompts={"source": str(folder / "positions.jsonl")})
    made = Trainer(settings, Sparse(Sparse.Settings()))
    begin_again(made, jax.tree.map(np.array, made.state))
    return made


def test_slots_are_filled_in_the_order_in_which_groups_were_drawn():
    rng = np.random.default_rng(0)
    for _ in range(300):
        size, rounds = rng.integers(1, 6), rng.integers(1, 5)
        signal = rng.random((rounds, size)) < rng.random()
        # One group after another, each to the first slot that wants one.
        expected, open_slots = list(range(size)), [slot for slot in range(size) if not signal[0, slot]]
        for number in range(size, rounds * size):
            if signal.reshape(-1)[number] and open_slots:
                expected[open_slots.pop(0)] = number
        assert slots(list(signal)).tolist() == expected


def test_an_iteration_trains_on_the_groups_that_its_definition_names_and_counts_the_others(trainer):
    """Each round as if an iteration had drawn these prompts at first: the same completions, whatever the round."""
    fresh, cursor, full = jax.tree.map(np.array, trainer.state), 0, 0
    compiled_since, widths = compilations(), set()
    for iteration in range(3):
        groups, draws = [], 0  # of all rounds, in order: prompt, its completions, their rewards and lengths
        while sum(map(has_signal, groups)) < PROMPTS and draws < 6:
            trainer.prompts.further = cursor + draws - iteration
            draw = trainer._draw(iteration, Phases())
            widths.add(draw.tokens.ids_PT.shape[1])
            made = trainer._reward(iteration, draw)
            for start in range(0, PROMPTS * GROUP, GROUP):
                rows = slice(start, start + GROUP)
                groups.append(
                    (
                        draw.prompts[start // GROUP].text,
                        made.completions[rows],
                        made.rewards_B[rows],
                        made.lengths_B[rows],
                    )
                )
            draws += 1
        trainer.prompts.further = cursor - iteration
        metrics, scored, batch = trainer.iterate(iteration)
        cursor += draws
        later = [group for group in groups[PROMPTS:] if has_signal(group)]
        retained = [group if has_signal(group) or not later else later.pop(0) for group in groups[:PROMPTS]]
        assert [prompt.text for prompt in scored.prompts[::GROUP]] == [group[0] for group in retained]
        assert scored.completions == [text for group in retained for text in group[1]]
        np.testing.assert_array_equal(scored.rewards_B, np.concatenate([group[2] for group in retained]))
        assert scored.logged.extras["characters"] == [len(text) for text in scored.completions]
        assert len(scored.logged.metrics["characters"]) == len(groups) * GROUP, "of everything that was rewarded"
        advantages_PG = np.asarray(batch.advantages_B).reshape(PROMPTS, GROUP)
        assert [bool((row != 0).any()) for row in advantages_PG] == list(map(has_signal, retained))
        tokens = sum(group[3].sum() for group in groups)
        assert {name: value for name, value in metrics.items() if name.startswith("refill/")} == {
            "refill/rounds": draws - 1,
            "refill/drawn": len(groups),
            "refill/without_signal": len(groups) - sum(map(has_signal, groups)),
            "refill/discarded": len(groups) - PROMPTS,
            "refill/discarded_tokens": tokens - np.asarray(batch.mask_BS).sum(),
            "refill/reward": pytest.approx(np.concatenate([group[2] for group in groups]).mean()),
        }
        unselected = np.concatenate([group[2] for group in groups[:PROMPTS]]).mean()
        assert metrics["reward/unselected"] == pytest.approx(unselected), (
            "of what was drawn before any reward was known"
        )
        assert metrics["groups_without_signal"] == PROMPTS - sum(map(has_signal, retained))
        assert trainer.manifest(iteration + 1, 0)["next_prompt"] == cursor * PROMPTS
        full += metrics["groups_without_signal"] == 0 and draws > 1
    print(f"{full} batches were filled up by further rounds; prompts of {widths} tokens")
    assert full > 0
    assert all(compiled_since()[f"compile/{name}"] <= len(widths) for name in ("generate", "score", "update"))
    begin_again(trainer, fresh)


def test_a_group_that_differs_beside_the_outcome_alone_is_without_signal(folder):
    """Without `by` every group differs by its lengths; with it those of prompts that nobody is paid for train nothing."""
    settings = sparse_config({"rounds": 2, "by": "paid/right"}, prompts={"source": str(folder / "positions.jsonl")})
    made = Trainer(settings, Shaped(Shaped.Settings()))
    fresh, actual = jax.tree.map(np.array, made.state), {}
    for by in (None, "paid/right"):
        begin_again(made, fresh)
        refill = settings.rollout.refill.model_copy(update={"by": by})
        made.config = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"refill": refill})})
        actual[by] = made.iterate(0)
    metrics, samples, batch = actual["paid/right"]
    right_PG = samples.components["paid/right"].values_B.reshape(PROMPTS, GROUP)
    differs_P = (right_PG != right_PG[:, :1]).any(1)
    advantages_PG = np.asarray(batch.advantages_B).reshape(PROMPTS, GROUP)
    np.testing.assert_array_equal((advantages_PG != 0).any(1), differs_P)
    assert metrics["groups_without_signal"] == (~differs_P).sum() and metrics["refill/rounds"] > 0
    plain, samples, batch = actual[None]
    rewards_PG = samples.rewards_B.reshape(PROMPTS, GROUP)
    assert plain["groups_without_signal"] == (rewards_PG == rewards_PG[:, :1]).all(1).sum() < (~differs_P).sum()


def test_a_component_is_asked_only_where_it_is_about_something():
    values_PG, about_PG = (
        np.array([[1, 1], [1, 0], [0, 1], [0, 0]]),
        np.array([[True] * 2, [True] * 2, [True, False], [False] * 2]),
    )
    assert alike(values_PG, about_PG).tolist() == [True, False, True, False]
    ids_B = torch.arange(4).repeat_interleave(2)
    rows = silent(torch.from_numpy(values_PG.reshape(-1)), torch.from_numpy(about_PG.reshape(-1)), ids_B)
    assert rows.reshape(4, 2)[:, 0].tolist() == [True, False, True, False], "the reference's"


@pytest.mark.parametrize(
    ("by", "sections", "sentence"),
    [
        (
            "paid/rihgt",
            {},
            r"rollout\.refill\.by is 'paid/rihgt'.* no such component\. Did you mean paid/right\? It has paid/right, short",
        ),
        (
            "paid/right",
            {"short": 0.0},
            r"rollout\.refill\.by 'paid/right' would do nothing: it is the only component of the reward",
        ),
    ],
)
def test_an_outcome_that_is_not_there_or_is_all_there_is_is_refused(folder, by, sections, sentence):
    settings = sparse_config({"rounds": 1, "by": by}, prompts={"source": str(folder / "positions.jsonl")})
    task = Shaped(Shaped.Settings())
    task.component_weights |= sections
    with pytest.raises(ConfigError, match=sentence):
        Trainer(settings, task)


def has_signal(group: tuple) -> bool:
    return len(set(group[2].tolist())) > 1


def test_a_spent_budget_leaves_the_other_slots_their_own_groups(trainer):
    fresh, settings = jax.tree.map(np.array, trainer.state), trainer.config
    actual = {}
    for name, refill in {
        "none": None,
        "one round": RefillConfig(rounds=1),
        "tokens": RefillConfig(rounds=5, tokens=17),
        "five": RefillConfig(rounds=5),
    }.items():
        begin_again(trainer, fresh)
        rollout = settings.rollout.model_copy(update={"refill": refill})
        trainer.config = settings.model_copy(update={"rollout": rollout})
        actual[name] = trainer.iterate(0)
    trainer.config = settings
    begin_again(trainer, fresh)
    (metrics, none, _), (spent, one, batch), (least, *_), (most, *_) = actual.values()
    assert most["refill/rounds"] > 1 and spent["refill/rounds"] == 1
    assert 0 < spent["groups_without_signal"] < metrics["groups_without_signal"]
    assert not any(name.startswith("refill/") for name in metrics)
    assert least["refill/rounds"] == 0, "the first round's completions have the tokens"
    # Nothing was replaced, and not a number differs from those of a run that knows no refill.
    assert untimed(metrics).items() <= untimed(least).items()
    # What stays without signal has its own tokens, on which the KL and the denominators are.
    for slot, advantages_G in enumerate(np.asarray(batch.advantages_B).reshape(PROMPTS, GROUP)):
        rows = slice(slot * GROUP, (slot + 1) * GROUP)
        if not advantages_G.any():
            assert one.completions[rows] == none.completions[rows] and one.prompts[rows] == none.prompts[rows]
    assert int(batch.mask_BS.sum()) == one.lengths_B.sum() and (one.lengths_B > 0).all()


def test_a_run_that_continues_draws_what_it_would_have_drawn(trainer, tmp_path):
    """Through a checkpoint on the disk, one round behind another iteration's."""
    fresh = jax.tree.map(np.array, trainer.state)
    whole = [trainer.iterate(iteration) for iteration in range(2)]
    assert whole[0][0]["refill/rounds"] > 0 < whole[1][0]["refill/rounds"]
    end, further = jax.tree.map(np.array, trainer.state), trainer.prompts.further
    begin_again(trainer, fresh)
    trainer.iterate(0)
    with Checkpoints(tmp_path, CheckpointConfig(keep_best=0)) as checkpoints:
        checkpoints.save(1, trainer.state, trainer.manifest(1, 0), {"reward/mean": 0.0})
    begin_again(trainer, fresh)
    origin = load(tmp_path / "000001")
    assert origin.content["next_prompt"] == (1 + whole[0][0]["refill/rounds"]) * PROMPTS
    trainer.restore(origin)
    again = trainer.iterate(1)
    assert untimed(again[0]) == untimed(whole[1][0]) and again[1].completions == whole[1][1].completions
    assert trainer.prompts.further == further
    chex.assert_trees_all_equal(jax.tree.map(np.array, trainer.state), end)
    # A checkpoint of before refill has a cursor of whole iterations.
    trainer.restore(load(tmp_path / "000001")._replace(content=origin.content | {"next_prompt": PROMPTS}))
    assert trainer.prompts.further == 0
    begin_again(trainer, fresh)


def test_a_prompt_that_comes_again_in_a_later_round_is_sampled_anew(trainer):
    """Under one number its completions would be the same ones, and count twice."""
    dataset = trainer.prompts.dataset
    trainer.prompts.dataset = PromptDataset([trainer.positions[0]], 0)
    drawn = [np.asarray(trainer._draw(0, Phases(), number).rollout.completion_ids_PGC) for number in (0, 1)]
    trainer.prompts.dataset = dataset
    assert len({group.tobytes() for group in np.concatenate(drawn)}) == 2 * PROMPTS


@pytest.mark.slow_cases("-two", "curriculum-tokens")
@pytest.mark.parametrize("budget", [{"rounds": 2}, {"rounds": 5, "tokens": 140}], ids=["two", "tokens"])
@pytest.mark.parametrize("curriculum", [None, {"passed": 0.1, "again": 0.6, "revisit": 0.1}], ids=["", "curriculum"])
def test_a_draw_begun_beside_rewards_changes_no_number_but_what_it_cost(curriculum, budget, trainer, monkeypatch):
    fresh, settings, output, actual = jax.tree.map(np.array, trainer.state), trainer.config, [], {}
    score = trainer.task.score
    monkeypatch.setattr(trainer.task, "prepare", lambda prompts: output.append("generate"))
    monkeypatch.setattr(trainer.task, "score", lambda *given: output.append("reward") or score(*given))
    for ahead in (False, True):
        begin_again(trainer, fresh)
        if curriculum is not None:
            how, places = CurriculumConfig(**curriculum), lambda place: trainer.prompts.dataset.at(place)[0]
            trainer.prompts.curriculum = Curriculum(how, settings.seed, len(trainer.prompts.dataset), places)
        rollout = settings.rollout.model_copy(update={"refill": RefillConfig(**budget, ahead=ahead)})
        trainer.config, output[:] = settings.model_copy(update={"rollout": rollout}), []
        made = [trainer.iterate(iteration) for iteration in range(4)]
        state = jax.tree.map(np.array, trainer.saved())
        costs = [
            {name: metrics.pop(f"refill/{name}", None) for name in ("unused", "unused_tokens")} for metrics, *_ in made
        ]
        records = [untimed(metrics) for metrics, *_ in made], [scored.completions for _, scored, _ in made]
        drawn_tokens = [m["refill/discarded_tokens"] + int(scored.lengths_B.sum()) for m, scored, _ in made]
        seconds = [m["time/rollout"] + ahead * m["time/reward"] for m, *_ in made]
        generated = [m["tokens_per_second"] * spent for (m, *_), spent in zip(made, seconds, strict=True)]
        assert generated == pytest.approx(
            [a + (b["unused_tokens"] or 0) for a, b in zip(drawn_tokens, costs, strict=True)]
        )
        actual[ahead] = records, state, trainer.prompts.further, costs, list(output)
    trainer.config, trainer.prompts.curriculum = settings, None
    begin_again(trainer, fresh)
    (records, state, cursor, costs, one_by_one), (others, other, other_cursor, ahead_costs, beside) = actual.values()
    assert records == others and cursor == other_cursor > 0
    chex.assert_trees_all_equal(state, other)
    assert all(cost == {"unused": None, "unused_tokens": None} for cost in costs)
    thrown_away = [cost["unused"] for cost in ahead_costs]
    spent = [
        record["refill/rounds"] == budget["rounds"] or tokens >= budget.get("tokens", np.inf)
        for record, tokens in zip(records[0], drawn_tokens, strict=True)
    ]
    assert thrown_away == [0 if each else PROMPTS for each in spent], "one more, wherever there might have been one"
    assert [cost["unused_tokens"] > 0 for cost in ahead_costs] == [groups > 0 for groups in thrown_away]
    assert one_by_one == ["generate", "reward"] * (4 + cursor)
    assert "generate generate reward" in " ".join(beside), "before the rewards of what came first"
    assert beside.count("generate") - beside.count("reward") == sum(thrown_away) / PROMPTS


def test_a_draw_cannot_begin_beside_the_rewards_of_episodes():
    with pytest.raises(
        pydantic.ValidationError, match=r"refill.ahead true generates beside the rewards, and with task"
    ):
        episode = {"turns": 2, "max_observation_tokens": 4}
        sparse_config({"rounds": 2, "ahead": True}, task={"name": "guess", "episode": episode})


def test_prompts_of_further_rounds_are_looked_at_before_anything_is_compiled(folder):
    """The only too long one is of the second draw, which the one iteration comes to with refill alone."""

    class Long(Sparse):
        def prompt(self, position, seed):
            prompt = super().prompt(position, seed)
            wordy = seed - config.seed * 1_000_003 in second
            return dataclasses.replace(prompt, text=prompt.text * 2 if wordy else prompt.text)

    second: set[int] = set()
    for refill in (None, {"rounds": 1}):
        config = sparse_config(refill, iterations=1, prompts={"source": str(folder / "positions.jsonl")})
        task = Long(Long.Settings())
        draws = PromptSampler(config, task, task.read(config.prompts, config.seed, None))
        second = set(draws.in_order(1)[0]) - set(draws.in_order(0)[0])
        assert second
        if refill is None:
            draws.require_fitting(Tokenizer.load("chess"))
        else:
            with pytest.raises(PromptTooLong, match=r"expected 1 to prompts.max_prompt_tokens = 80"):
                draws.require_fitting(Tokenizer.load("chess"))


def test_a_budget_that_lets_no_round_begin_is_refused():
    with pytest.raises(
        pydantic.ValidationError, match=r"rollout.refill.tokens 16 lets no further draw begin: the first one's 16"
    ):
        sparse_config({"rounds": 2, "tokens": 16})
    assert sparse_config({"rounds": 2, "tokens": 17}).rollout.refill.tokens == 17


def test_the_console_shows_how_many_groups_a_batch_took(capsys):
    for refill, shown in ((None, False), ({"rounds": 2}, True)):
        console = Console(sparse_config(refill), Task())
        console.iteration({"iteration": 0, "groups_without_signal": 1, "refill/drawn": 12})
        heading, row = capsys.readouterr().out.splitlines()[:2]
        assert ("drawn" in heading.split()) == shown == ("12" in row.split()), heading


# What else a batch may be made of --------------------------------------------------------------------------------


@pytest.mark.slow  # programs of its own
def test_episodes_are_refilled_whole(folder):
    """What was said, what was read, and the tokens of all turns stay together."""
    settings = sparse_config(
        {"rounds": 6},
        task={"name": "guess", "episode": {"turns": 3, "max_observation_tokens": 9}, "guess_numbers": 7}
        | {"rewards": {"found": 1.0, "sooner": 0.0, "number": 0.0}},  # which random weights rarely do
        prompts={"max_prompt_tokens": 48},
        rollout={"max_new_tokens": 2, "group_size": 2},
    )
    trainer = Trainer(settings)
    for iteration in range(2):
        metrics, scored, batch = trainer.iterate(iteration)
        print({name: value for name, value in metrics.items() if name.startswith(("refill/", "groups"))})
        assert metrics["refill/rounds"] > 0
        again = checked_score(trainer.task, scored.prompts, scored.episodes)
        np.testing.assert_array_equal(scored.rewards_B, total_reward(again, trainer.task.component_weights))
        assert scored.completions == [str(episode) for episode in scored.episodes]
        rows = batch.tokens.flat()
        ids, mask = np.asarray(rows.input_ids_BT), np.asarray(rows.attention_mask_BT).astype(bool)
        for row, (prompt, episode) in enumerate(zip(scored.prompts, scored.episodes, strict=True)):
            # A stop that ends a completion is a token, and no text of its turn.
            read = trainer.tokenizer.decode(ids[row][mask[row]].tolist())
            for output, _ in episode.turns:
                assert output in read and read.startswith(prompt.text), (read, episode)
        advantages_PG = np.asarray(batch.advantages_B).reshape(PROMPTS, 2)
        assert metrics["groups_without_signal"] == sum(not group.any() for group in advantages_PG)
        assert metrics["logp_mismatch/max"] < 2e-5, "float32 rounding of decode against the batched forward"


def test_a_component_that_is_not_about_every_row_stays_so():
    """Masked in one round and whole in another, and a column that one round alone logged."""

    def drawn(number: int, masked: bool, signal: list[bool]) -> Samples:
        mask_PGC = np.ones((2, 2, 3), np.int32) * (1 + number)
        values = np.float32([0, 1, 2, 3]) + 10 * number
        component = Component(values, np.array([not masked, True, True, True]))
        rollout = Rollout(mask_PGC, mask_PGC, mask_PGC, np.ones((2, 2), bool))
        logged = Logged({"n": [float(number)]}, {f"column{number}": [f"{number}{row}" for row in range(4)]})
        texts = [f"{number}{row}" for row in range(4)]
        width = 16 * (1 + number)
        tokens = PromptTokens(
            np.full((2, width), number), np.arange(width) >= np.array([[width - 3], [width - 5 - 16 * number]])
        )
        group = np.zeros((2, 2), np.float32) + number, ~np.array(signal)
        prompts = [Prompt(text, 0) for text in texts]
        return Samples(prompts, tokens, rollout, texts, {"x": component}, values, *group, logged)

    batch = batch_of([drawn(0, True, [True, False]), drawn(1, False, [False, True])], 7)
    assert batch.completions == [prompt.text for prompt in batch.prompts] == ["00", "01", "12", "13"]
    assert batch.components["x"].tolist() == [None, 1, 12, 13] and batch.rewards_B.tolist() == [0, 1, 12, 13]
    assert batch.logged.metrics == {"n": [0.0, 1.0]}
    assert batch.logged.extras == {"column0": ["00", "01", None, None], "column1": [None, None, "12", "13"]}
    assert np.asarray(batch.rollout.completion_ids_PGC)[:, 0, 0].tolist() == [1, 2]
    assert batch.advantages_PG.tolist() == [[0, 0], [1, 1]] and batch.flat_P.tolist() == [False, False]
    assert batch.tokens.ids_PT.tolist() == [[7] * 16 + [0] * 16, [1] * 32] and batch.tokens.mask_PT.sum(
        -1
    ).tolist() == [3, 21]
    narrow = batch_of([drawn(0, False, [True, False]), drawn(1, False, [True, False])], 7)
    assert narrow.tokens.ids_PT.shape == (2, 16) and narrow.tokens.mask_PT.sum(-1).tolist() == [3, 3]
    whole = batch_of([drawn(1, False, [True, False]), drawn(0, False, [False, True])], 7)
    assert whole.components["x"].about_B.all()


@pytest.mark.parametrize(("kind", "remembered"), [(LengthTask, True), (Sparse, False)])
def test_the_longest_prompt_is_remembered_of_a_built_in_task_and_made_anew_of_a_users_own(kind, remembered, tmp_path):
    """Whose code may have changed."""
    config = sparse_config({"rounds": 1}, compilation_cache=str(tmp_path))
    task, made = kind(task_of(name="length")), []
    positions = task.read(config.prompts, 0, None)
    draws = PromptSampler(config, task, positions)
    write, task.prompt = task.prompt, lambda *arguments: made.append(arguments) or write(*arguments)
    for again in (False, True):
        made.clear()
        draws.require_fitting(Tokenizer.load("chess"))
        assert bool(made) != (again and remembered)
    shorter = sparse_config({"rounds": 1}, compilation_cache=str(tmp_path), prompts={"max_prompt_tokens": 20})
    with pytest.raises(PromptTooLong, match=r"prompts.max_prompt_tokens = 20"):
        PromptSampler(shorter, task, positions).require_fitting(Tokenizer.load("chess"))
