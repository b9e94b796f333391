"""Soft targets: a tree of prefixes has the mean loss of all moves summed; colours are alike; what cannot be is refused."""

import random

import chess
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_grpo.chess.lessons import BRANCHES, batches, make_loss, mirrored, soft_moves, target, tree
from jax_grpo.chess.positions.files import PositionFileError
from jax_grpo.chess.positions.position import Position, legal_uci
from jax_grpo.chess.positions.rookworld import policy_prompt
from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.chess.positions.values import NotATable, move_table
from jax_grpo.config import load_yaml
from jax_grpo.lm_head.materialised import token_logprobs
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.sft import __main__ as sft

TABLES = read_packaged("heldout", "packaged:tables")
CHESS = Tokenizer.load("chess")
PROMOTES = "8/P6k/8/8/8/8/8/K7 w - - 0 1"


def valued(fen: str, moves: list[str] | None = None) -> Position:
    """A position whose legal moves are worth 0, -0.1, -0.2 pawns and so on."""
    moves = moves or sorted(legal_uci(chess.Board(fen)))
    return Position(fen, moves=tuple(moves), evaluations=tuple(-0.1 * place for place in range(len(moves))))


def first_tokens(position: Position) -> int:
    return len({move[:2] for move in position.moves})


def model_of(dtype) -> tuple:
    sizes = Architecture(CHESS.vocab_size, 1, 2, 16, 96)
    graphdef, params = nnx.split(Decoder(sizes, rngs=nnx.Rngs(0), param_dtype=dtype, compute_dtype=dtype), nnx.Param)
    return graphdef, jax.tree.map(lambda x: x * 8 if x.ndim >= 2 else x, params)  # so that prefixes differ


def sum_over_moves(graphdef, params, position: Position, tau: float, uniform: float) -> float:
    """-sum_m p(m) log pi(m) from its definition: every move a whole sequence of its own, end-of-text included."""
    model, prompt = nnx.merge(graphdef, params), CHESS.encode(policy_prompt(position.fen, "B:"))
    total = 0.0
    for move, p in target(move_table(position).wins, tau, uniform).items():
        answer = [*CHESS.encode(f" {move}"), CHESS.eos_id]
        ids = jnp.asarray([[*prompt, *answer]])
        hidden = model(ids, jnp.ones_like(ids))
        logp, _ = token_logprobs(
            hidden[:, :-1], model.head_VH, ids[:, 1:], vocab_size=model.vocabulary, temperature=1.0
        )
        total -= p * float(logp[0, len(prompt) - 1 :].sum())
    return total


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["few_first_tokens", "many_first_tokens", "promotions"])
def test_the_mean_loss_of_drawn_trees_is_the_sum_over_all_moves(x64, kind):
    graphdef, params = model_of(jnp.float64)
    if kind == "promotions":
        position = valued(PROMOTES)
    else:
        few = kind == "few_first_tokens"
        position = next(p for p in TABLES if (first_tokens(p) <= BRANCHES) == few and len(p.moves) > 4)
    tau, uniform = (0.05, 0.3) if kind == "many_first_tokens" else (0.02, 0.08)
    expected = sum_over_moves(graphdef, params, position, tau, uniform)
    loss, rng = jax.jit(make_loss(graphdef)), random.Random(0)
    draws = [float(loss(params, *soft_moves([position] * 64, CHESS, rng, tau, uniform))) for _ in range(24)]
    mean, error = np.mean(draws), np.std(draws, ddof=1) / len(draws) ** 0.5
    print(f"{kind}: {mean:.6f} +- {error:.6f} of {64 * 24} draws, {expected:.6f} by the definition")
    assert abs(mean - expected) < 5 * error + 1e-6, "weights are float32"
    assert error < 0.02 * expected, "or the comparison says nothing"


def test_a_tree_of_one_piece_is_its_path():
    position = valued("7k/8/8/8/8/8/8/K7 w - - 0 1")
    shares = target(move_table(position).wins, 0.02, 0.08)
    moves = {(*CHESS.encode(f" {move}"), CHESS.eos_id): p for move, p in shares.items()}
    paths, nodes = tree(moves, random.Random(0))
    root, squares, end = nodes
    assert len(paths) == 1 and [sum(node.weights.values()) for node in nodes] == pytest.approx([1, 1, 1])
    assert list(root.weights) == CHESS.encode(" a1") and list(end.weights) == [CHESS.eos_id]
    assert squares.weights == pytest.approx(
        {CHESS.encode(f" a1{to}")[1]: shares[f"a1{to}"] for to in ("a2", "b1", "b2")}
    )


