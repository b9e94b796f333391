"""The curriculum: what it draws is what its definition says, and does not depend on where a run was stopped.

Whole iterations of both implementations are in test_parity_draws.
"""

import itertools

import chex
import jax
import numpy as np
import pydantic
import pytest
from conftest import config
from sparse_runs import PROMPTS, Sparse, begin_again, sparse_config, untimed, write_positions

from jax_grpo.chess.positions.sources import selfplay_positions
from jax_grpo.config.sections import CheckpointConfig, CurriculumConfig
from jax_grpo.prompts.curriculum import Curriculum
from jax_grpo.prompts.dataset import PromptDataset
from jax_grpo.run.checkpoints import Checkpoints, load
from jax_grpo.run.files import CheckpointError
from jax_grpo.run.resume import require_same_run
from jax_grpo.trainer import Trainer
from torch_ref.curriculum import Curriculum as Reference

SETTINGS = CurriculumConfig(passed=0.6, target=0.4, width=0.3, again=0.4, revisit=0.15, solved=0.9)


def made(size: int, seed: int = 0, **changes) -> Curriculum:
    """Over a data set in the order of its numbers, epoch after epoch."""
    return Curriculum(SETTINGS.model_copy(update=changes), seed, size, lambda place: place % size)


def observed(curriculum: Curriculum, rates: dict[int, float]) -> Curriculum:
    """Each prompt with its rate, of a group of 20."""
    for number, rate in rates.items():
        curriculum.observe([number], np.float32(np.arange(20) < round(20 * rate)))
    return curriculum


def test_earlier_prompts_are_drawn_by_their_distance_from_the_target():
    """Pairs without replacement: P(i, j) = w_i / W * w_j / (W - w_i), as counted in 20,000 draws."""
    rates, draws = {0: 0.0, 1: 0.2, 2: 0.4, 3: 0.75, 4: 0.85}, 20_000
    curriculum = observed(made(9, again=1.0, revisit=0.0), rates)
    counted = dict.fromkeys(itertools.permutations(rates, 2), 0)
    for _ in range(draws):
        counted[tuple(curriculum.draw(2))] += 1
    weight = {number: np.exp(-(((rate - 0.4) / 0.3) ** 2) / 2) for number, rate in rates.items()}
    whole = sum(weight.values())
    for (i, j), count in counted.items():
        p = weight[i] / whole * weight[j] / (whole - weight[i])
        # four standard deviations of a binomial: one of twenty pairs is beyond by chance in 800 changes of the seed
        assert abs(count / draws - p) < 4 * np.sqrt(p * (1 - p) / draws), (i, j)


def test_shares_are_met_on_average_and_the_rest_follows_the_order():
    curriculum = observed(
        made(1000), {number: 0.5 for number in range(100)} | {number: 1.0 for number in range(100, 200)}
    )
    curriculum.restore(curriculum.arrays() | {"next": [200]})
    kinds, fresh = [], []
    for _ in range(240):
        sampled = curriculum.draw(7)
        assert len(set(sampled)) == 7
        kinds.append([sum(number < 100 for number in sampled), sum(100 <= number < 200 for number in sampled)])
        fresh += [number for number in sampled if number >= 200]
    means = np.mean(kinds, 0)
    print(
        f"of 7 prompts {means[0]:.2f} earlier ones and {means[1]:.2f} retired ones; {SETTINGS.again * 7}, {SETTINGS.revisit * 7}"
    )
    assert {tuple(kind) for kind in kinds} == {(2, 1), (3, 1), (2, 2), (3, 2)}, "rounded up or down"
    # a share's remainder is a coin: standard deviation at most 0.5 / sqrt(240)
    np.testing.assert_allclose(means, [7 * SETTINGS.again, 7 * SETTINGS.revisit], atol=4 * 0.033)
    assert len(fresh) > 600 and fresh == [*range(200, 200 + len(fresh))], "in their order, none left out"


def test_what_is_solved_is_drawn_by_revisits_alone_and_comes_back_when_it_fails():
    curriculum = observed(made(6, again=0.5, revisit=0.0), {0: 1.0, 1: 0.9, 2: 0.5, 3: 0.0})
    sampled = [number for _ in range(60) for number in curriculum.draw(2)]
    assert set(sampled) == {2, 3, 4, 5}
    observed(curriculum, {0: 0.2})  # runs to (1 + 0.2) / 2
    assert 0 in {number for _ in range(60) for number in curriculum.draw(2)}
    only = observed(made(3, again=0.5, revisit=0.0), dict.fromkeys(range(3), 1.0))
    assert sorted(number for _ in range(3) for number in only.draw(1)) == [0, 1, 2], "all is solved: the order goes on"
    assert sorted(made(2).draw(5)) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1]), "a data set smaller than a draw"


