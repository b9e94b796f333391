"""Adapters (LoRA) against `torch_ref` and against `peft` on transformers' models, in float64, for every family.

The judge makes and writes the adapters; both implementations read its folder.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from both import show, uncompiled
from test_parity_families import ALLOWED, laid_out

from jax_grpo.chess.positions.sources import selfplay_positions
from jax_grpo.config import Config
from jax_grpo.model.weights import to_hf
from jax_grpo.policy.adapters import divided, joined
from jax_grpo.policy.named import Model
from jax_grpo.replay import batch_from
from jax_grpo.run.checkpoints import content_hash
from jax_grpo.update import init_state, make_score, make_step
from torch_ref.adapters import load, trained
from torch_ref.batch import from_arrays
from torch_ref.compare import logp_error, scalar_errors, tensor_errors
from torch_ref.crafted import NEW, PROMPT, Arrays, crafted_batch
from torch_ref.judge import CASES, Judged, judge, true_float64
from torch_ref.parity import whole_iterations
from torch_ref.parity_families import load_jax, precise, settings
from torch_ref.replay import replay
from torch_ref.weights import load_hf

LORA: dict[str, dict[str, Any]] = {case: {} for case in CASES}  # beside the defaults below
LORA["llama_tied"] = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
LORA["mistral"] = {"use_rslora": True}
LORA["qwen2"] = {"target_modules": ["up_proj", "k_proj"]}
RANK, ALPHA = 3, 5
# How each family is trained: the head, the layout of its texts, and what of the model is recomputed.
WAYS = {
    "gpt2": ("chunked", "grouped", True),
    "llama": ("materialised", "grouped", False),
    "llama_tied": ("chunked", "flat", "keep_matmuls"),
    "mistral": ("pallas", "grouped", True),
    "qwen2": ("chunked", "grouped", False),
    "qwen3": ("materialised", "flat", True),
    "gemma3_text": ("chunked", "packed", True),
}


class Folders(NamedTuple):
    base: Path
    adapter: Path  # in which A and B are both random
    begun: Path  # as a run begins: B is 0


@functools.cache
def written(root: Path, case: str, described: str = "{}") -> Folders:
    """A case's folders as transformers and peft write them, in float64."""
    made = Folders(*(root / f"{case}{len(described)}" / name for name in Folders._fields))
    with true_float64():
        model = judge(CASES[case] | json.loads(described), torch.float64, 0.1)
        model.save_pretrained(made.base)
        how = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | LORA[case]
        adapted = peft.get_peft_model(model, peft.LoraConfig(**how), autocast_adapter_dtype=False)
        adapted.save_pretrained(made.begun)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.3, generator=generator)
        adapted.save_pretrained(made.adapter)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.partial(written, tmp_path_factory.mktemp("adapters"))


def judged(folder: Folders, base: Callable[[Any], Any] = lambda model: model) -> Judged:
    """peft's adapters on transformers' model, which `base` may change in place; call under `precise`."""
    model = base(transformers.AutoModelForCausalLM.from_pretrained(folder.base, dtype=torch.float64).eval())
    adapted = peft.PeftModel.from_pretrained(model, folder.adapter, is_trainable=True, autocast_adapter_dtype=False)
    return Judged(adapted.base_model.model)


def config_of(case: str, folder: Folders, **model: Any) -> Config:
    head, _, remat = WAYS[case]
    given = {"adapter": {"weights": str(folder.adapter)}, "remat": remat} | model
    return settings("float64", folder.base, lm_head={"implementation": head}, model=given)


def jax_step(config: Config, model: Model, arrays: Arrays, layout: str) -> Arrays:
    """`jax_grpo`'s optimiser step as arrays; `logp` of completion tokens [B, NEW]; `base/` what is under the adapters."""
    batch = laid_out(batch_from(arrays, config.learning()), layout)
    adapters, base = divided(model.params)
    step = jax.jit(make_step(model.graphdef, config.learning()))
    state, metrics, logp_BS, grads = step(init_state(adapters, config.learning()), batch, base)
    actual = {name: np.asarray(value) for name, value in metrics.items()} | {"logp": np.asarray(logp_BS)[:, -NEW:]}
    actual |= {f"grad/{name}": value for name, value in to_hf(grads, model.architecture).items()}
    return actual | {f"param/{name}": value for name, value in to_hf(state.params, model.architecture).items()}


def compare_step(config: Config, layout: str, model: Any, judge_of: Callable[[], Judged]) -> None:
    """One step of `jax_grpo` in float64 against `torch_ref`'s `model` and peft's, which `judge_of` makes."""
    arrays = crafted_batch(model, shared_prompts=True)
    with precise("float64"):
        actual = jax_step(config, load_jax(config.model, config.seed), arrays, layout)
        peer = judge_of()
        batch = from_arrays(arrays, config.learning(), dtype=torch.float64)
        references = {
            "torch_ref": replay(config.learning(), model, batch),
            "peft": replay(config.learning(), peer, batch),
        }
    mask = arrays["completion_mask"][:, PROMPT:]
    for name, arrays_of in references.items():
        reference = {key.replace(".default.", "."): x for key, x in arrays_of.items()}
        assert reference["clip_fraction/low"] > 0 and reference["kl/mean"] > 0
        show(f"{name}: logp", {"logp": logp_error(actual["logp"], reference["logp"][:, PROMPT:], mask)}, ALLOWED.logp)
        show(f"{name}: loss and metrics", scalar_errors(actual, reference, "float64"), ALLOWED.scalars)
        errors = tensor_errors(actual, reference)
        assert errors.keys() == {key for key in actual if key.startswith("grad/")}, "the adapters', and no others"
        assert len(errors) == len(trained(model)) > 0
        show(f"{name}: gradients", errors, ALLOWED.gradients)
        parameters = {key: x for key, x in reference.items() if "lora_" in key and key.startswith("param/")}
        show(f"{name}: after the step", tensor_errors(actual, parameters, "param/"), ALLOWED.gradients)


