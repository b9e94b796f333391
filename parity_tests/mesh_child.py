"""What `test_mesh` and `test_mesh_runs` look at, found in a process that sees eight CPU devices: `python mesh_child.py CASE ...`.

A case is JSON: what is done, the mesh, and what else differs from the tiny model below. The last line that is printed is a JSON
object of what each case found, by the case. Errors are against one device, in the same process. Not collected by pytest.
"""

import dataclasses
import functools
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conftest import TINY, config, relative_error
from flax import nnx
from short_runs import lines_without_times, write_inputs

from jax_grpo.batch import Batch, GroupedTokens
from jax_grpo.config import load_config
from jax_grpo.config.tasks import Windows
from jax_grpo.memory.hlo import Module
from jax_grpo.mesh import layout_of
from jax_grpo.model import int8
from jax_grpo.model.architecture import Rope
from jax_grpo.model.decoder import Decoder
from jax_grpo.policy import int8_base
from jax_grpo.policy.adapters import Adapter, attach, divided, joined, linear_maps
from jax_grpo.rollout import decoding
from jax_grpo.rollout.decoding import DecodingSettings
from jax_grpo.rollout.generate import make_generate
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.turns import make_next_turn, past_columns
from jax_grpo.run import files
from jax_grpo.run.checkpoints import load
from jax_grpo.train import train
from jax_grpo.update import init_state, make_score, make_step

DEVICES = 8
# Four heads, so that `tensor` may be 4; the vocabulary of 131 has 256 rows, a size that no other axis has.
SIZES = dataclasses.replace(TINY, num_layers=1, num_heads=4, max_position_embeddings=80)
# What other families have and GPT-2 has not: two heads of keys, a head of its own, norms of each head, windows, two rotary bases.
_ROTARY = dataclasses.replace(
    SIZES, num_kv_heads=2, inner_size=48, rms_norm=True, gated=True, activation="silu", qkv_bias=False, output_bias=False,
    mlp_bias=False, rope=Rope(100.0),
)  # fmt: skip
FAMILIES = {
    "gpt2": SIZES,
    "llama": dataclasses.replace(_ROTARY, tied=False),
    "gemma": dataclasses.replace(
        _ROTARY, num_layers=2, head_size=16, norm_offset=1.0, post_norms=True, qk_norm=True, embedding_scaled=True,
        query_scale=24, window=4, window_layers=(True, False), window_rope=Rope(10.0),
    ),
}  # fmt: skip
PROMPTS, GROUP, PROMPT, NEW = 16, 2, 8, 6
RUN = [
    *("--model.param_dtype", "float64", "--model.compute_dtype", "float64", "--update.total_steps", "8"),
    *("--checkpoint.every", "2", "--prompts.split", "train", "--evaluation.positions", "2", "--record_batches", "0"),
    *("--task", "{name: length}", "--rollout.max_new_tokens", "8"),  # random weights are paid by this one
]
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def settings(case: dict[str, Any]):
    head = {"chunk_tokens": 64} | case.get("head", {})
    # In float32 a gradient of 0 is noise of 1e-9, which Adam would divide by its own size.
    update = {"micro_batches": 2 if case["mesh"] else 1, "weight_decay": 0.1, "epsilon": 1e-4}
    return config(
        mesh=case["mesh"],
        prompts={"per_iteration": PROMPTS, "max_prompt_tokens": PROMPT},
        rollout={"group_size": GROUP, "max_new_tokens": NEW},
        lm_head=head,
        update=update | case.get("update", {}),
        **{"model": {"num_heads": SIZES.num_heads}} | case.get("sections", {}),
    )