def test_a_rate_is_a_running_mean_of_passed_shares_and_a_reward_passes_to_a_millionth():
    curriculum = made(4, newest=0.25, passed=0.8)
    summed = np.float32(0.35) + np.float32(0.45)
    assert summed < np.float32(0.8)
    curriculum.observe([2, 0], np.float32([summed, 0.799, 0.95, -1, 0, 0, 0, 0]))
    np.testing.assert_array_equal(curriculum.rate_N, np.float32([0, -1, 0.5, -1]))
    curriculum.observe([2, 2], np.float32([1, 1, 1, 1, 0, 0, 0, 1]))
    assert curriculum.rate_N[2] == 0.625 + 0.25 * (0.25 - 0.625)
    assert curriculum.metrics() | {"curriculum/rate": 0} == {
        "curriculum/known": 2, "curriculum/retired": 0, "curriculum/never_passed": 1, "curriculum/rate": 0, "curriculum/again": 0
    }  # fmt: skip


@pytest.mark.parametrize("solved", [None, 1.0])
def test_a_prompt_that_failed_once_is_retired_again_after_the_same_visits_in_both(solved):
    """By default after a few groups that all pass; also at a rate of 1, which no running mean comes back to but by rounding."""
    settings = CurriculumConfig(passed=1.0) if solved is None else CurriculumConfig(passed=1.0, solved=solved)
    ours = Curriculum(settings, 0, 3, lambda place: place % 3)
    theirs = Reference(settings, 0, PromptDataset(selfplay_positions(1, 0)[:3], 0))
    visits = []
    for curriculum in (ours, theirs):
        for number, rewards in ((0, [1.0] * 7 + [0.0]), (1, [1.0] * 8)):
            curriculum.observe([number], np.float32(rewards))
        assert curriculum.metrics()["curriculum/retired"] == 1, (
            "a group that all passes is solved, one that does not is not"
        )
        count = 0
        while curriculum.metrics()["curriculum/retired"] == 1 and count < 60:
            curriculum.observe([0], np.ones(8, np.float32))
            count += 1
        visits.append(count)
    assert visits == ([3, 3] if solved is None else [17, 17])


@pytest.mark.parametrize("changes", [{}, {"width": 0.02, "newest": 1.0}, {"again": 0.9, "revisit": 0.1, "solved": 0.5}])
def test_both_implementations_draw_the_same_prompts(changes):
    """For three epochs of 40 positions, several draws an iteration; a narrow Gaussian has weights beyond float64's range."""
    dataset = PromptDataset(selfplay_positions(2, 0)[:40], 5)
    settings, rng = SETTINGS.model_copy(update=changes), np.random.default_rng(1)
    ours = Curriculum(settings, 5, len(dataset), lambda place: dataset.at(place)[0])
    theirs, retired = Reference(settings, 5, dataset), 0
    for _ in range(60):
        before: list[int] = []
        for _ in range(rng.integers(1, 4)):
            sampled = ours.draw(6, before)
            assert sampled == theirs.draw(6, before)
            rewards = np.float32(rng.random(24) < np.repeat(np.resize([0.1, 0.5, 0.99, 0.8], 40)[sampled], 4))
            ours.observe(sampled, rewards)
            theirs.observe(sampled, rewards.tolist())
            before += sampled
        retired = max(retired, ours.metrics()["curriculum/retired"])
        assert ours.metrics() == pytest.approx(theirs.metrics(), abs=1e-6), "rates are float32 here"
    assert retired > 0


@pytest.mark.parametrize(
    ("sections", "metric"),
    [
        ({}, "reward/mean"),
        ({"rollout": {"refill": {"rounds": 2}}}, "reward/unselected"),
        ({"prompts": {"curriculum": {"passed": 0.3}}}, "reward/unselected"),
        ({"rollout": {"refill": {"rounds": 2}}, "checkpoint": {"best_metric": "loss"}}, "loss"),
    ],
)
def test_the_best_checkpoint_is_not_that_of_the_prompts_which_were_picked_most_kindly(sections, metric):
    assert config(**sections).best_metric() == metric


# In a run ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> Trainer:
    folder = write_positions(tmp_path_factory.mktemp("curriculum"))
    prompts = {"source": str(folder / "positions.jsonl"), "curriculum": {"passed": 0.3, "again": 0.75}}
    settings = sparse_config({"rounds": 2}, prompts=prompts)
    built = Trainer(settings, Sparse(Sparse.Settings()))
    begin_again(built, jax.tree.map(np.array, built.state))
    return built


