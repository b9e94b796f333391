"""Exported models in `transformers`: the same ids, logits and greedy answers, and the same evaluation."""

import json
import random
import re

import chess
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoModelForCausalLM, AutoTokenizer

from jax_grpo.chess.evaluate import __main__ as evaluate
from jax_grpo.chess.evaluate.policy import MOVES_AT_ONCE, move_logps, policy_task
from jax_grpo.chess.evaluate.selfplay import openings
from jax_grpo.chess.evaluate.suites import CAPS, Data, OurModel, environment_prompts, run_suites
from jax_grpo.chess.lessons import policy_row
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.chess.style import find_style, model_settings
from jax_grpo.chess.tasks.environment import environment_stop
from jax_grpo.chess.tasks.policy import in_style
from jax_grpo.evaluate import EvaluationError
from jax_grpo.export import __main__ as export
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import WeightsError, save_hf
from jax_grpo.policy.named import describe_model, load_named
from jax_grpo.rollout.generate import encode_prompts
from jax_grpo.rollout.texts import Generator
from jax_grpo.run.folder import record_start
from torch_ref.compare import difference

POSITIONS = read_packaged("heldout")
PACKAGED = "packaged:rook-small"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    """The packaged model, exported."""
    out = tmp_path_factory.mktemp("export") / "rook"
    export.main(["--weights", PACKAGED, "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def with_gpt2_vocabulary(tmp_path_factory):
    """A small random model over GPT-2's vocabulary, exported: (weights, export)."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = Architecture(vocab_size=50257, num_layers=2, num_heads=2, hidden_size=32, max_position_embeddings=192)
    params = nnx.split(Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32), nnx.Param)[1]
    save_hf(folder / "weights", config, params, Tokenizer.load("gpt2"))
    export.main(["--weights", str(folder / "weights"), "--out", str(folder / "out")])
    return folder / "weights", folder / "out"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A chess model of one thin layer: cheap, and its answers are random enough to tell two apart."""
    folder = tmp_path_factory.mktemp("tiny") / "weights"
    tokenizer = Tokenizer.load("chess")
    config = Architecture(tokenizer.vocab_size, num_layers=1, num_heads=2, hidden_size=16, max_position_embeddings=256)
    params = nnx.split(Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32), nnx.Param)[1]
    save_hf(folder, config, params, tokenizer)
    return str(folder)


def real_texts(count: int) -> list[str]:
    """Prompts and whole rows of both tasks."""
    full, one, rng = policy_task("full"), policy_task("best_move"), random.Random(0)
    texts = []
    for position, prompt in zip(POSITIONS, environment_prompts(POSITIONS[:count]), strict=False):
        texts += [one.prompt(position, 0).text, full.prompt(position, 0).text + policy_row(position, rng).completion]
        texts += [prompt.text, prompt.text + (prompt.answer or "")]
    return texts


def test_chess_ids_and_texts_equal_ours_for_real_prompts(packaged):
    theirs, ours = AutoTokenizer.from_pretrained(packaged), Tokenizer.load("chess")
    for text in real_texts(300):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text), text
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.pad_token_id == ours.eos_id


@pytest.mark.slow
def test_gpt2_ids_equal_ours(with_gpt2_vocabulary):
    theirs, ours = AutoTokenizer.from_pretrained(with_gpt2_vocabulary[1]), Tokenizer.load("gpt2")
    for text in [*real_texts(50), "  é 棋 ♞\n"]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text)
        assert theirs.decode(ids) == text


@pytest.mark.slow_cases("gpt2")
@pytest.mark.parametrize("vocabulary", ["chess", "gpt2"])
def test_logits_equal_ours_in_float32(packaged, with_gpt2_vocabulary, vocabulary):
    weights, out = {"chess": (PACKAGED, packaged), "gpt2": map(str, with_gpt2_vocabulary)}[vocabulary]
    policy = load_named(weights)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    ids_NT, mask_NT = encode_prompts(real_texts(2), policy.tokenizer, 192)

    @jax.jit
    def logits(params, ids_1T, mask_1T):
        model = nnx.merge(policy.graphdef, params)
        return model(ids_1T, mask_1T) @ model.head_VH[: policy.architecture.vocab_size].T

    worst = size = 0.0
    for ids_T, mask_T in zip(ids_NT, mask_NT, strict=True):  # one by one: all logits at once would take a gigabyte
        ids_1T, mask_1T, real = ids_T[None], mask_T[None], mask_T.astype(bool)
        with torch.no_grad():
            expected_1TV = theirs(
                torch.tensor(ids_1T),
                attention_mask=torch.tensor(mask_1T),
                position_ids=torch.tensor(mask_1T.cumsum(-1) - 1).clamp(min=0),
            ).logits.numpy()
        found_1TV = np.asarray(logits(policy.params, ids_1T, mask_1T))
        assert found_1TV.shape == expected_1TV.shape
        worst = max(worst, difference("logits", found_1TV[0, real], expected_1TV[0, real]))
        size = max(size, float(np.abs(expected_1TV[0, real]).max()))
    print(f"largest difference of a logit {worst:.2e}, largest logit {size:.1f}; tolerance 1e-5 of it")
    assert worst < 1e-5 * size