@functools.cache
def model(dtype: str, family: str = "gpt2", adapters: str = ""):
    """Graph and parameters; `adapters`: `lora`, on a base in floats, or `int8`."""
    sizes = dataclasses.replace(FAMILIES[family], family="llama" if adapters and family == "llama" else "gpt2")
    made = Decoder(sizes, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(dtype), compute_dtype=jnp.dtype(dtype))
    if adapters:
        attach(made, Adapter(3, 5.0), seed=1, param_dtype=jnp.dtype(dtype))
        for _, _, linear in linear_maps(made):
            for one in linear.adapters.values() if linear.adapters else ():
                one.b = nnx.LoRAParam(0.01 * jax.random.normal(jax.random.key(2), one.b.shape, jnp.dtype(dtype)))
    graphdef, params = nnx.split(made, nnx.Param)
    params = jax.tree.map(lambda x: x * 4 if x.ndim >= 2 else x, params)  # so that logits are not all alike
    if adapters == "int8":

        def held() -> Decoder:
            of = int8.decoder(sizes, jnp.int8, rngs=nnx.Rngs(0), compute_dtype=jnp.dtype(dtype))
            return attach(of, Adapter(3, 5.0), seed=1, param_dtype=jnp.dtype(dtype))

        shapes = nnx.eval_shape(held)
        graphdef, (trained, base) = nnx.split(shapes, nnx.Param)[0], divided(params)
        params = joined(trained, int8_base.held(base))
    return graphdef, params


def of_case(case: dict[str, Any], dtype: str = "float64"):
    return model(dtype, case.get("family", "gpt2"), case.get("adapters", ""))


@functools.cache
def batch(dtype: str) -> Batch:
    rng = np.random.default_rng(1)
    prompt_mask = np.arange(PROMPT) >= rng.integers(0, PROMPT - 1, (PROMPTS, 1))
    completion_mask = np.arange(NEW) < rng.integers(1, NEW + 1, (PROMPTS, GROUP, 1))
    ids = [rng.integers(0, SIZES.vocab_size, shape) for shape in ((PROMPTS, PROMPT), (PROMPTS, GROUP, NEW))]
    order = (ids[0], prompt_mask, ids[1], completion_mask)
    tokens = GroupedTokens(*(jnp.asarray(x, jnp.int32) for x in order))
    rows = PROMPTS * GROUP

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    logps = [normal(rows, NEW) * 0.3 - 5 for _ in range(3)]
    advantages_B, entropy_BS = normal(rows), jnp.abs(normal(rows, NEW))
    stopped_B = jnp.asarray(rng.random(rows) < 0.75)
    return Batch(
        tokens, tokens.completion_mask_PGC.reshape(rows, NEW), advantages_B, stopped_B, *logps, entropy_BS=entropy_BS
    )


def collectives(hlo: str) -> list[tuple[str, list[int]]]:
    """Opcode and sizes of each array that a program moves between devices."""
    actual = []
    for instruction in Module(hlo).instructions.values():
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            actual += [(instruction.opcode, list(array.sizes)) for array in instruction.arrays]
    return actual


def bytes_by_leaf(tree: Any) -> dict[str, list[int]]:
    """Bytes in all and on a device of each leaf that has an axis."""
    leaves = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if x.ndim]
    return {name: [x.nbytes, max(s.data.nbytes for s in x.addressable_shards)] for name, x in leaves}


def masked(x_BS: Any, given: Batch) -> np.ndarray:
    """Values of real tokens: of others a head may give anything."""
    return np.where(given.mask_BS, x_BS, 0)


def stepped(case: dict[str, Any], dtype: str) -> dict[str, Any]:
    """One optimiser step."""
    how, (graphdef, params) = settings(case), of_case(case, dtype)
    layout = layout_of(how.mesh)
    trained, base = divided(params)
    state, base = layout.place(init_state(trained, how.learning())), layout.place(base)
    compiled = jax.jit(make_step(graphdef, how.learning(), layout)).lower(state, batch(dtype), base).compile()
    after, metrics, logp_BS, grads = compiled(state, batch(dtype), base)
    return {
        "loss": float(metrics["loss"]),
        "metrics": {name: float(value) for name, value in metrics.items()},
        "logp": masked(logp_BS, batch(dtype)),
        "gradients": jax.device_get(grads),
        "parameters": jax.device_get((after.params, after.reference)),
        "moments": jax.device_get(after.opt_state[0].nu),
        "before": bytes_by_leaf(state),
        "after": bytes_by_leaf(after),
        "base": bytes_by_leaf(base),
        "argument_bytes": compiled.memory_analysis().argument_size_in_bytes,
        "collectives": collectives(compiled.as_text()),
    }


