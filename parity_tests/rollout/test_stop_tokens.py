"""Tokens that end a completion by themselves: in both implementations' loops, in a mixture, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_grpo.chess.tasks.policy import policy_stop
from jax_grpo.config import ConfigError, load_config
from jax_grpo.config.tasks import task_of
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer, TokenizerError
from jax_grpo.model.weights import save_hf
from jax_grpo.rollout.generate import completion_ids, decode_completions
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import text_program
from jax_grpo.tasks import make_task
from jax_grpo.tasks.stop import text_stop, union, with_tokens
from torch_ref.generate import StopTable, generate
from torch_ref.weights import load_hf

CHESS = Tokenizer.load("chess")
A, B, C = (CHESS.encode(text)[0] for text in (" e2", " e4", "x"))
SIZES = Architecture(CHESS.vocab_size, num_layers=1, num_heads=2, hidden_size=16, max_position_embeddings=32)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What a model writes greedily in both implementations, 8 tokens at most: `f(stop_rule) -> (ids, texts, stopped)` of each."""
    graphdef, params = nnx.split(Decoder(SIZES, rngs=nnx.Rngs(0)), nnx.Param)
    params = jax.tree.map(lambda x: x * 8 if x.ndim >= 2 else x, params)  # so that it does not write one token alone
    folder = tmp_path_factory.mktemp("weights")
    save_hf(folder, SIZES, params, CHESS)
    model = load_hf(folder, dtype=torch.float32)
    ids, mask = np.array([[0, 5, A, 66], [9, 8, 7, C]], np.int32), np.ones((2, 4), np.int32)
    states = np.zeros(2, np.int32)

    def both(rule):
        program = text_program(graphdef, CHESS, rule, 8, Sampling(temperature=0.0))
        rollout = program.generate(params, ids, mask, states, np.arange(2, dtype=np.int32), 0, jnp.int32(0))
        rows = completion_ids(rollout)
        texts = decode_completions(rollout, CHESS, rule, [0, 0])
        ours = rows, texts, np.asarray(rollout.stopped_PG).reshape(-1).tolist()
        table = torch.from_numpy(rule.token_table(CHESS)).long()
        made = generate(
            model, torch.from_numpy(ids).long(), torch.from_numpy(mask).long(), max_new_tokens=8,
            stop=StopTable(table, rule.accept, torch.zeros(2, dtype=torch.long)),
        )  # fmt: skip
        rows = [row[keep.bool()].tolist() for row, keep in zip(made.tokens_BC, made.mask_BC, strict=True)]
        return ours, (rows, [rule.text(row, 0, CHESS) for row in rows], made.stopped_B.tolist())

    return both


def test_a_stop_token_ends_a_completion_in_both_and_is_no_part_of_its_text(written):
    (rows, texts, stopped), _ = free = written(text_stop())
    assert free[0] == free[1] and stopped == [False, False] and texts == [CHESS.decode(ids) for ids in rows]
    at = next(i for i in range(1, 8) if rows[0][i] not in rows[0][:i])
    token = rows[0][at]
    for made in written(with_tokens(text_stop(), [token])):
        assert made[0][0] == rows[0][: at + 1] and made[2][0]
        assert made[1][0] == CHESS.decode(rows[0][:at]) != CHESS.decode(rows[0][: at + 1])
        cut = rows[1][: rows[1].index(token) + 1] if token in rows[1] else rows[1]
        assert made[0][1] == cut and made[2][1] == (token in rows[1])


def test_in_a_mixture_a_token_ends_its_own_tasks_completions_alone():
    rule, (policy, own) = union([policy_stop(), with_tokens(text_stop("."), [" e4", C])])
    table = rule.token_table(CHESS)
    assert (table[own : rule.accept, [B, C]] == rule.accept).all()
    np.testing.assert_array_equal(table[:own, C], union([policy_stop(), text_stop(".")])[0].token_table(CHESS)[:own, C])
    assert rule.text([A, B], own, CHESS) == CHESS.decode([A])
    assert rule.text([A, B], policy, CHESS) == CHESS.decode([A, B])
    assert rule.text([A, C, CHESS.eos_id], own, CHESS) == CHESS.decode([A, C])  # ended by end-of-text
    assert rule.text([], own, CHESS) == ""
    # A text that is complete with that token is left out whole.
    both = with_tokens(text_stop(" e4"), [" e4"])
    assert (
        both.text([A, B], 0, CHESS) == CHESS.decode([A]) and (both.token_table(CHESS)[0, CHESS.eos_id]) == both.accept
    )


def test_a_token_is_named_by_its_text_or_its_id():
    gpt2 = Tokenizer.load("gpt2")
    assert [gpt2.token_id(token) for token in ("\n", " the", "<|endoftext|>", "Ġthe", 11)] == [198, 262, 50256, 262, 11]
    assert CHESS.token_id(" e4") == B and CHESS.token_id("x") == C
    for token, sentence in (
        ("two words", "'two words' is not one token of model.tokenizer, which reads it as 2"),
        (50257, "token 50257 is not"),
    ):
        with pytest.raises(TokenizerError, match=sentence):
            gpt2.token_id(token)
    with pytest.raises(TokenizerError, match="not one token"):
        gpt2.token_id("")


def test_the_config_gives_them_to_the_task_and_the_table(tmp_path):
    task = make_task(task_of(name="prompts", stop_tokens=["\n", 262], stop=["."]), [len])
    table = task.stop_rule.token_table(Tokenizer.load("gpt2"))
    assert (table[0, [198, 262, 13, 50256]] == task.stop_rule.accept).all() and table[0, 11] == 0


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (
            {"name": "policy", "stop_tokens": [1]},
            r"task\.stop_tokens is \[1\], which does nothing unless task\.name is prompts",
        ),
        (
            {"name": "prompts", "stop_tokens": [True]},
            r"task\.stop_tokens has True; expected texts of single tokens, or ids",
        ),
        ({"name": "prompts", "stop_tokens": [1.5]}, r"task\.stop_tokens has 1\.5"),
        ({"name": "prompts", "stop_tokens": [""]}, r"task\.stop_tokens has ''"),
    ],
)
def test_what_is_no_stop_token_is_refused(tmp_path, settings, sentence):
    sizes = {"num_layers": 1, "num_heads": 1, "hidden_size": 8, "max_position_embeddings": 512}
    values = {"iterations": 1, "run_dir": "x", "model": sizes, "task": settings}
    (tmp_path / "c.yaml").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=sentence):
        load_config(str(tmp_path / "c.yaml"))
