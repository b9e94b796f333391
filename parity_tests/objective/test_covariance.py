"""Clip-Cov and KL-Cov: which tokens are held back and what that does, by both implementations, with verl's formulas as judge.

The judge is written from verl's `compute_policy_loss_clip_cov` and `compute_policy_loss_kl_cov`, in torch, on one batch that is not
cut. It takes its covariances of the policy being trained; ours are of the policy that sampled, the same on a first step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
import torch
from conftest import config as tiny_config

from jax_grpo.batch import Batch
from jax_grpo.config import Config
from jax_grpo.lm_head.loops import LEARNS
from jax_grpo.loss import token_terms
from jax_grpo.objective.covariance import covariances, held_back, lottery
from torch_ref.covariance import held_back as torch_held_back
from torch_ref.covariance import ticket
from torch_ref.objective import TOKEN_WEIGHTS, Totals
from torch_ref.objective import token_terms as torch_terms

B, S = 12, 9
RNG = np.random.default_rng(8)
MASK = (np.arange(S) < RNG.integers(1, S + 1, (B, 1))).astype(np.float64)
OLD = -RNG.exponential(1.5, (B, S))
LOGP = np.minimum(OLD + 0.4 * RNG.normal(size=(B, S)), -0.01)
ADVANTAGES = RNG.normal(size=B) * (np.arange(B) != 4)  # a row without one: its penalty counts all the same
GARBAGE = np.where(MASK, 0.0, np.nan)
TOKENS = int(MASK.sum())


def settings(name: str, **changes) -> Config:
    cov = {"cov_share": 0.2} | ({"cov_bounds": [0.01, 0.6]} if name == "clip_cov" else {"cov_penalty": 0.7})
    return tiny_config(seed=5, objective={"name": name} | cov | changes, kl={"beta": 0.0}, update={"epochs": 2})


def verl(config: Config, logp: torch.Tensor, covariance_logp: torch.Tensor, lot: np.ndarray | None) -> torch.Tensor:
    """Mean over tokens; `lot` are what its `torch.randperm` is to have drawn, of which it says how many and from where."""
    how, mask, old = config.objective, torch.from_numpy(MASK), torch.from_numpy(OLD)
    advantages = torch.from_numpy(ADVANTAGES)[:, None].expand(B, S)
    difference = logp - old
    ratio = difference.exp()
    losses = -advantages * ratio

    def masked_mean(x: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum() / mask.sum()

    if how.name == "clip_cov":
        bounded = -advantages * ratio.clamp(1 - how.epsilon_low, 1 + how.epsilon_high)
        covariance = (advantages - masked_mean(advantages)) * (covariance_logp - masked_mean(covariance_logp))
        inside = (covariance < how.cov_bounds[1]) & (covariance > how.cov_bounds[0]) & (mask > 0)
        number = min(max(int(how.cov_share * mask.sum().item()), 1), int(inside.sum()))
        assert lot is not None and lot.sum() == number and inside[torch.from_numpy(lot)].all()
        assert number < inside.sum(), "some are left"
        return masked_mean(torch.maximum(losses, bounded) * torch.from_numpy(~lot))
    there = torch.nonzero(mask.reshape(-1) > 0)[:, 0]
    of, logp_of = (x.reshape(-1)[there].detach() for x in (advantages, covariance_logp))
    number = max(1, int(len(there) * how.cov_share))
    large = there[torch.topk((of - of.mean()) * (logp_of - logp_of.mean()), number).indices]
    penalised = (losses + how.cov_penalty * difference.abs()).reshape(-1)
    return masked_mean(losses.reshape(-1).index_put((large,), penalised[large]).reshape(B, S))


def ours(config: Config, logp: np.ndarray, step: int = 0) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, its gradient in logp, and the tokens held back, by `jax_grpo`; call under x64."""
    batch = Batch(
        tokens=None,  # pyright: ignore[reportArgumentType]
        mask_BS=jnp.asarray(MASK),
        advantages_B=jnp.asarray(ADVANTAGES),
        stopped_B=jnp.ones(B, bool),
        old_logp_BS=jnp.asarray(OLD + GARBAGE),
    )
    terms = token_terms(batch, 0.0, config.learning(), jnp.float64, step=step)
    actual = jax.value_and_grad(lambda x: jnp.sum(terms.loss(x + GARBAGE, x)))(jnp.asarray(logp))
    assert terms.held_back_BS is not None
    return float(actual[0]), np.asarray(actual[1]), np.asarray(terms.held_back_BS) == 1


