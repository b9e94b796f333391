"""Programs on a mesh of eight CPU devices: the numbers of one device, nothing held twice, and nothing large moved.

What is looked at is found by `mesh_child`, in a process of its own: how many CPU devices there are is settled when JAX starts.
"""

import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import pydantic
import pytest
from conftest import PATIENCE_S, config
from mesh_child import DEVICES
from short_runs import EPISODES

from jax_grpo.config import ConfigError
from jax_grpo.mesh import PARAMETERS, layout_of, require_fitting, spec
from jax_grpo.system.process import child_record

# float64: rounding of sums in another order. float32: the same of 2e5 products, whose unit is 1e-7.
TOLERANCE = {"float64": 1e-10, "float32": 2e-5}
TOGETHER = 12  # cases at most in a process: about two minutes of two cores
VOCABULARY = 256  # rows of the embedding: no other axis has this size
MATERIALISED, CHUNKED, COLUMNS = {}, {"implementation": "chunked"}, {"implementation": "chunked", "chunk_vocab": 128}
PALLAS, PALLAS_COLUMNS = {"implementation": "pallas"}, {"implementation": "pallas", "chunk_vocab": 128}
MIXED = {"data": 2, "fsdp": 2, "tensor": 2}


def case(do: str, mesh: dict[str, int], **others: Any) -> str:
    return json.dumps({"do": do, "mesh": mesh} | others)


