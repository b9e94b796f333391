"""Generation: exact distributions, equal to transformers, independent of the batch, stopped where it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from conftest import TINY, arrays_of, tiny_model
from flax import nnx
from scipy import stats

from jax_grpo.chess.tasks.policy import policy_stop
from jax_grpo.model import decode_kernel
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import load_hf
from jax_grpo.rollout import decoding
from jax_grpo.rollout.decoding import DecodingSettings
from jax_grpo.rollout.generate import PromptTooLong, encode_prompts, make_generate
from jax_grpo.rollout.sampling import BLOCK, Sampling, draw, keep_likely, penalise_repetition, sample
from jax_grpo.tasks.stop import word_stop

CHESS = Tokenizer.load("chess")
UNCHANGED = Sampling()
NEVER = np.repeat(np.arange(2)[:, None], TINY.vocab_size, axis=1)  # no token stops


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of the completions' cache so short that a tiny model's completions have several."""
    monkeypatch.setattr(decoding, "LEAST_CHUNK", decoding.CHUNK_MULTIPLE)


def generation(
    graphdef, *, group=2, new=6, sampling=UNCHANGED, table=NEVER, vocab=TINY.vocab_size, compacts=True, past_columns=0
):
    settings = DecodingSettings(
        vocab_size=vocab,
        pad_id=0,
        sampling=sampling,
        stop_table_SV=table,
        accept_state=len(table) - 1,
        compacts=compacts,
    )
    return make_generate(graphdef, settings, group_size=group, max_new_tokens=new, past_columns=past_columns)


def random_prompts(lengths, width=10, seed=0):
    rng = np.random.default_rng(seed)
    ids, mask = np.zeros((2, len(lengths), width), np.int32)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = rng.integers(0, TINY.vocab_size, length)
        mask[row, width - length :] = 1
    return ids, mask


SETTINGS = {
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.4),
    "top_k and top_p": Sampling(temperature=1.3, top_k=8, top_p=0.8),
    "repetition penalty": Sampling(repetition_penalty=1.8),
    "all": Sampling(temperature=1.5, top_k=9, top_p=0.9, min_p=0.3, repetition_penalty=1.4),
}
SEEN = np.arange(128) % 3 == 0  # tokens that count as repeated