class Theirs:
    """`Complete`, greedy, by an export in `transformers`."""

    def __init__(self, folder, stop_rule, cap):
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        self.stop_rule, self.cap = stop_rule, cap

    def __call__(self, prompts, *, numbers=None, step=0, tick=None):
        out = []
        for start in range(0, len(prompts), 64):
            part = prompts[start : start + 64]
            tokens = self.tokenizer([p.text for p in part], return_tensors="pt", padding=True, add_special_tokens=False)
            tokens.pop("token_type_ids", None)
            ids = self.model.generate(**tokens, max_new_tokens=self.cap, do_sample=False)[
                :, tokens["input_ids"].shape[1] :
            ]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            out += [self.stop_rule.truncate(t, p.start_state)[0] for t, p in zip(texts, part, strict=True)]
        return out


def both_evaluations(folder, suites, data):
    """Greedy estimates by our rollout and by `transformers`, and how many completions each compared."""
    ours = OurModel(load_named(PACKAGED), 1.0, 0)
    rules = {kind: policy_task(kind).stop_rule for kind in ("full", "best_move")}
    rules["environment"] = environment_stop()
    theirs = {kind: Theirs(folder, rules[kind], CAPS[kind]) for kind in CAPS}

    def greedy_only(complete):
        def ask(kind, mode):
            return complete(kind) if mode == "greedy" else lambda prompts, **_: [""] * len(prompts)

        return ask

    unwatched = lambda what, total: lambda done: None  # noqa: E731
    asks = greedy_only(lambda kind: ours(kind, "greedy")), greedy_only(theirs.__getitem__)
    return [run_suites(suites, ask, data, unwatched) for ask in asks]


@pytest.mark.slow
def test_greedy_answers_equal_those_of_transformers_token_by_token(packaged):
    policy, task = load_named(PACKAGED), policy_task("best_move")
    prompts = [task.prompt(position, 0) for position in POSITIONS[:64]]
    ours = Generator(policy, task.stop_rule, CAPS["best_move"], 0.0, 0)(prompts)
    assert ours == Theirs(packaged, task.stop_rule, CAPS["best_move"])(prompts)
    assert len(set(ours)) > 20


@pytest.mark.slow
def test_every_greedy_number_of_200_positions_is_the_same_through_transformers(packaged):
    data = Data(POSITIONS[:200], [], 16, 30, 0)
    ours, theirs = both_evaluations(packaged, ["policy", "environment", "selfplay"], data)
    differing = [path for path in ours.estimates if ours.estimates[path] != theirs.estimates[path]]
    greedy = [path for path in ours.estimates if "/greedy/" in path]
    print(f"{len(greedy)} greedy estimates compared, {len(differing)} differ")
    assert not differing
    assert ours.moves == theirs.moves
    assert [g.board.fen() for games in ours.games.values() for g in games] == [
        g.board.fen() for games in theirs.games.values() for g in games
    ]