def theirs(config: Config, logp: np.ndarray, step: int = 0) -> tuple[float, np.ndarray, np.ndarray]:
    """The same by `torch_ref`."""
    x, mask, advantages = torch.tensor(logp, requires_grad=True), torch.from_numpy(MASK), torch.from_numpy(ADVANTAGES)
    old = torch.from_numpy(OLD + GARBAGE)
    held = torch_held_back(old, advantages, mask, config.objective, config.seed, step)
    terms = torch_terms(
        config.objective, logp_BT=x + torch.from_numpy(GARBAGE), mask_BT=mask, advantages_B=advantages, old_logp_BT=old,
        held_back_BT=held,
    )  # fmt: skip
    loss = (TOKEN_WEIGHTS["dapo"](mask, Totals(B, TOKENS, S)) * terms.policy_BT).sum()
    loss.backward()
    assert x.grad is not None
    return float(loss.detach()), x.grad.numpy(), held.numpy()


@pytest.mark.parametrize("logp", [OLD, LOGP], ids=["on policy", "off policy"])
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_both_implementations_are_verls_formula(name, logp, x64):
    config = settings(name)
    actual = [side(config, logp, step=3) for side in (ours, theirs)]
    x = torch.tensor(logp, requires_grad=True)
    loss = verl(config, x, torch.from_numpy(OLD), actual[0][2])
    loss.backward()
    assert x.grad is not None
    for side_loss, gradient, held in actual:
        np.testing.assert_array_equal(held, actual[0][2])
        np.testing.assert_allclose(side_loss, float(loss.detach()), rtol=1e-12)
        np.testing.assert_allclose(gradient, np.where(MASK, x.grad.numpy(), 0), rtol=1e-10, atol=1e-15)
    plain, without, _ = ours(
        settings(name, cov_share=1e-9) if name == "clip_cov" else settings(name, cov_penalty=1e-9), logp
    )
    assert (plain == actual[0][0]) == (name == "kl_cov" and logp is OLD), (
        "at ratio 1 nothing is far from the old policy"
    )
    assert np.abs(without - actual[0][1]).max() > 1e-3 or (name == "kl_cov" and logp is OLD)


@pytest.mark.parametrize("size", [0.0, 9e-16, -9e-16, 3e-6])
def test_rounding_between_the_policy_and_the_one_that_sampled_is_no_distance(size, x64):
    """Two programs never round alike: without a dead zone a first step would lower, or raise, what was just sampled."""
    for side in (ours, theirs):
        loss, gradient, held = side(settings("kl_cov"), OLD + size)
        exact, expected, same = side(settings("kl_cov"), OLD)
        np.testing.assert_array_equal(held, same)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)
        assert loss == pytest.approx(exact, rel=1e-5)
    far = [side(settings("kl_cov"), OLD - 3e-5)[1] - side(settings("kl_cov"), OLD)[1] for side in (ours, theirs)]
    assert all(np.abs(change).max() > 0.5 * 0.7 / TOKENS for change in far), "beyond it the slope is cov_penalty"


def test_equal_covariances_are_taken_in_the_order_of_rows_and_tokens_whatever_their_rounding(x64):
    """A group's first tokens are of one context: where two samples are alike, so are their covariances, but for rounding."""
    config, rng = settings("kl_cov", cov_share=0.4).objective, np.random.default_rng(0)
    advantages, mask = np.array([1.0, 1, 1, 1, -1, -1]), np.ones((6, 5))
    logp = np.tile([-1.0, -1, -1, -3, -3], (6, 1))
    actual = []
    for noise in (0.0, 1e-15, 1e-9):
        noisy = logp + noise * rng.normal(size=logp.shape)
        actual.append(
            np.asarray(held_back(jnp.asarray(noisy), jnp.asarray(advantages), jnp.asarray(mask), config, 0, 0))
        )
        given = torch.from_numpy(noisy), torch.from_numpy(advantages), torch.from_numpy(mask)
        actual.append(torch_held_back(*given, config, 0, 0).numpy())
    for other in actual:
        np.testing.assert_array_equal(other, actual[0])
    assert actual[0][:4, :3].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]], (
        "8 of 12, behind the 4 of rows 4 and 5"
    )


def test_a_token_that_is_penalised_learns_though_it_has_no_advantage():
    """A fused head leaves out what it is told has no gradient."""
    batch = Batch(
        tokens=None,  # pyright: ignore[reportArgumentType]
        mask_BS=jnp.asarray(MASK),
        advantages_B=jnp.zeros(B),
        stopped_B=jnp.ones(B, bool),
        old_logp_BS=jnp.asarray(OLD),
    )
    terms = token_terms(batch, 0.0, settings("kl_cov").learning(), jnp.float32)
    work_BS = np.asarray(terms.head_work())
    np.testing.assert_array_equal(work_BS == LEARNS, np.asarray(terms.held_back_BS) == 1)
    assert (work_BS == LEARNS).sum() == int(0.2 * TOKENS)


def test_covariances_are_those_of_numpy(x64):
    there = MASK == 1
    a, x = np.broadcast_to(ADVANTAGES[:, None], (B, S))[there], OLD[there]
    actual = np.asarray(covariances(jnp.asarray(OLD + GARBAGE), jnp.asarray(ADVANTAGES), jnp.asarray(MASK)))
    np.testing.assert_allclose(actual[there].mean(), np.cov(a, x, ddof=0)[0, 1], rtol=1e-12)
    assert (actual[~there] == 0).all()