def test_unselected_is_of_the_first_draws_prompts_that_follow_the_order(trainer, monkeypatch):
    fresh, sampled = jax.tree.map(np.array, trainer.state), []
    generate, reward, begun = trainer._draw, trainer._reward, trainer.prompts.curriculum.arrays()
    monkeypatch.setattr(trainer, "_draw", lambda *given: sampled.append([generate(*given)]) or sampled[-1][0])
    monkeypatch.setattr(trainer, "_reward", lambda *given: sampled[-1].append(reward(*given)) or sampled[-1][1])
    seen, compared = set(), 0
    for iteration in range(5):
        sampled.clear()
        actual = trainer.iterate(iteration)[0]["reward/unselected"]
        (first, scored), *_ = sampled
        groups = zip(first.numbers, scored.rewards_B.reshape(PROMPTS, -1), strict=True)
        own = [rewards for number, rewards in groups if number not in seen]
        seen |= {number for one, _ in sampled for number in one.numbers}
        assert np.isnan(actual) if not own else actual == pytest.approx(np.mean(own))
        compared += 0 < len(own) < PROMPTS
    assert compared > 0, "some were picked, and some not"
    trainer.prompts.curriculum.restore(begun)
    begin_again(trainer, fresh)


def test_a_run_that_continues_draws_what_it_would_have_drawn(trainer, tmp_path):
    """Through a checkpoint on the disk, with refill's further draws."""
    fresh, nothing = jax.tree.map(np.array, trainer.state), trainer.prompts.curriculum.arrays()
    whole = [trainer.iterate(iteration) for iteration in range(5)]
    assert (
        whole[4][0]["curriculum/again"] >= PROMPTS / 2 and sum(metrics["refill/rounds"] for metrics, _, _ in whole) > 0
    )
    end, known = jax.tree.map(np.array, trainer.state), trainer.prompts.curriculum.arrays()
    begin_again(trainer, fresh)
    trainer.prompts.curriculum.restore(nothing)
    for iteration in range(3):
        trainer.iterate(iteration)
    with Checkpoints(tmp_path, CheckpointConfig(keep_best=0)) as checkpoints:
        checkpoints.save(3, trainer.saved(), trainer.manifest(3, 0), {"reward/mean": 0.0})
    begin_again(trainer, fresh)
    trainer.prompts.curriculum.restore(nothing)
    trainer.restore(load(tmp_path / "000003"))
    for iteration in (3, 4):
        metrics, scored, _ = trainer.iterate(iteration)
        assert untimed(metrics) == untimed(whole[iteration][0])
        assert scored.completions == whole[iteration][1].completions
    chex.assert_trees_all_equal(jax.tree.map(np.array, trainer.state), end)
    chex.assert_trees_all_equal(trainer.prompts.curriculum.arrays(), known)
    begin_again(trainer, fresh)
    trainer.prompts.curriculum.restore(nothing)


def test_a_run_is_not_continued_with_rates_that_were_counted_otherwise(trainer, tmp_path):
    with Checkpoints(tmp_path, CheckpointConfig(keep_best=0)) as checkpoints:
        checkpoints.save(1, trainer.saved(), trainer.manifest(1, 0), {"reward/mean": 0.0})
    origin, config = load(tmp_path / "000001"), trainer.config
    assert require_same_run(origin, config) == []
    for curriculum, actual in (
        (None, r"\(not set\)"),
        (config.prompts.curriculum.model_copy(update={"passed": 0.5}), "0.5"),
    ):
        other = config.model_copy(update={"prompts": config.prompts.model_copy(update={"curriculum": curriculum})})
        with pytest.raises(
            CheckpointError, match=rf"prompts.curriculum.passed is '?{actual}'?, but .* was made with 0.3"
        ):
            require_same_run(origin, other)
    narrow = config.prompts.curriculum.model_copy(update={"width": 0.1})
    other = config.model_copy(update={"prompts": config.prompts.model_copy(update={"curriculum": narrow})})
    assert require_same_run(origin, other) == ["prompts.curriculum.width: 0.25 -> 0.1"]


def test_shares_of_more_than_a_draw_are_refused():
    with pytest.raises(
        pydantic.ValidationError, match=r"again 0.9 and prompts.curriculum.revisit 0.2 are more than a whole draw"
    ):
        CurriculumConfig(passed=1.0, again=0.9, revisit=0.2)
