"""Rollouts on the default device: caches, compaction, stop rules, and what is drawn against the softmax in float64.

Imported tests are those of `test_rollout`: here their arrays are on the device, and its matmuls as exact as float32 is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both import jax_policy, settings, torch_model, weights
from conftest import config
from device import on_gpu, wide_model
from scipy import stats
from test_rollout import (  # noqa: F401 (tests, and the fixture of some)
    generation,
    random_prompts,
    short_chunks,
    stops_often,
    test_a_completion_does_not_depend_on_its_batch,
    test_draw_never_picks_a_token_of_zero_weight,
    test_going_on_with_half_of_the_prompts_changes_no_token,
    test_greedy_tokens_equal_transformers_for_prompts_of_different_lengths,
    test_rows_stop_at_their_stop_and_are_padded_after_it,
    test_samples_follow_the_exact_distribution,
)

from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.config.model import ModelConfig
from jax_grpo.policy.named import load_policy
from jax_grpo.programs import unscored
from jax_grpo.rollout.generate import completion_ids, encode_prompts
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import text_program
from jax_grpo.tasks import make_task
from jax_grpo.update import make_score
from torch_ref.compare import TOLERANCES, difference

pytestmark = pytest.mark.gpu
LENGTHS = (3, 7, 5, 9)  # of prompts


@pytest.fixture(autouse=True)
def exact_matmuls():
    """As float32 is on a CPU: a GPU's default is TF32."""
    with jax.default_matmul_precision("highest"):
        yield


def never(vocabulary: int) -> np.ndarray:
    """Stop table by which no token stops."""
    return np.repeat(np.arange(2)[:, None], vocabulary, axis=1)


def test_first_tokens_are_drawn_by_the_references_softmax():
    """1,024 draws after each of four prompts, in bins of equal probability; V = 50257 on a GPU."""
    draws, bins, temperature = 1024, 16, 0.8
    architecture, scale = wide_model(2)
    of, (ids, mask) = weights(scale, architecture), random_prompts(LENGTHS)
    policy, model = jax_policy(of, "float32", architecture), torch_model(of, "float64", architecture)
    with torch.no_grad():
        hidden = model(torch.from_numpy(ids).long(), torch.from_numpy(mask).long())
        p_PV = torch.softmax(model.logits(hidden[:, -1]) / temperature, -1).numpy()
    vocabulary, numbers = architecture.vocab_size, np.arange(len(LENGTHS))
    generate = generation(
        policy.graphdef, group=draws, new=1, sampling=Sampling(temperature), table=never(vocabulary), vocab=vocabulary
    )
    rollout = generate(policy.params, ids, mask, np.zeros_like(numbers), numbers, 0, 0)
    for p_V, samples in zip(p_PV, np.asarray(rollout.completion_ids_PGC)[..., 0], strict=True):
        order = np.argsort(-p_V)
        before = np.cumsum(p_V[order]) - p_V[order]
        bin_V = np.empty(vocabulary, int)
        bin_V[order] = np.minimum((before * bins).astype(int), bins - 1)
        expected = np.bincount(bin_V, p_V, bins)
        filled = expected > 0  # a token may be likelier than a bin is wide
        counts = np.bincount(bin_V[samples], minlength=bins)[filled]
        p_value = stats.chisquare(counts, expected[filled] * draws).pvalue
        print(f"chi-square p = {p_value:.3f} over {filled.sum()} bins (seed fixed; 0.001 is a 1 in 1000 event)")
        assert p_value > 1e-3


# Two programs round the same numbers: as far apart as two implementations may be.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_of_a_rollout_are_those_that_are_scored(dtype, short_chunks):  # noqa: F811 (the fixture)
    """Over several chunks of the completions' cache, with the prompt's own shared by its group."""
    group, new = 4, 144 if on_gpu() else 20
    architecture, scale = wide_model(12)
    policy = jax_policy(weights(scale, architecture), dtype, architecture)
    ids, mask = random_prompts(LENGTHS)
    numbers, vocabulary = np.arange(len(LENGTHS)), architecture.vocab_size
    shape = {"prompts": {"per_iteration": len(LENGTHS)}, "rollout": {"group_size": group, "max_new_tokens": new}}
    config_ = settings(dtype, **shape, update={"micro_batches": 1})
    sampling = Sampling(config_.rollout.temperature)
    generate = generation(
        policy.graphdef, group=group, new=new, sampling=sampling, table=never(vocabulary), vocab=vocabulary
    )
    rollout = generate(policy.params, ids, mask, np.zeros_like(numbers), numbers, 0, 0)
    scored, _ = make_score(policy.graphdef, config_.learning())(
        policy.params, unscored(jnp.asarray(ids), jnp.asarray(mask), rollout)
    )
    sampled = np.asarray(rollout.sampling_logp_PGC).reshape(-1, new)
    error, allowed = difference("logp", sampled, scored), TOLERANCES[dtype].logp
    print(f"{dtype}: largest difference {error:.1e} nats (tolerance {allowed:.0e})")
    assert error <= allowed and sampled.min() < -1


def test_a_packaged_models_completions_stop_where_their_bytes_say():
    """64 completions of whole rows: the automaton reads their bytes on the host, and accepts at the last token or never."""
    compute = "bfloat16" if on_gpu() else "float32"
    policy = load_policy(ModelConfig(weights="packaged:rook-small", tokenizer="chess", compute_dtype=compute), 0, 64)
    task = make_task(config(task={"name": "policy", "prompt_style": "full"}).task)
    prompts = [task.prompt(position, number) for number, position in enumerate(read_packaged("heldout")[:8])]
    tokens = encode_prompts([prompt.text for prompt in prompts], policy.tokenizer, 96)
    rule, states, numbers = task.stop_rule, np.array([p.start_state for p in prompts]), np.arange(len(prompts))
    program = text_program(policy.graphdef, policy.tokenizer, rule, 64, Sampling(), group_size=8)
    rollout = program.generate(policy.params, tokens.ids_PT, tokens.mask_PT, states, numbers, 0, 0)
    pieces = policy.tokenizer.token_bytes()
    stopped = np.asarray(rollout.stopped_PG).reshape(-1)
    rows = completion_ids(rollout)
    for ids, start, ended in zip(rows, np.repeat(states, 8), stopped, strict=True):
        after = []
        for token in ids:
            state = after[-1] if after else int(start)
            for byte in pieces[token]:
                state = int(rule.transitions_SB[state, byte])
            after.append(rule.accept if token == policy.tokenizer.eos_id else state)
        assert (after[-1] == rule.accept) == ended and rule.accept not in after[:-1]
        assert ended or len(ids) == 64
    assert stopped.sum() > 1, "some stop"