def test_log_probabilities_of_legal_moves_equal_those_of_transformers(packaged):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(packaged), AutoTokenizer.from_pretrained(packaged)
    positions = sorted(POSITIONS[:64], key=lambda p: -chess.Board(p.fen).legal_moves.count())[:3]
    actual = move_logps(load_named(PACKAGED), positions)
    worst, compared = 0.0, 0
    for position, ours in zip(positions, actual, strict=True):
        prompt = tokenizer(policy_task("best_move").prompt(position, 0).text, add_special_tokens=False)["input_ids"]
        assert ours.keys() == {move.uci() for move in chess.Board(position.fen).legal_moves}
        for uci, logp in list(ours.items())[::5] + list(ours.items())[-2:]:
            move = tokenizer(f" {uci}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + move])).logits[0, len(prompt) - 1 : -1]
            theirs = logits.log_softmax(-1)[range(len(move)), move].sum()
            worst, compared = max(worst, difference(uci, logp, float(theirs))), compared + 1
    print(f"largest difference {worst:.1e} nats over {compared} moves, {max(map(len, actual))} of one position")
    assert worst < 2e-5 and max(map(len, actual)) > MOVES_AT_ONCE, "a position of two passes is among them"


def test_an_export_loads_here_again_with_the_same_parameters(packaged):
    again, first = load_named(str(packaged)), load_named(PACKAGED)
    assert again.tokenizer.name == "chess"
    assert all(
        np.array_equal(a, b)
        for a, b in zip(*(nnx.to_pure_dict(p.params)["wte"].values() for p in (again, first)), strict=True)
    )


def test_a_run_that_is_exported_carries_its_config_in_the_card(tmp_path):
    run, policy = tmp_path / "run", load_named(PACKAGED)
    save_hf(run / "weights", policy.architecture, policy.params, policy.tokenizer)
    (run / "config.yaml").write_text("iterations: 7\n")
    record_start(run, "", None, 0, 1)
    export.main(["--weights", str(run), "--out", str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "iterations: 7" in card
    assert "# run\n" in card
    assert "- command: none; `jax_grpo.train.train` was called from Python\n" in card


def test_the_card_asks_as_the_models_own_task_does(tmp_path):
    """Its example, run as it stands, answers a prompt of the run's; one of chess would mean nothing to this model."""
    run, policy = tmp_path / "run", load_named("packaged:words-small")
    save_hf(run / "weights", policy.architecture, policy.params, policy.tokenizer)
    (run / "config.yaml").write_text("task: {name: instructions}\nrollout: {max_new_tokens: 12}\n")
    shown = 'Write about a "ship".\nPut a title on it.\n'
    (run / "samples.jsonl").write_text(json.dumps({"iteration": 0, "samples": [{"prompt": shown}]}) + "\n")
    out = tmp_path / "out"
    export.main(["--weights", str(run), "--out", str(out)])
    card = (out / "README.md").read_text()
    assert "chess" not in card.split("## Evaluation")[0] and "\ntags: [gpt2, grpo]\n" in card
    code = card.split("```python\n")[1].split("```")[0].replace('"out"', repr(str(out)))
    known: dict = {}
    exec(code, known)
    assert known["prompt"] == shown and 0 < known["answer"].shape[1] - known["tokens"]["input_ids"].shape[1] <= 12


def a_run(folder, weights: str, settings: str, prompt: str) -> str:
    """The folder of a run that made these weights."""
    policy = load_named(weights)
    save_hf(
        folder / "weights", policy.architecture, policy.params, policy.tokenizer, model_settings(find_style(weights))
    )
    (folder / "config.yaml").write_text(settings)
    (folder / "samples.jsonl").write_text(json.dumps({"iteration": 0, "samples": [{"prompt": prompt}]}) + "\n")
    return str(folder)


MIXTURE = "task: {name: mixed, mixture: {policy: {share: 1}, environment: {share: 2}, prompts: null}, prompt_style: best_move}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights, settings, style, offered",
    [
        (PACKAGED, None, "best_move", ["P: <FEN>    B:", "P: <FEN>    M:", "A: <FEN>"]),
        ("packaged:rook-deep", "task: {name: game, prompt_style: own_side}", "own_side", ["P: <FEN>    B:"]),
        (PACKAGED, "rollout: {max_new_tokens: 120}", "full", ["P: <FEN>    M:"]),
        (PACKAGED, MIXTURE, "best_move", ["P: <FEN>    B:", "A: <FEN>"]),
    ],
)
def test_the_cards_own_code_plays_both_colours_as_we_do_and_offers_what_was_taught(
    tmp_path, monkeypatch, weights, settings, style, offered
):
    if settings is not None:
        weights = a_run(tmp_path / "run", weights, settings, "P: a prompt of chess")
    export.main(["--weights", weights, "--out", str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    use = card.split("## Evaluation")[0]
    assert "tags: [chess, gpt2, grpo]" in use
    assert [prompt for prompt in ("P: <FEN>    B:", "P: <FEN>    M:", "A: <FEN>") if f"- `{prompt}" in use] == offered
    monkeypatch.chdir(tmp_path)
    known: dict = {}
    exec(card.split("```python\n")[1].split("```")[0], known)
    assert known["board"].ply() >= 2, "both sides have moved"
    policy, task = load_named(weights), policy_task(style)
    boards = [chess.Board(position.fen) for position in POSITIONS[:40]]
    few = [b for side in chess.COLORS for b in [b for b in boards if b.turn == side][: 1 if style == "full" else 8]]
    prompts = [task.prompt(Position(board.fen()), 0) for board in few]
    texts = Generator(policy, task.stop_rule, 120 if style == "full" else 8, 0.0, 0)(prompts)
    ours = [in_style(style, text.split("B:")[-1].strip(), board.fen()) for text, board in zip(texts, few, strict=True)]
    theirs = [known["move"](board) for board in few]
    moves = [move for move in ours if re.fullmatch("([a-h][1-8]){2}[qrbn]?", move)]
    assert [move for move in theirs if move] == moves and len(moves) >= len(few) - 2
    if style != "full":
        for side in chess.COLORS:
            legal = [
                chess.Move.from_uci(m) in b.legal_moves
                for m, b in zip(theirs, few, strict=True)
                if m and b.turn == side
            ]
            assert sum(legal) >= 4, f"{side}: {sum(legal)} of {len(legal)} legal"


@pytest.mark.slow
def test_the_card_of_a_model_that_was_taught_no_moves_offers_none(tmp_path, monkeypatch):
    settings = "task: {name: environment}\nrollout: {max_new_tokens: 130}\n"
    weights = a_run(tmp_path / "run", PACKAGED, settings, "A: a prompt of chess")
    export.main(["--weights", weights, "--out", str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- `A: <FEN>" in card and "P: <FEN>" not in card
    monkeypatch.chdir(tmp_path)
    known: dict = {}
    exec(card.split("```python\n")[1].split("```")[0], known)
    assert re.fullmatch(r"rnbqkbnr/pppppppp/[^+]+ b KQkq[^+]+\+[^+]+\+[01]\+[01].*", known["text"])
    # A task that was given to `train` stands in no config: its prompts tell.
    weights = a_run(tmp_path / "own", PACKAGED, "iterations: 7", "What is 2+2?")
    export.main(["--weights", weights, "--out", str(tmp_path / "other")])
    card = (tmp_path / "other" / "README.md").read_text().split("## Evaluation")[0]
    assert "tags: [gpt2, grpo]" in card and "FEN" not in card and '"What is 2+2?"' in card


def test_an_evaluation_of_other_weights_is_refused_for_the_card(tmp_path):
    (tmp_path / "evaluation.json").write_text(json.dumps({"format": 1, "model": {"name": "other", "sha256": "0" * 64}}))
    with pytest.raises(EvaluationError, match=r"is of other \(000000000000\), not of these weights"):
        export.export_hf(PACKAGED, tmp_path / "out", tmp_path)


def test_an_export_does_not_replace_a_folder_with_other_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(WeightsError, match=r"has other files in it \(thesis.tex\)"):
        export.export_hf(PACKAGED, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.slow  # two evaluations
def test_an_evaluation_gives_the_same_file_again_whatever_the_order_of_the_positions(tmp_path, tiny):
    rows = [{"fen": p.fen, "history": list(p.history)} for p in POSITIONS[:70]]
    reports = []
    for name, order in {"first": rows, "reversed": rows[::-1]}.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, order)))
        evaluate.main(["--weights", tiny, "--suite", "environment", "--data", str(data), "--out", str(tmp_path / name)])
        reports.append((tmp_path / name / "evaluation.json").read_bytes())
    assert reports[0] == reports[1]
    assert len({e["value"] for path, e in json.loads(reports[0])["estimates"].items() if "similarity" in path}) > 3


@pytest.mark.slow
def test_every_suite_gives_the_same_file_twice(tmp_path):
    mates = tmp_path / "mates.jsonl"
    mates.write_text(json.dumps({"fen": "6k1/5ppp/8/8/8/8/8/R6K w - - 0 1", "mate": "a1a8"}))
    common = ["--weights", PACKAGED, "--positions", "64", "--games", "8", "--mates", str(mates), "--half-moves", "20"]
    for name in ("first", "again"):
        evaluate.main([*common, "--out", str(tmp_path / name)])
    files = ("evaluation.json", "evaluation.md", "selfplay.pgn")
    assert all((tmp_path / "first" / f).read_bytes() == (tmp_path / "again" / f).read_bytes() for f in files)


@pytest.mark.slow
def test_sampled_completions_do_not_depend_on_the_order_of_the_prompts(tiny):
    policy, task = load_named(tiny), policy_task("best_move")
    prompts = [task.prompt(position, 0) for position in POSITIONS[:80]]
    complete = Generator(policy, task.stop_rule, CAPS["best_move"], 1.0, 0)
    order = random.Random(0).sample(range(80), 80)
    shuffled = complete([prompts[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(80)] == complete(prompts)
    assert complete(prompts, step=1) != complete(prompts)


def test_openings_are_distinct_and_a_function_of_the_seed():
    fens = [game.board.fen() for game in openings(32, 0)]
    assert len(set(fens)) == 32
    assert fens == [game.board.fen() for game in openings(32, 0)]
    assert fens[0].startswith("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w")


def test_the_card_of_an_evaluated_model_has_its_tables(tmp_path, tiny):
    model = describe_model(tiny, load_named(tiny))
    (tmp_path / "evaluation.json").write_text(json.dumps({"format": 1, "model": model}))
    (tmp_path / "evaluation.md").write_text("# Evaluation of tiny\n\n## Environment\n\n| legal | 3 % |\n")
    export.export_hf(tiny, tmp_path / "out", tmp_path)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Evaluation\n\n### Environment\n\n| legal | 3 % |" in card