def _exact_distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The definition, token by token, sorted once."""
    penalised = np.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
    logits = np.where(SEEN[: len(logits)], penalised, logits)
    p = np.exp(logits / sampling.temperature - np.max(logits / sampling.temperature))
    p /= p.sum()
    order = np.argsort(-p)
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
        p /= p.sum()
    ahead = np.cumsum(p[order]) - p[order]
    p[order[ahead >= sampling.top_p]] = 0
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize("name", SETTINGS)
def test_samples_follow_the_exact_distribution(name):
    vocab, draws = 20, 20_000
    logits = np.random.default_rng(3).normal(size=vocab) * 0.6
    padded = np.full(128, 50.0)  # padding columns are the most likely of all, and never drawn
    padded[:vocab] = logits
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(draws))
    rows = jnp.broadcast_to(jnp.asarray(padded, jnp.float32), (draws, 128))
    seen = jnp.broadcast_to(SEEN, rows.shape) if SETTINGS[name].repetition_penalty != 1 else None
    tokens, logp = sample(rows, jax.vmap(jax.random.uniform)(keys), SETTINGS[name], seen, vocab)
    counts = np.bincount(np.asarray(tokens), minlength=128)
    expected = _exact_distribution(logits, SETTINGS[name])
    assert counts[vocab:].sum() == 0 and (counts[:vocab][expected == 0] == 0).all()
    retained = expected > 0
    p_value = stats.chisquare(counts[:vocab][retained], expected[retained] * draws).pvalue
    print(f"{name}: chi-square p = {p_value:.3f} over {retained.sum()} tokens (seed fixed; 0.001 is a 1 in 1000 event)")
    assert p_value > 1e-3
    untruncated = logits / SETTINGS[name].temperature
    expected_logp = untruncated - np.log(np.exp(untruncated).sum())
    np.testing.assert_allclose(logp, expected_logp[np.asarray(tokens)], rtol=1e-4)


def test_draw_never_picks_a_token_of_zero_weight():
    logits = jnp.full((3, 256), -jnp.inf).at[:, 200].set(0.0).at[1, 3].set(0.0)
    for uniform in (0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))):
        tokens = draw(logits, jnp.full(3, uniform))[0]
        assert tokens[0] == 200 and tokens[1] in (3, 200) and tokens[2] == 200


def test_repetition_penalty_is_transformers(tmp_path):
    logits, ids = torch.randn(2, 30), torch.randint(0, 30, (2, 5))
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    seen = np.zeros((2, 30), bool)
    np.put_along_axis(seen, ids.numpy(), True, axis=1)
    np.testing.assert_allclose(penalise_repetition(logits.numpy(), seen, 1.7), theirs, rtol=1e-6)


def test_top_p_keeps_at_least_one_token():
    retained = keep_likely(jnp.log(jnp.array([[0.9, 0.1]])), Sampling(top_p=0.01))
    assert np.isfinite(retained).tolist() == [[True, False]]


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_for_prompts_of_different_lengths(short_chunks, tmp_path):
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=131, n_layer=2, n_head=2, n_embd=32, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(4)
    theirs.save_pretrained(tmp_path)
    config, params = load_hf(tmp_path)
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)[0]
    lengths = [1 + i % 10 for i in range(64)]
    ids, mask = random_prompts(lengths)
    generate = generation(graphdef, group=1, new=40, sampling=Sampling(temperature=0.0))  # three chunks of the cache
    ours = generate(params, ids, mask, np.zeros(64, np.int32), np.arange(64), 0, 0).completion_ids_PGC[:, 0]
    for row, length in enumerate(lengths):
        prompt = torch.tensor(ids[row : row + 1, 10 - length :], dtype=torch.long)
        with torch.no_grad():
            ones = torch.ones_like(prompt)
            out = theirs.generate(
                prompt,
                attention_mask=ones,
                max_new_tokens=40,
                min_new_tokens=40,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        np.testing.assert_array_equal(ours[row], out[0, length:], err_msg=f"prompt {row} of {length} tokens")


def stops_often(every: int) -> np.ndarray:
    """Stop table: one token in `every` ends a completion."""
    stops = np.arange(TINY.vocab_size) % every == 0
    return np.stack([stops.astype(np.int32), np.ones(TINY.vocab_size, np.int32)])


def test_a_completion_does_not_depend_on_its_batch(short_chunks):
    graphdef, params = tiny_model()
    lengths = [1 + 3 * i % 10 for i in range(64)]
    ids, mask = random_prompts(lengths)
    numbers = np.arange(11, 75)
    # Stops of many lengths over two chunks of the cache, so that most of the 64 have stopped when the last ones are decoded alone.
    generate = generation(graphdef, group=3, new=20, table=stops_often(16))

    def run(rows, i=ids, m=mask, step=2):
        return np.asarray(
            generate(
                params, i[rows], m[rows], np.zeros(len(i[rows]), np.int32), numbers[rows], 5, step
            ).completion_ids_PGC
        )

    together = run(slice(None))
    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(run(order), together[order], err_msg="other positions")
    wide_ids, wide_mask = (np.pad(x, ((0, 0), (6, 0))) for x in (ids, mask))
    other_ids, other_mask = random_prompts(lengths[::-1], seed=1)
    for row in (0, 17, 40, 63):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(run(one)[0], together[row], err_msg="alone")
        np.testing.assert_array_equal(
            run(one, wide_ids, wide_mask)[0], together[row], err_msg="alone, in a wider bucket"
        )
        other_ids[row], other_mask[row] = ids[row], mask[row]
        np.testing.assert_array_equal(
            run(slice(None), other_ids, other_mask)[row], together[row], err_msg="among other prompts of other lengths"
        )
    assert (run(slice(None), step=3) != together).any()
    assert (together[:, 0] != together[:, 1]).any(), "samples of a group differ"


def test_repeated_tokens_are_those_of_the_prompt_and_of_the_completion_alone(short_chunks):
    """What a later turn penalises: no padding, neither before a prompt nor behind a completion that stopped before others."""
    graphdef, params = tiny_model()
    ids, mask = random_prompts([3, 7, 5, 9])
    ids[mask == 1] = np.maximum(ids[mask == 1], 1)  # 0 is padding alone
    penalised = Sampling(repetition_penalty=1.3)
    generate = generation(graphdef, new=20, sampling=penalised, table=stops_often(16), past_columns=20)
    rollout, retained = generate(params, ids, mask, np.zeros(4, np.int32), np.arange(4), 3, 0)
    tokens, written = (np.asarray(x) for x in (rollout.completion_ids_PGC, rollout.completion_mask_PGC))
    assert len({*written.sum(-1).reshape(-1)}) > 2 and written.sum(-1).max() == 20
    for prompt, sibling in np.ndindex(4, 2):
        row = prompt, sibling
        expected = {*ids[prompt][mask[prompt] == 1], *tokens[row][written[row] == 1]}
        assert {*np.flatnonzero(retained.seen_PGV[row])} == expected, row


@pytest.mark.slow
@pytest.mark.parametrize("last", [1, 3, 5])
def test_going_on_with_half_of_the_prompts_changes_no_token(short_chunks, last):
    """Prompts of short caps stop early; `last` of six go on to the cap, into a second chunk."""
    graphdef, params = tiny_model()
    ids, mask = random_prompts([3, 7, 5, 9, 2, 4])
    caps = np.where(np.arange(6) * 5 % 6 < last, 20, 8 + np.arange(6)).astype(np.int32)
    actual = [
        generation(graphdef, new=20, table=stops_often(97), compacts=compacts)(
            params, ids, mask, np.zeros(6, np.int32), np.arange(6), 3, 0, caps
        )
        for compacts in (True, False)
    ]
    lengths = np.asarray(actual[0].completion_mask_PGC).sum(-1)
    assert (lengths <= caps[:, None]).all() and (lengths.max(1)[caps == 20] > 16).all()
    ours, theirs = map(arrays_of, actual)
    assert ours.keys() == theirs.keys()
    for name in ours:
        tolerance = 1e-5 if name == "sampling_logp_PGC" else 0  # matmuls of other sizes round otherwise
        np.testing.assert_allclose(ours[name], theirs[name], atol=tolerance, err_msg=name)


@pytest.mark.slow
def test_the_decode_kernel_draws_the_same_tokens(short_chunks, monkeypatch):
    """Prompts of many lengths, completions that stop early or go on alone, in several blocks of the kernel."""
    monkeypatch.setattr(decode_kernel, "BLOCK", 8)
    ids, mask = random_prompts([3, 7, 5, 9, 2, 10])
    caps = np.array([20, 8, 9, 20, 10, 11], np.int32)
    actual = []
    for kernel in (False, True):
        graphdef, params = tiny_model(decode_kernel=kernel)
        generate = generation(graphdef, new=20, table=stops_often(97))
        actual.append(generate(params, ids, mask, np.zeros(6, np.int32), np.arange(6), 3, 0, caps))
    ours, theirs = map(arrays_of, actual)
    assert ours.keys() == theirs.keys()
    for name in ours:
        tolerance = 1e-5 if name == "sampling_logp_PGC" else 0  # float32 sums in another order
        np.testing.assert_allclose(ours[name], theirs[name], atol=tolerance, err_msg=name)
    assert np.asarray(actual[0].completion_mask_PGC).sum(-1).max() == 20


def test_sampling_logprobs_are_those_the_trainer_recomputes():
    from conftest import model_logp

    from jax_grpo.batch import GroupedTokens

    graphdef, params = tiny_model()
    ids, mask = random_prompts([3, 7, 5, 9])
    out = generation(graphdef, group=4, sampling=Sampling(top_k=20))(
        params, ids, mask, np.zeros(4, np.int32), np.arange(4), 0, 0
    )
    tokens = GroupedTokens(jnp.asarray(ids), jnp.asarray(mask), out.completion_ids_PGC, out.completion_mask_PGC)
    error = np.abs(model_logp(graphdef, params, tokens) - np.asarray(out.sampling_logp_PGC).reshape(16, 6)).max()
    print(f"largest difference {error:.1e} nats (tolerance 2e-5: float32 rounding of two orders of summation)")
    assert error < 2e-5


def test_rows_stop_at_their_stop_and_are_padded_after_it():
    graphdef, params = tiny_model()
    ids, mask = random_prompts([4] * 8)
    stops = np.arange(TINY.vocab_size) % 4 == 0  # a quarter of the vocabulary ends a completion
    table = np.stack([stops.astype(np.int32), np.ones(TINY.vocab_size, np.int32)])
    out = generation(graphdef, group=8, new=10, table=table)(
        params, ids, mask, np.zeros(8, np.int32), np.arange(8), 0, 0
    )
    tokens, retained = (np.asarray(x).reshape(64, 10) for x in (out.completion_ids_PGC, out.completion_mask_PGC))
    for row, length in enumerate(retained.sum(1)):
        assert (retained[row] == (np.arange(10) < length)).all()
        assert not stops[tokens[row, : length - 1]].any()
        assert np.asarray(out.stopped_PG).reshape(64)[row] == stops[tokens[row, length - 1]]
        assert (tokens[row, length:] == 0).all() and (
            np.asarray(out.sampling_logp_PGC).reshape(64, 10)[row, length:] == 0
        ).all()
    assert 1 < retained.sum(1).mean() < 10


def test_the_policy_stop_holds_on_device_as_on_text():
    table = policy_stop().token_table(CHESS)
    for text, start, length in (
        (" e2e4 d2d4", 2, 2),
        (" e7e8q    ", 2, 3),
        (" e7e8    ", 2, 3),
        (" a1    B: b2b3 x", 0, 4),
    ):
        state, steps = start, 0
        for token in CHESS.encode(text):
            state, steps = table[state, token], steps + 1
            if state == policy_stop().accept:
                break
        assert state == policy_stop().accept and steps == length, text
    assert word_stop().token_table(CHESS)[0, CHESS.eos_id] == 1


def test_a_long_prompt_is_refused_and_never_cut():
    with pytest.raises(PromptTooLong, match=r"has 72 tokens; expected 1 to prompts.max_prompt_tokens = 20"):
        encode_prompts(["P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1    B:" + " "], CHESS, 20)
    tokens = encode_prompts(["abc", "abcde" * 5], CHESS, 40)
    assert tokens.ids_PT.shape == (2, 32) and tokens.mask_PT.sum(1).tolist() == [3, 25]


def test_a_draw_is_the_first_token_whose_cumulative_probability_exceeds_the_uniform_in_every_block():
    """Of four blocks: a tiny model's vocabulary has hardly more than one."""
    rng, rows = np.random.default_rng(0), 4000
    logits_V = np.where(rng.random(4 * BLOCK) < 0.2, -np.inf, rng.normal(0, 2, 4 * BLOCK)).astype(np.float32)
    uniform_R = (np.arange(rows, dtype=np.float32) + 0.5) / rows
    shift_R = np.linspace(-200, 200, rows, dtype=np.float32)  # changes no probability
    token_R, norm_R = jax.jit(draw)(jnp.asarray(logits_V + shift_R[:, None]), jnp.asarray(uniform_R))
    weights_V = np.exp(logits_V.astype(np.float64))
    cumulative_V = np.cumsum(weights_V) / weights_V.sum()
    expected_R = np.searchsorted(cumulative_V, uniform_R, side="right")
    near_R = (
        np.abs(cumulative_V[np.minimum(expected_R, token_R)] - uniform_R) < 1e-6
    )  # float32 may round it to either side
    assert np.array_equal(np.asarray(token_R)[~near_R], expected_R[~near_R]) and near_R.mean() < 0.1
    assert set(expected_R // BLOCK) == {0, 1, 2, 3} and np.isfinite(logits_V[token_R]).all()
    np.testing.assert_allclose(norm_R, np.log(weights_V.sum()) + shift_R, rtol=1e-5, atol=1e-4)