@pytest.mark.default_cases("gpt2", "gemma3_text")
@pytest.mark.parametrize("case", CASES)  # slow: every head and layout
def test_loss_metrics_and_every_adapters_gradient_are_those_of_the_reference_and_of_peft(folders, case):
    folder = folders(case)
    config, layout = config_of(case, folder), WAYS[case][1]
    model = load(load_hf(folder.base, dtype=torch.float64), folder.adapter)
    compare_step(config, layout, model, lambda: judged(folder))
    frozen = dict(load_hf(folder.base, dtype=torch.float64).named_parameters())
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            assert parameter.grad is None and torch.equal(parameter, frozen[name]), name


@pytest.mark.slow  # by default two trainers' first KL to the base shows it
@pytest.mark.parametrize("case", ["gpt2", "gemma3_text"])
def test_adapters_that_begin_change_no_log_probability(folders, case):
    """B = 0: x W + 0, exactly. Operation by operation, since XLA fuses two programs in two ways."""
    folder = folders(case)
    arrays = crafted_batch(load_hf(folder.base, dtype=torch.float64), shared_prompts=True)
    fresh = config_of(case, folder, adapter={"rank": RANK})
    plain = settings("float64", folder.base, model={"remat": WAYS[case][2]}, lm_head={"implementation": WAYS[case][0]})
    logps = []
    with precise("float64"):
        for config in (fresh, plain):
            model = load_jax(config.model, config.seed)
            batch = laid_out(batch_from(arrays, config.learning()), "grouped")
            bare = dataclasses.replace(batch, old_logp_BS=None, ref_logp_BS=None)
            with uncompiled("adapters", case):
                logps.append(np.asarray(make_score(model.graphdef, config.learning())(model.params, bare)[0]))
    there = arrays["completion_mask"][:, PROMPT:] == 1
    assert np.array_equal(logps[0][there], logps[1][there])
    assert np.abs(logps[0][there]).max() > 1


@pytest.mark.parametrize("case", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_both_trainers_take_the_same_iterations_and_the_reference_is_the_base(folders, case, tmp_path, monkeypatch):
    """Rollouts, old log-probabilities, a KL to the base that begins at 0, epochs, minibatches and micro-batches."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"fen": position.fen}) for position in selfplay_positions(2, 0)[:40]]
    (tmp_path / "positions.jsonl").write_text("\n".join(rows))
    sizes = {"n_positions": 128} if case == "gpt2" else {"max_position_embeddings": 128}
    folder = folders(case, json.dumps(sizes | {"vocab_size": 640}))
    config = Config.model_validate(
        {
            "iterations": 2,
            "run_dir": "unused",
            "seed": 3,
            "model": {
                "weights": str(folder.base), "tokenizer": "chess", "compute_dtype": "float64", "param_dtype": "float64",
                "adapter": {"weights": str(folder.begun)}, "remat": True,
            },
            "task": {"name": "length", "length_cap": 6},
            "prompts": {"source": "positions.jsonl", "per_iteration": 4, "max_prompt_tokens": 80},
            "rollout": {"group_size": 4, "max_new_tokens": 6},
            "kl": {"beta": 0.1},
            "update": {"epochs": 2, "minibatches": 2, "micro_batches": 2, "learning_rate": 1e-2, "weight_decay": 0.1},
        }
    )  # fmt: skip
    with precise("float64"):
        actual = whole_iterations(config, tmp_path / "saved")
    assert actual["metrics"][0]["steps"] == 4
    assert actual["metrics"][1]["kl/mean"] > 1e-8, "the policy is no longer the reference"
    assert actual["metrics"][1]["logp_mismatch/max"] < ALLOWED.logp, "what sampled is what is trained"
    for errors in actual["iterations"]:
        show("metrics", errors, ALLOWED.scalars)
    assert all("lora_" in name for name in actual["change"]) and len(actual["change"]) > 8
    show("change", actual["change"], ALLOWED.change or 0)


def test_the_base_is_the_same_behind_a_step_bit_for_bit(folders):
    folder = folders("gpt2")
    config = config_of("gpt2", folder)
    arrays = crafted_batch(load_hf(folder.base, dtype=torch.float64), shared_prompts=True)
    with precise("float64"):
        model = load_jax(config.model, config.seed)
        adapters, base = divided(model.params)
        before = content_hash(base), content_hash(adapters)
        state = init_state(jax.tree.map(jnp.array, adapters), config.learning())
        step = jax.jit(make_step(model.graphdef, config.learning()))
        state, *_ = step(state, laid_out(batch_from(arrays, config.learning()), "grouped"), base)
        assert content_hash(base) == before[0] and content_hash(state.params) != before[1]
        assert content_hash(divided(joined(state.params, base))[1]) == before[0]
        moments = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
        assert moments == 2 * sum(x.size for x in jax.tree.leaves(adapters)), "of the adapters alone"