@functools.cache
def one_step(dtype: str, what: str) -> dict[str, Any]:
    return stepped(json.loads(what), dtype)


def step(case: dict[str, Any]) -> dict[str, Any]:
    dtype = case.get("dtype", "float64")
    reference, actual = one_step(dtype, json.dumps(case | {"mesh": {}})), stepped(case, dtype)
    errors = {name: relative_error(actual[name], reference[name]) for name in ("gradients", "parameters", "moments")}
    metrics = actual["metrics"].items()
    return errors | {
        "loss": abs(actual["loss"] - reference["loss"]),
        "metrics": max(abs(value - reference["metrics"][name]) for name, value in metrics),
        "logp": float(np.abs(actual["logp"] - reference["logp"]).max()),
        **{name: actual[name] for name in ("before", "after", "base", "argument_bytes", "collectives")},
        "one_device": {name: reference[name] for name in ("argument_bytes", "loss")},
    }


def scored(case: dict[str, Any], params: Any) -> list[np.ndarray]:
    how = settings(case)
    layout, given = layout_of(how.mesh), batch("float64")
    return [np.asarray(x) for x in make_score(of_case(case)[0], how.learning(), layout)(layout.place(params), given)]


def score(case: dict[str, Any]) -> dict[str, Any]:
    actual, reference = (scored(case | {"mesh": mesh}, of_case(case)[1]) for mesh in (case["mesh"], {}))
    errors = [float(np.abs(x - y).max()) for x, y in zip(actual, reference, strict=True)]
    return dict(zip(("logp", "entropy"), errors, strict=True))


def decoding_settings(case: dict[str, Any]) -> DecodingSettings:
    # Two chunks of the cache, and some prompts' completions end before the others.
    decoding.LEAST_CHUNK = decoding.CHUNK_MULTIPLE
    stops = np.arange(SIZES.vocab_size) % 16 == 0
    return DecodingSettings(
        vocab_size=SIZES.vocab_size,
        pad_id=0,
        sampling=Sampling(**case.get("sampling", {})),
        stop_table_SV=np.stack([stops.astype(np.int32), np.ones(SIZES.vocab_size, np.int32)]),
        accept_state=1,
    )


def generated(case: dict[str, Any]):
    (graphdef, params), how = of_case(case), decoding_settings(case)
    layout = layout_of(settings(case).mesh)
    generate = make_generate(graphdef, how, group_size=GROUP, max_new_tokens=20, layout=layout)
    tokens, numbers = batch("float64").tokens, jnp.arange(PROMPTS) * 3 + 5
    given = layout.place(params), tokens.prompt_ids_PT, tokens.prompt_mask_PT, jnp.zeros(PROMPTS, jnp.int32), numbers
    caps = jnp.arange(PROMPTS) % 3 + 18
    compiled = generate.lower(*given, 7, jnp.int32(3), caps).compile()
    return jax.device_get(compiled(*given, 7, jnp.int32(3), caps)), collectives(compiled.as_text())


