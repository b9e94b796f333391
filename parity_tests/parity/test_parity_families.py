"""`jax_grpo` against `torch_ref` for every family of models, in float64: loss, metrics, every gradient, whole iterations.

Every family x LM head x layout; the three precisions, twenty steps and greedy tokens are the table's
(`python -m torch_ref.parity_families`).
"""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from both import show
from test_torch_ref_families import LEFT_OUT, PLACES, REFUSALS, shortened

from jax_grpo.batch import Batch, FlatTokens, GroupedTokens
from jax_grpo.chess.positions.sources import selfplay_positions
from jax_grpo.config import Config
from jax_grpo.lm_head import LM_HEADS
from jax_grpo.model.architecture import Architecture, Rope
from jax_grpo.model.attention import BLOCKS, KERNELS, Blocks
from jax_grpo.model.families import read_architecture
from jax_grpo.model.weights import to_hf
from jax_grpo.policy.named import Model
from jax_grpo.replay import batch_from
from jax_grpo.update import init_state, make_step
from torch_ref.batch import from_arrays
from torch_ref.compare import TOLERANCES, logp_error, scalar_errors, tensor_errors
from torch_ref.crafted import GROUP, GROUPS, NEW, PROMPT, Arrays, crafted_batch
from torch_ref.families import DecoderConfig, read_config
from torch_ref.judge import CASES, judge, true_float64
from torch_ref.parity import whole_iterations
from torch_ref.parity_families import load_jax, outside, precise, settings
from torch_ref.replay import replay
from torch_ref.weights import load_hf

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = TOLERANCES["float64"]
LAYOUTS = ("flat", "grouped", "packed")
WAYS = list(itertools.product(LM_HEADS, LAYOUTS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By case, a folder of weights as transformers writes it."""
    root = tmp_path_factory.mktemp("families")

    @functools.cache
    def folder(case: str) -> Path:
        with true_float64():
            judge(CASES[case], torch.float64).save_pretrained(root / case)
        return root / case

    return folder


def laid_out(batch: Batch, layout: str) -> Batch:
    """The same texts as they are, or with a group's prompt once; `packed` has a row for each token, and two more."""
    if layout == "flat":
        return batch
    assert isinstance(batch.tokens, FlatTokens)
    ids_BT, mask_BT = batch.tokens.input_ids_BT, batch.tokens.attention_mask_BT
    prompts = (x[::GROUP, :PROMPT] for x in (ids_BT, mask_BT))
    completions = (x[:, PROMPT:].reshape(GROUPS, GROUP, NEW) for x in (ids_BT, batch.mask_BS))
    columns = ("mask_BS", "old_logp_BS", "ref_logp_BS", "sampling_logp_BS")
    cut = {name: getattr(batch, name)[:, PROMPT:] for name in columns}
    tokens = GroupedTokens(*prompts, *completions)
    if layout == "packed":
        rows = int(tokens.prompt_mask_PT.sum() + tokens.completion_mask_PGC[..., :-1].sum()) + 2
        assert rows < tokens.prompt_mask_PT.size + tokens.completion_mask_PGC[..., :-1].size, "there is padding"
        tokens = dataclasses.replace(tokens, rows=rows)
    return dataclasses.replace(batch, tokens=tokens, **cut)


def jax_step(config: Config, model: Model, arrays: Arrays, layout: str) -> Arrays:
    """`jax_grpo`'s optimiser step as arrays; `logp` of completion tokens [B, NEW]."""
    batch = laid_out(batch_from(arrays, config.learning()), layout)
    step = jax.jit(make_step(model.graphdef, config.learning()))
    _, metrics, logp_BS, grads = step(init_state(model.params, config.learning()), batch)
    actual = {name: np.asarray(value) for name, value in metrics.items()} | {"logp": np.asarray(logp_BS)[:, -NEW:]}
    return actual | {f"grad/{name}": value for name, value in to_hf(grads, model.architecture).items()}


@pytest.mark.default_cases(  # each family, each head and each layout
    "llama-materialised-flat", "llama_tied-materialised-packed", "mistral-chunked-flat", "qwen2-chunked-flat",
    "qwen3-chunked-packed", "gemma3_text-pallas-flat", "gpt2-pallas-grouped",
)  # fmt: skip
@pytest.mark.parametrize(
    ("case", "head", "layout"),
    [(case, *way) for case in CASES for way in WAYS],
)
def test_loss_metrics_and_every_gradient_of_every_family(folders, case, head, layout, monkeypatch):
    """Attention in one array of scores, in blocks of two queries, or in kernels: each family meets each, as each head does."""
    blocks = (None, Blocks(2, 2, 9), KERNELS)[(list(CASES).index(case) + WAYS.index((head, layout))) % 3]
    monkeypatch.setitem(BLOCKS, "auto", blocks)
    config = settings("float64", folders(case), lm_head={"implementation": head})
    model = load_hf(folders(case), dtype=torch.float64)
    arrays = crafted_batch(model, shared_prompts=True)
    with precise("float64"):
        actual = jax_step(config, load_jax(config.model, config.seed), arrays, layout)
    reference = replay(config.learning(), model, from_arrays(arrays, config.learning(), dtype=torch.float64))
    assert reference["clip_fraction/low"] > 0 and reference["clip_fraction/high"] > 0, "both clip sides act"
    assert reference["kl/mean"] > 0
    mask = arrays["completion_mask"][:, PROMPT:]
    show("logp", {"logp": logp_error(actual["logp"], reference["logp"][:, PROMPT:], mask)}, ALLOWED.logp)
    show("loss and metrics", scalar_errors(actual, reference, "float64"), ALLOWED.scalars)
    errors = tensor_errors(actual, reference)
    assert len(errors) == len(list(model.parameters()))
    show("gradients", errors, ALLOWED.gradients)


def as_numbers(of: DecoderConfig | Architecture) -> dict[str, object]:
    """What one of the two readers of config.json makes of it, in the other's terms too."""
    if isinstance(of, DecoderConfig):
        ropes = [dataclasses.astuple(layer.rotary) for layer in of.layers]
        names = ("num_kv_heads", "head_dim", "intermediate_size", "rms_norm_eps", "norm_after", "activation")
        scales = (of.attention_scale**-2, of.embedding_scale)
        windows = [layer.window for layer in of.layers]
    else:
        ropes = [dataclasses.astuple(of.rope_of(window) or Rope()) for window in of.windows]
        names = ("kv_heads", "head_dim", "inner", "norm_epsilon", "post_norms", "activation")
        scales = (of.score_divisor**2, of.hidden_size**0.5 if of.embedding_scaled else 1.0)
        windows = list(of.windows)
    alike = ("vocab_size", "hidden_size", "num_heads", "num_layers", "tied", "qkv_bias", "output_bias", "mlp_bias")
    given = [getattr(of, name) for name in (*alike, "qk_norm", "norm_offset", *names)]
    read = {"default": 2, "linear": 3, "llama3": 6}  # how many of a rotation's numbers its kind reads
    return {
        "sizes and switches": [str(x).replace("pytorch_", "") for x in given],
        "scales": np.round(scales, 9).tolist(),
        "windows": windows,
        "ropes": [rope[: read[rope[1]]] for rope in ropes],
    }


STATED = [CASES[case] for case in CASES if case != "gpt2"]
STATED += [{key: x for key, x in CASES[case].items() if key != "rope_scaling"} | place for case, place in PLACES]
STATED += [shortened(case) for case in LEFT_OUT]


@pytest.mark.parametrize("stated", STATED, ids=lambda stated: stated["model_type"])
def test_both_read_a_config_alike(stated):
    assert as_numbers(read_architecture(stated)) == as_numbers(read_config(stated))


@pytest.mark.parametrize(("case", "change"), [(case, change) for case, change, _ in REFUSALS])
def test_both_refuse_what_changes_the_numbers(case, change):
    with pytest.raises(ValueError, match=r"\w"):
        read_architecture(CASES[case] | change)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_both_trainers_take_the_same_iterations_of_every_family(case, tmp_path, monkeypatch):
    """Rollouts, old and reference log-probabilities, epochs, minibatches and micro-batches, from the family's folder."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"fen": position.fen}) for position in selfplay_positions(2, 0)[:40]]
    (tmp_path / "positions.jsonl").write_text("\n".join(rows))
    sizes = {"n_positions": 128} if case == "gpt2" else {"max_position_embeddings": 128}
    described = CASES[case] | sizes | {"vocab_size": 640}
    with true_float64():
        judge(described, torch.float64, 0.1).save_pretrained(tmp_path / case)
    config = Config.model_validate(
        {
            "iterations": 1,
            "run_dir": "unused",
            "seed": 3,
            "model": {
                "weights": str(tmp_path / case), "tokenizer": "chess", "compute_dtype": "float64", "param_dtype": "float64",
            },
            "task": {"name": "length", "length_cap": 6},
            "prompts": {"source": "positions.jsonl", "per_iteration": 4, "max_prompt_tokens": 80},
            "rollout": {"group_size": 4, "max_new_tokens": 6},
            "kl": {"beta": 0.1},
            "update": {"epochs": 2, "minibatches": 2, "micro_batches": 2, "learning_rate": 1e-3},
        }
    )  # fmt: skip
    with precise("float64"):
        actual = whole_iterations(config, tmp_path / "saved")
    assert actual["metrics"][0]["steps"] == 4 and actual["metrics"][0]["kl/mean"] > 1e-8
    show("metrics", actual["iterations"][0], ALLOWED.scalars)
    show("change", actual["change"], ALLOWED.change or 0)


def test_the_published_table_has_every_family_and_an_error_outside_its_tolerance_is_named():
    errors = json.loads((ROOT / "docs" / "results" / "families" / "results.json").read_text())["errors"]
    assert list(errors) == list(CASES) and all(list(by_dtype) == list(TOLERANCES) for by_dtype in errors.values())
    assert outside(errors) == []
    errors["llama"]["float64"]["transformers"]["kl"] = float("nan")
    errors["qwen3"]["float32"]["torch_ref"]["greedy"] = 0.01
    assert [line.split(" ", 3)[:3] for line in outside(errors)] == [
        ["llama,", "float64,", "transformers:"],
        ["qwen3,", "float32,", "torch_ref:"],
    ]