def test_every_move_keeps_its_share_when_all_branches_are_there():
    position = next(p for p in TABLES if 3 < first_tokens(p) <= BRANCHES)
    shares = target(move_table(position).wins, 0.05, 0.2)
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0.2 / len(shares)
    moves = {(*CHESS.encode(f" {move}"), CHESS.eos_id): p for move, p in shares.items()}
    _, nodes = tree(moves, random.Random(1))
    actual = {}
    for node in nodes:
        if node.depth == 1:
            first = list(nodes[0].weights)[node.branch]
            actual |= {(first, second): weight for second, weight in node.weights.items()}
    assert actual == pytest.approx({move[:2]: p for move, p in moves.items()}), "of this position no move promotes"


def test_mirrored_positions_have_the_mirrored_moves_at_the_same_values():
    for position in [*TABLES[:50], valued("r3k2r/8/8/3pP3/8/8/8/R3K2R w KQkq d6 0 2"), valued(PROMOTES)]:
        other = mirrored(position)
        assert other.fen.split()[1] != position.fen.split()[1] and mirrored(other).moves == position.moves
        assert set(other.moves) == legal_uci(chess.Board(other.fen))
        assert sorted(move_table(other).wins.values()) == sorted(move_table(position).wins.values())


def test_what_cannot_be_taught_is_refused_before_a_step():
    rng = random.Random(0)
    lacking = Position(TABLES[0].fen, moves=TABLES[0].moves[1:], evaluations=TABLES[0].evaluations[1:])
    with pytest.raises(NotATable, match="none for"):
        next(batches([lacking], CHESS, 1, 96, rng, 0.02, 0.08))
    with pytest.raises(PositionFileError, match="3 positions; expected at least one batch of 4"):
        next(batches(TABLES[:3], CHESS, 4, 96, rng, 0.02, 0.08))
    with pytest.raises(PositionFileError, match=r"and a move are 7\d tokens; the model has positions for 64"):
        next(batches(TABLES[:4], CHESS, 4, 64, rng, 0.02, 0.08))


@pytest.mark.default_cases(
    "rows: 64, learning_rate: 0.01, tau: 0.1, mixture: {policy: 1.0}-tau is of a stage of tables"
)
@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("rows: 64, learning_rate: 0.01", "expected one of mixture and tables"),
        ("rows: 64, learning_rate: 0.01, tables: 'packaged:tables', mixture: {policy: 1.0}", "expected one of"),
        ("rows: 64, learning_rate: 0.01, tau: 0.1, mixture: {policy: 1.0}", "tau is of a stage of tables"),
        ("rows: 64, learning_rate: 0.01, tables: nowhere.jsonl", "nowhere.jsonl: no such file"),
    ],
)
def test_a_stage_has_one_kind_of_data(tmp_path, stage, words):
    file = tmp_path / "sft.yaml"
    file.write_text(f"out: {tmp_path / 'out'}\nstages: [{{{stage}}}]\n")
    with pytest.raises(SystemExit) as refused:
        sft.main(["--config", str(file)])
    assert words in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_model_learns_from_tables_and_says_so(tmp_path):
    file = tmp_path / "sft.yaml"
    sizes = (
        "num_layers: 1\nnum_heads: 2\nhidden_size: 32\nmax_position_embeddings: 96\nbatch_size: 32\nwarmup_steps: 5\n"
    )
    stage = "{tables: 'packaged:tables', rows: 1920, learning_rate: 0.02}"
    file.write_text(f"out: {tmp_path / 'out'}\n{sizes}stages: [{stage}]\n")
    final = sft.train(load_yaml(sft.SFTConfig, str(file), []))
    losses = [
        float(line.split('"loss": ')[1].split(",")[0]) for line in (tmp_path / "out/sft.jsonl").read_text().splitlines()
    ]
    even = np.log(CHESS.vocab_size)
    print(f"nats a move: {losses}; tokens drawn evenly {3 * even:.2f}")
    assert losses[-1] < 0.5 * 3 * even and losses[-1] < losses[0]
    assert "every legal move's value from packaged:tables" in (final / "provenance.json").read_text()