def test_the_lottery_is_of_seed_step_row_and_number_and_of_nothing_else():
    config = settings("clip_cov").objective
    given = jnp.asarray(OLD), jnp.asarray(ADVANTAGES), jnp.asarray(MASK)
    draws = {(seed, step): np.asarray(held_back(*given, config, seed, step)) for seed in (0, 1) for step in range(40)}
    distinct = {draw.tobytes() for draw in draws.values()}
    assert len(distinct) > 70, "80 draws of a tenth of the tokens"
    times = sum(draws.values())
    inside = np.asarray((covariances(*given) > config.cov_bounds[0]) & (covariances(*given) < config.cov_bounds[1])) & (
        MASK == 1
    )
    share = times[inside] / len(draws)
    expected = max(1, int(config.cov_share * TOKENS)) / inside.sum()
    print(
        f"each of {inside.sum()} tokens is drawn in {share.min():.2f} to {share.max():.2f} of the draws, expected {expected:.2f}"
    )
    # 80 draws: five deviations of a share
    assert np.abs(share - expected).max() < 5 * np.sqrt(expected * (1 - expected) / len(draws))
    # Another layout: completions behind columns of a prompt.
    wide = [np.pad(x, ((0, 0), (4, 0)), constant_values=c) for x, c in ((OLD, np.nan), (MASK, 0))]
    other = held_back(jnp.asarray(wide[0]), given[1], jnp.asarray(wide[1]), config, 0, 7)
    np.testing.assert_array_equal(np.asarray(other)[:, 4:], draws[0, 7])
    numbers = np.asarray(lottery(jnp.asarray(MASK), 2**31 - 1, 123))
    assert numbers[3, 0] == ticket(2**31 - 1, 123, 3, 1) and numbers.dtype == np.uint32


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize(
    ("share", "mask", "count"), [(1e-4, MASK, 1), (0.1, np.ones((3, 10)), 3), (0.5, MASK * 0, 0), (1.0, MASK, TOKENS)]
)
def test_at_least_one_token_is_held_back_and_a_share_is_exact_in_every_precision(name, share, mask, count):
    changes = {"cov_bounds": [-1e3, 1e3]} if name == "clip_cov" else {}
    config, rows = settings(name, cov_share=share, **changes).objective, slice(0, len(mask))
    logp = np.resize(OLD, mask.shape)
    actual = held_back(jnp.float32(logp), jnp.float32(ADVANTAGES[rows]), jnp.float32(mask), config, 0, 0)
    expected = torch_held_back(torch.tensor(logp), torch.tensor(ADVANTAGES[rows]), torch.tensor(mask), config, 0, 0)
    assert int(actual.sum()) == int(expected.sum()) == count


def test_none_between_the_bounds_is_the_plain_clip(x64):
    far, clip = settings("clip_cov", cov_bounds=[50.0, 60.0]), tiny_config(kl={"beta": 0.0})
    loss, gradient, held = ours(far, LOGP)
    terms = torch_terms(
        clip.objective, logp_BT=torch.from_numpy(LOGP), mask_BT=torch.from_numpy(MASK),
        advantages_B=torch.from_numpy(ADVANTAGES), old_logp_BT=torch.from_numpy(OLD),
    )  # fmt: skip
    assert not held.any() and loss == pytest.approx(float(terms.policy_BT.sum()) / TOKENS, rel=1e-12)
    assert np.isfinite(gradient).all()


def test_the_policy_that_sampled_is_scored_first_though_there_is_one_step():
    one = {"epochs": 1, "minibatches": 1}
    assert tiny_config(objective={"name": "kl_cov"}, update=one).learning().needs_old_logp
    assert not tiny_config(update=one).learning().needs_old_logp


def test_what_cannot_stand_together_is_refused_and_what_does_nothing_is_said():
    with pytest.raises(pydantic.ValidationError, match=r"objective.cov_bounds \[5.0, 5.0\]: the lower bound must be"):
        tiny_config(objective={"name": "clip_cov", "cov_bounds": [5.0, 5.0]})
    with pytest.raises(
        pydantic.ValidationError,
        match=r"objective.importance_level sequence is of objective.name clip, cispo, sapo; kl_cov",
    ):
        tiny_config(objective={"name": "kl_cov", "importance_level": "sequence"})
    with pytest.raises(pydantic.ValidationError, match=r"epsilon_low 1.0 must be below 1"):
        tiny_config(objective={"name": "clip_cov", "epsilon_low": 1.0})
    assert [" nothing is held back" in c for c in tiny_config(objective={"name": "kl_cov"}).cautions()] == [True]
    assert settings("kl_cov").cautions() == []