STEPS = [
    case("step", {"data": 8}, head=MATERIALISED),
    case("step", {"fsdp": 8}, head=CHUNKED),
    case("step", MIXED, head=CHUNKED),
]
MESHES = ({"data": 8}, {"fsdp": 8}, {"fsdp": 4}, {"tensor": 2}, {"tensor": 4}, MIXED, {"data": 2, "tensor": 4})
HEADS = (MATERIALISED, CHUNKED, COLUMNS, PALLAS, PALLAS_COLUMNS)
FLOAT32 = [
    case("step", mesh, head=head, dtype="float32") for mesh in ({"data": 2, "fsdp": 4}, MIXED) for head in HEADS[:3]
]
LOSSES = [
    {"objective": {"importance_level": "sequence", "aggregation": "grpo"}},
    {"objective": {"entropy_coefficient": 0.1, "aggregation": "bnpo"}},
    {"objective": {"entropy_quantile": 0.5, "mask_truncated": True, "entropy_target": 2.0}},
    {"kl": {"adaptive": True, "target": 0.01, "reference_every": 1, "reference_mix": 0.4}},
    {"model": {"num_heads": 4, "remat": True}},
    {"objective": {"name": "clip_cov", "cov_share": 0.2, "cov_bounds": [0.0, 5.0]}},
]
SLOW_STEPS = [
    case("step", MIXED, head=CHUNKED, family="llama", adapters="lora"),
    case("step", MIXED, head=CHUNKED, adapters="int8"),
    case("step", {"fsdp": 2, "tensor": 4}, head=COLUMNS),
    case("step", {"data": 2, "fsdp": 2}, head=PALLAS),
    *(case("step", mesh, head=head) for mesh in MESHES for head in HEADS if "tensor" not in mesh or head is not PALLAS),
    *FLOAT32,
    *(case("step", MIXED, head=CHUNKED, sections=sections) for sections in LOSSES[:2]),
    *(case("step", MIXED, head=MATERIALISED, sections=sections) for sections in LOSSES[1:4]),
    case("step", MIXED, head=CHUNKED, sections=LOSSES[5]),
    case("step", MIXED, head=CHUNKED, update={"first_moment_dtype": "bfloat16"}),
    case("step", MIXED, head=CHUNKED, update={"micro_batches": 1}),
    *(case("step", MIXED, head=CHUNKED, family=family) for family in ("llama", "gemma")),
    *(case("step", mesh, head=CHUNKED, adapters="lora") for mesh in ({"data": 8}, {"fsdp": 8}, {"tensor": 4})),
    case("step", {"fsdp": 4, "tensor": 2}, head=COLUMNS, family="llama"),
]
SLOW_STEPS = [each for each in dict.fromkeys(SLOW_STEPS) if each not in STEPS]
ROLLOUTS = [case("rollout", MIXED)]
SLOW_ROLLOUTS = [
    case("rollout", {"data": 4, "fsdp": 2}),
    *(case("rollout", mesh) for mesh in MESHES if mesh is not MIXED),
    case("rollout", MIXED, sampling={"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.4}),
    case("rollout", MIXED, sampling={"temperature": 0.0}),
    *(case("rollout", MIXED, family=family) for family in ("llama", "gemma")),
    *(case("rollout", MIXED, family="llama", adapters=adapters) for adapters in ("lora", "int8")),
]
SCORES = [case("score", MIXED, head=COLUMNS)]
REFILLED = ["--rollout.refill.rounds", "3", "--rollout.group_size", "2"]  # two completions often earn the same
TURNS = [
    case("turns", MIXED),
    case("turns", {"data": 4, "fsdp": 2}),
    *(
        case("turns", mesh)
        for mesh in ({"data": 8}, {"fsdp": 8}, {"tensor": 2}, {"tensor": 4}, {"data": 2, "tensor": 4})
    ),
    case("turns", MIXED, family="gemma"),
    case("turns", MIXED, adapters="lora"),
    case("turns", MIXED, sampling={"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.4}),
]
RUNS = [
    case("run", {"data": 2, "fsdp": 2}, then={"fsdp": 2, "tensor": 2}),
    case("run", {"data": 4}, then={"data": 2}, options=REFILLED),
    case("run", {"data": 2, "fsdp": 2}, then={"fsdp": 2, "tensor": 2}, options=EPISODES["guess"]),
    case("run", {"data": 2}, then={"fsdp": 2, "tensor": 2}, options=EPISODES["game"]),
]


@functools.cache
def _found(cases: tuple[str, ...]) -> dict[str, Any]:
    folder = Path(__file__).parents[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    path = os.pathsep.join((str(folder), str(folder.parent)))
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    return child_record([sys.executable, str(folder / "mesh_child.py"), *cases], environment, PATIENCE_S)


@pytest.fixture
def found(one: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the case found: one process for many of its kind that are asked for, since their one-device programs are the same."""
    requested = (item.callspec.params.get("one") for item in request.session.items if hasattr(item, "callspec"))
    kind = f'{{"do": "{json.loads(one)["do"]}"'
    cases = list(dict.fromkeys(each for each in requested if str(each).startswith(kind)))
    first = cases.index(one) // TOGETHER * TOGETHER
    record = _found(tuple(cases[first : first + TOGETHER]))
    assert "error" not in record, record
    assert "error" not in record[one], record[one]["error"]
    return record[one]


def name(one: str) -> str:
    """`data2-fsdp2-chunked-chunk_vocab128`: what `-k` finds a case by."""
    values = {key: value for key, value in json.loads(one).items() if key != "do" or value == "turns"}
    flat = re.sub(r"[^\w.]+", " ", json.dumps(list(values.values())).replace('": ', "")).split()
    return "-".join(word for word in flat if word != "implementation") or "plain"


def marked(default: list[str], slow: list[str]) -> list[Any]:
    quick = [pytest.param(each, id=name(each)) for each in default]
    return [*quick, *(pytest.param(each, id=name(each), marks=pytest.mark.slow) for each in slow)]


@pytest.mark.parametrize("one", marked(STEPS, SLOW_STEPS))
def test_a_step_is_that_of_one_device(one, found):
    record, tolerance = found, TOLERANCE[json.loads(one).get("dtype", "float64")]
    names = ("loss", "gradients", "parameters", "moments", "metrics", "logp")
    print(f"{one}: " + ", ".join(f"{name} {record[name]:.1e}" for name in names) + f" (tolerance {tolerance:.0e})")
    assert abs(record["one_device"]["loss"]) > 1e-3, "something to compare"
    for name in names:
        assert record[name] < tolerance, name


@pytest.mark.parametrize("one", marked(ROLLOUTS, SLOW_ROLLOUTS + TURNS))
def test_a_rollout_is_that_of_one_device_token_for_token(one, found):
    record = found
    assert record["tokens"] and record["masks"] and record["stopped"]
    least = 2 if "temperature" in one else 6  # the likeliest tokens of random weights seldom end a completion
    assert len(record["lengths"]) >= least, "completions of many lengths, so that devices' loops end at different steps"
    assert record["logp"] < TOLERANCE["float64"]


@pytest.mark.slow
@pytest.mark.parametrize("one", marked(SCORES, []))
def test_scores_are_those_of_one_device(one, found):
    record = found
    assert record["logp"] < TOLERANCE["float64"] and record["entropy"] < TOLERANCE["float64"]


TENSORS = {"gpt2": 16, "llama": 9, "gemma": 22}  # of the models of one block here, by family


@pytest.mark.parametrize("one", marked(STEPS, SLOW_STEPS))
def test_no_parameter_and_no_moment_is_held_twice_under_fsdp(one, found):
    """Before and after the step: a device has of each its share, 1/fsdp, or less where `tensor` cuts it too."""
    record, mesh, copies = found, json.loads(one)["mesh"], 4 if '"reference_every"' in one else 3
    tensors = next((count for family, count in TENSORS.items() if f'"{family}"' in one), TENSORS["gpt2"])
    for when in ("before", "after"):
        leaves = record[when]
        if '"adapters"' in one:
            tensors = {"llama": 14}.get(json.loads(one).get("family"), 8)  # two for each linear map of a file
        assert len(leaves) == copies * tensors, "parameters, both moments, and a reference that moves"
        for name, (size, own) in leaves.items():
            if "q_norm" in name or "k_norm" in name:  # of a head's width, which every device has whole
                assert own == size, (when, name)
                continue
            parts = mesh.get("fsdp", 1) * (mesh.get("tensor", 1) if _cut_over_tensor(name) else 1)
            assert own * parts == size, (when, name)
    total, own = (sum(sizes) for sizes in zip(*record["after"].values(), strict=True))
    print(f"{one}: {own} of {total} bytes of parameters and moments on a device")
    # The program is given that and its batch: some 40 bytes of each of 32 x 6 tokens, and the prompts.
    own += sum(part for _, part in record["base"].values())
    assert record["argument_bytes"] < own + 20_000


def _cut_over_tensor(name: str) -> bool:
    """By what the layers are, not by the table: only what is of the residual stream alone is whole there."""
    if "adapters" in name:
        return ("c_proj" in name.split("adapters", maxsplit=1)[0]) == name.removesuffix(".value").endswith("['a']")
    return not any(part in name for part in ("wpe", "ln_", "post_")) and not ("c_proj" in name and "bias" in name)


@pytest.mark.parametrize("one", marked(STEPS, SLOW_STEPS))
def test_a_step_moves_neither_the_logits_nor_the_whole_embedding(one, found):
    """Of the embedding, under fsdp alone, a device gathers the width that it lacks; of one cut by vocabulary only its own rows."""
    record, mesh = found, json.loads(one)["mesh"]
    moved = record["collectives"]
    print(f"{one}: {len(moved)} arrays moved, the largest {max(moved, key=lambda x: _size(x[1]))}")
    assert moved, "a program of several devices"
    for opcode, sizes in moved:
        assert sizes[-1:] != [VOCABULARY], f"{opcode} of logits: {sizes}"
        if mesh.get("tensor", 1) > 1:
            assert VOCABULARY not in sizes, f"{opcode} of the whole embedding: {sizes}"


@pytest.mark.parametrize("one", marked(ROLLOUTS, SLOW_ROLLOUTS + TURNS))
def test_a_rollout_moves_no_embedding_and_without_tensor_nothing_in_its_loop(one, found):
    """Gathered over fsdp once; over `tensor` logits found by columns are drawn from by rows, a share of which is moved."""
    record, mesh = found, json.loads(one)["mesh"]
    if mesh.get("tensor", 1) == 1:
        assert {opcode for opcode, _ in record["collectives"]} <= {"all-gather"}
        assert mesh.get("fsdp", 1) > 1 or not record["collectives"]
    for opcode, sizes in record["collectives"]:
        whole = opcode == "all-gather" and sizes[:1] == [VOCABULARY] and len(sizes) == 2
        assert not whole or mesh.get("tensor", 1) == 1, f"{opcode} {sizes}"


@pytest.mark.parametrize("one", marked([], RUNS))
def test_a_run_that_is_continued_on_another_mesh_is_that_of_one_device(one, found):
    """Rollouts, rewards, evaluations, updates and checkpoints of `jax_grpo.train`; every metric that is not a time."""
    record = found
    worst = max(record["metrics"], key=record["metrics"].__getitem__)
    print(f"{one}: parameters {record['parameters']:.1e}, metrics {record['metrics'][worst]:.1e} ({worst})")
    assert record["records"] and record["evaluated"] == 2, "at the start and at the end"
    assert record["grad_norm"] > 1e-2, "it learns"
    assert (record["further_rounds"] > 0) == ("refill" in one)
    assert record["parameters"] < TOLERANCE["float64"]
    assert record["metrics"][worst] < TOLERANCE["float64"]


def _size(sizes: list[int]) -> int:
    return functools.reduce(lambda a, b: a * b, sizes, 1)


def _refusal(**sections: Any) -> str:
    with pytest.raises(pydantic.ValidationError) as error:
        config(prompts={"per_iteration": 8}, **sections)
    return str(error.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"mesh": {"data": 3}}, "prompts.per_iteration 8 must be a multiple of 3"),
        ({"mesh": {"data": 2, "fsdp": 2}, "update": {"micro_batches": 4}}, "must be a multiple of 16"),
        ({"mesh": {"data": 4}, "update": {"minibatches": 4}}, "must be a multiple of 16"),
        ({"mesh": {"data": 2}, "update": {"micro_batches": "auto"}}, "update.micro_batches is 'auto'.*mesh.data 2"),
        ({"mesh": {"fsdp": 2}, "update": {"offload_optimizer": True}}, "update.offload_optimizer true.*mesh.fsdp 2"),
        (
            {"mesh": {"fsdp": 2}, "kl": {"offload_reference": True}},
            "kl.offload_reference true needs one device.*mesh.fsdp 2",
        ),
        (
            {"mesh": {"tensor": 2}, "lm_head": {"implementation": "pallas"}},
            "lm_head.implementation pallas without lm_head.chunk_vocab.*mesh.tensor 2",
        ),
        (
            {"mesh": {"tensor": 2}, "model": {"decode_attention": "pallas"}},
            "model.decode_attention pallas.*mesh.tensor 2",
        ),
        ({"mesh": {"tensor": 2}, "model": {"attention": "pallas"}}, "model.attention pallas.*mesh.tensor 2.*auto"),
        ({"mesh": {"tensor": 4}}, "mesh.tensor 4 must divide the model's num_heads 2"),
        (
            {"mesh": {"fsdp": 8}, "model": {"hidden_size": 36}},
            "mesh.fsdp 8 x mesh.tensor 1 must divide.*hidden_size 36",
        ),
        ({"mesh": {"tensor": 3}, "model": {"num_heads": 3, "hidden_size": 36}}, "mesh.tensor 3 must divide 128"),
        ({"mesh": {"data": 0}}, "mesh.data"),
    ],
)
def test_what_a_mesh_cannot_do_is_refused_with_one_sentence(sections, words):
    sections = {"update": {"learning_rate": 1e-3}} | sections
    message = _refusal(**sections)
    assert re.search(words, message, re.DOTALL), message


def test_a_model_that_is_loaded_is_refused_too():
    mesh = config(prompts={"per_iteration": 8}, mesh={"tensor": 2}).mesh
    with pytest.raises(ConfigError, match=r"mesh.tensor 2 must divide the model's num_heads 3"):
        require_fitting(mesh, 3, 3, 36)
    with pytest.raises(
        ConfigError, match=r"mesh.tensor 2 must divide the model's num_kv_heads 1: heads of keys stay whole"
    ):
        require_fitting(mesh, 4, 1, 36)
    with pytest.raises(ConfigError, match=r"mesh.fsdp 1 x mesh.tensor 2 must divide the 47 columns of a matrix"):
        require_fitting(mesh, 4, 2, 36, 64, 47)


def test_too_few_devices_is_one_sentence():
    count = jax.device_count()
    mesh = config(prompts={"per_iteration": 2 * count}, mesh={"data": 2 * count}).mesh
    with pytest.raises(
        ConfigError, match=rf"mesh.data {2 * count} x .* is {2 * count} devices; JAX sees {count} \(\w+\)"
    ):
        layout_of(mesh)


def test_one_device_is_no_mesh():
    layout = layout_of(config().mesh)
    assert layout.mesh is None and layout.tensor is None
    assert layout.per_device(spec, (), ()) is spec and layout.place(PARAMETERS) is PARAMETERS


def test_an_array_without_a_rule_is_an_error():
    with pytest.raises(KeyError, match=r"mesh.PARAMETERS has no rule for .*lm_head/kernel"):
        jax.tree_util.tree_map_with_path(spec, {"lm_head": {"kernel": jax.numpy.zeros((2, 2))}})