def turns(case: dict[str, Any]):
    """Three turns of episodes whose observations are drawn beforehand, of 0 to 3 tokens; some episodes end after a turn."""
    (graphdef, params), how = of_case(case), decoding_settings(case)
    layout, windows, rng = layout_of(settings(case).mesh), Windows(3, 18, 3), np.random.default_rng(5)
    sizes = {"group_size": GROUP, "layout": layout}
    generate = make_generate(
        graphdef, how, max_new_tokens=windows.completion, past_columns=past_columns(windows), **sizes
    )
    next_turn = make_next_turn(graphdef, how, windows=windows, **sizes)
    tokens, numbers, states = batch("float64").tokens, jnp.arange(PROMPTS) * 3 + 5, jnp.zeros(PROMPTS, jnp.int32)
    params, caps = layout.place(params), jnp.arange(PROMPTS) % 3 + windows.completion - 2
    sampled, moved = (states, numbers, 7, jnp.int32(3), caps), []
    rollout, retained = generate(params, tokens.prompt_ids_PT, tokens.prompt_mask_PT, *sampled)
    written, goes_on_PG = [jax.device_get(rollout)], np.ones((PROMPTS, GROUP), bool)
    for turn in range(1, windows.turns):
        ids_PGO = rng.integers(0, SIZES.vocab_size, (PROMPTS, GROUP, windows.observation)).astype(np.int32)
        goes_on_PG &= rng.random((PROMPTS, GROUP)) < 0.7
        mask_PGO = np.arange(windows.observation) >= rng.integers(0, windows.observation, (PROMPTS, GROUP, 1))
        requested = (tokens.prompt_mask_PT, ids_PGO, mask_PGO.astype(np.int32), goes_on_PG, *sampled, jnp.int32(turn))
        if turn == 1:
            compiled = next_turn.lower(params, retained, rollout, *requested).compile()
            moved = collectives(compiled.as_text())
        rollout, retained = next_turn(params, retained, rollout, *requested)
        written.append(jax.device_get(rollout))
    return jax.tree.map(lambda *x: np.stack(x), *written), moved


@functools.cache
def one_rollout(what: str):
    case = json.loads(what)
    return MADE[case["do"]](case)


def rollout(case: dict[str, Any]) -> dict[str, Any]:
    (actual, moved), (reference, _) = MADE[case["do"]](case), one_rollout(json.dumps(case | {"mesh": {}}))
    return {
        "tokens": bool((actual.completion_ids_PGC == reference.completion_ids_PGC).all()),
        "masks": bool((actual.completion_mask_PGC == reference.completion_mask_PGC).all()),
        "stopped": bool((actual.stopped_PG == reference.stopped_PG).all()),
        "logp": float(np.abs(actual.sampling_logp_PGC - reference.sampling_logp_PGC).max()),
        "lengths": np.unique(reference.completion_mask_PGC.sum(-1)).tolist(),
        "collectives": moved,
    }


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Four iterations of a real run, of which the last two are continued on another mesh; and all four on one device."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)

        def trained(run_dir: str, mesh: dict[str, int], iterations: int) -> Path:
            sizes = [word for axis, size in mesh.items() for word in (f"--mesh.{axis}", str(size))]
            words = [
                "--run_dir",
                str(folder / run_dir),
                "--iterations",
                str(iterations),
                *sizes,
                *RUN,
                *case.get("options", ()),
            ]
            return train(load_config(str(folder / "c.yaml"), words), resume="auto", argv=words)

        trained("several", case["mesh"], 2)
        several, one = trained("several", case["then"], 4), trained("one", {}, 4)
        states = [load(path / "checkpoints" / files.folder_name(4)).arrays for path in (several, one)]
        metrics = [lines_without_times(path) for path in (several, one)]
    worst = {
        name: max(abs(a[name] - b[name]) for a, b in zip(*metrics, strict=True) if name in a)
        for name in {name for record in metrics[0] for name in record}
    }
    return {
        "parameters": relative_error(*states),
        "metrics": worst,
        "grad_norm": max(record.get("grad_norm", 0) for record in metrics[1]),
        "records": [sorted(record) for record in metrics[0]] == [sorted(record) for record in metrics[1]],
        "further_rounds": sum(record.get("refill/rounds", 0) for record in metrics[1]),
        "evaluated": sum("eval/greedy/reward" in record for record in metrics[1]),
    }


MADE = {"rollout": generated, "turns": turns}
CASES = {"step": step, "score": score, "rollout": rollout, "turns": rollout, "run": run}


def tried(case: dict[str, Any]) -> dict[str, Any]:
    """What a case found; one that fails takes no other with it."""
    try:
        return CASES[case["do"]](case)
    except Exception:
        return {"error": traceback.format_exc()[-2000:]}


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    assert jax.device_count() == DEVICES, "XLA_FLAGS says how many"
    print(json.dumps({case: tried(json.loads(case)) for case in sys.argv[1:]}))


if __name__ == "__main__":
    main()
