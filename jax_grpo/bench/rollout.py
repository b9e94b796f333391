"""Generation beside `transformers` and `torch_ref`: the same weights and prompts, every completion of full length.

    python -m jax_grpo.bench.rollout --problem gpt2-small --json rollout.json
    python -m jax_grpo.bench.rollout --config configs/rookworld_4090.yaml --json rollout.json

A problem that carries a config's name has that config's sizes (`update_problem.CONFIGS`).

Beside each time stands a floor of this machine: the matmuls of one decode step alone, without attention, norms, sampling or a
cache, run with the same library and weights (`floor_ms`: of all tokens). On a GPU the bytes of weights and caches over the
device's bandwidth are the floor instead.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_grpo.bench.harness import Bench, Prepared, main
from jax_grpo.bench.update_problem import CONFIGS as RUNS
from jax_grpo.bench.update_problem import FOLDER, Problem, about, model_of, problem_of, resolver, weights

CONFIGS = RUNS | {"quickstart-mixed": FOLDER / "quickstart_mixed.yaml"}
# The completions of every second prompt end before the others: tasks mixed in one batch. transformers decodes rows that have ended
# along with the others, and so do our rows without compaction.
MIXED = ((0.5, 64), (0.5, 4))
PROBLEMS = {
    "rook-small-8x8x64": Problem(4, 6, 192, 585, 8, 8, 72, 64),
    "rook-small-8x8x64-mixed": Problem(4, 6, 192, 585, 8, 8, 72, 64, parts=MIXED),
    "gpt2-small": Problem(12, 12, 768, 50257, 8, 8, 46, 64),
    "gpt2-small-32": Problem(12, 12, 768, 50257, 8, 8, 46, 32),
    "gpt2-small-mixed": Problem(12, 12, 768, 50257, 8, 8, 46, 64, parts=MIXED),
    "gpt2-small-64x144-bf16": Problem(12, 12, 768, 50257, 8, 8, 46, 144, "bfloat16"),
    "tiny": Problem(2, 2, 32, 128, 2, 4, 16, 4),
}
ABOUT = {
    name: line + "".join(f"; {share:.0%} of the prompts to {cap}" for share, cap in PROBLEMS[name].parts)
    if name in PROBLEMS
    else line
    for name, line in about(PROBLEMS, CONFIGS).items()
}
FLOOR_REPEATS = 20  # of one step's matmuls, a millisecond for a small model
REPEATS = 3  # of the measurements beside the steps


def prompts(problem: Problem) -> np.ndarray:
    """Random prompts of full length, [P, T]."""
    rng = np.random.default_rng(0)
    return rng.integers(0, problem.vocabulary, (problem.prompts, problem.prompt)).astype(np.int32)


def best_ms(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Least milliseconds of some runs, after one that compiles."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - started))
    return min(times)


def caps(problem: Problem) -> np.ndarray:
    """Tokens of each prompt's completions, [P]: of a mixture, each task's by its share of the prompts, in turns."""
    given, found = [0] * len(problem.parts), []
    whole = sum(share for share, _ in problem.parts)
    for number in range(1, problem.prompts + 1) if problem.parts else ():
        lacks = [number * share / whole - have for (share, _), have in zip(problem.parts, given, strict=True)]
        chosen = lacks.index(max(lacks))
        given[chosen] += 1
        found.append(problem.parts[chosen][1])
    return np.array(found or [problem.completion] * problem.prompts, np.int32)


def _facts(problem: Problem, first_ms: float) -> dict[str, Any]:
    return {"tokens": int(caps(problem).sum()) * problem.group, "first_token_ms": first_ms}


def decode_floor_ms(problem: Problem, params: Any) -> float:
    """Milliseconds that the matrix products of one decode step of all rows take alone, or that its bytes take on a GPU."""
    import jax
    import jax.numpy as jnp

    from jax_grpo import targets

    device, rows = jax.devices()[0], problem.prompts * problem.group
    dtype = jnp.dtype(problem.dtype)
    leaves = {jax.tree_util.keystr(path): x.astype(dtype) for path, x in jax.tree_util.tree_leaves_with_path(params)}
    embedding = next(x for name, x in leaves.items() if "wte" in name)
    matrices = [x for name, x in leaves.items() if x.ndim == 2 and "wte" not in name and "wpe" not in name]
    if device.platform != "cpu":
        found = [target for target in map(targets.read, targets.known()) if target.device_kind == device.device_kind]
        if not found:
            return float("nan")
        tokens = problem.prompts * problem.prompt + rows * problem.completion / 2  # read from the caches, on average
        cache = 2 * problem.layers * problem.width * tokens * dtype.itemsize
        return 1e3 * (embedding.nbytes + sum(x.nbytes for x in matrices) + cache) / found[0].bandwidth

    @jax.jit
    def products(embedding_VH: jax.Array, matrices: list[jax.Array], x_RH: jax.Array) -> list[jax.Array]:
        wide_RF = jnp.tile(x_RH, 4)
        found = [(x_RH if len(w) == problem.width else wide_RF) @ w for w in matrices]
        return [x.sum() for x in (*found, x_RH @ embedding_VH.T)]

    x_RH = jnp.ones((rows, problem.width), dtype)
    return best_ms(lambda: jax.block_until_ready(products(embedding, matrices, x_RH)), FLOOR_REPEATS)


def _jax(name: str, *, compacts: bool = True) -> Prepared:
    import jax
    import jax.numpy as jnp

    from jax_grpo.rollout import make_generate
    from jax_grpo.sampling import Sampling

    problem = problem_of(name)
    graphdef, params = model_of(problem)
    ids_PT = jnp.asarray(prompts(problem))
    never_SV = np.repeat(np.arange(2, dtype=np.int32)[:, None], problem.vocabulary, axis=1)
    count = np.zeros(problem.prompts, np.int32)

    def program(cap: int) -> Callable[[], Any]:
        generate = make_generate(
            graphdef, vocab_size=problem.vocabulary, pad_id=0, group_size=problem.group, max_new_tokens=cap,
            sampling=Sampling(), stop_table_SV=never_SV, accept_state=1, compacts=compacts,
        )  # fmt: skip
        asked = (params, ids_PT, jnp.ones_like(ids_PT), count, count, 0, jnp.int32(0))
        caps_P = np.minimum(caps(problem), cap)
        return lambda: jax.block_until_ready(generate(*asked, caps_P))

    def check(rollout: Any) -> dict[str, Any]:
        lengths = np.asarray(rollout.completion_mask_PGC).sum(-1)
        assert (lengths == caps(problem)[:, None]).all(), "every completion is of full length"
        return {"device": str(jax.devices()[0])}

    def after() -> dict[str, Any]:
        facts = _facts(problem, best_ms(program(1)))
        floor = decode_floor_ms(problem, params)
        steps = facts["tokens"] / (problem.prompts * problem.group)  # of all rows
        return facts | {"decode_floor_ms": floor, "floor_ms": floor * steps}

    return Prepared(program(problem.completion), {}, check, after)


def _torch_model(problem: Problem) -> Any:
    """`transformers`' model on the device, in the problem's dtype."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=problem.vocabulary, n_layer=problem.layers, n_head=problem.heads, n_embd=problem.width,
            n_positions=problem.positions, bos_token_id=0, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip
    model.load_state_dict({k: torch.from_numpy(x) for k, x in weights(problem).items()}, strict=False)
    model.tie_weights()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.nn.Module.to(model, device, getattr(torch, problem.dtype)).eval()


def _transformers(name: str, **how: Any) -> Prepared:
    import torch

    problem = problem_of(name)
    model = _torch_model(problem)
    ids = torch.from_numpy(prompts(problem)).long().to(model.device)
    if "compiled" in how:
        how = {"cache_implementation": "static"}
        model.forward = torch.compile(model.forward)

    def run(cap: int = problem.completion) -> Any:
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, num_return_sequences=problem.group,
                max_new_tokens=cap, min_new_tokens=cap, pad_token_id=0, **how,
            )  # fmt: skip
        assert out.shape == (problem.prompts * problem.group, problem.prompt + cap)
        return out

    return Prepared(run, {}, after=lambda: _facts(problem, best_ms(lambda: run(1))))


def _torch_ref(name: str) -> Prepared:
    import torch

    from torch_ref.generate import end_of_text, generate
    from torch_ref.model import GPT2, GPT2Config

    problem = problem_of(name)
    model = GPT2(GPT2Config(problem.vocabulary, problem.layers, problem.heads, problem.width, problem.positions))
    model.load_state_dict({k: torch.from_numpy(x) for k, x in weights(problem).items()})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device, getattr(torch, problem.dtype))
    rows = torch.from_numpy(prompts(problem)).long().repeat_interleave(problem.group, 0).to(device)
    stop = end_of_text(problem.vocabulary - 1, problem.vocabulary, len(rows))
    stop.next_SV.zero_()  # nothing stops
    generator = torch.Generator(device).manual_seed(0)

    def run(cap: int = problem.completion) -> Any:
        return generate(model, rows, torch.ones_like(rows), max_new_tokens=cap, stop=stop, generator=generator)

    return Prepared(run, {}, after=lambda: _facts(problem, best_ms(lambda: run(1))))


BENCH = Bench(
    "jax_grpo.bench.rollout",
    "Generation beside transformers and torch_ref, same weights and prompts, full length.",
    {
        "jax_grpo": _jax,
        "jax_grpo-no-compaction": lambda name: _jax(name, compacts=False),
        "transformers": _transformers,
        "transformers-static-compiled": lambda name: _transformers(name, compiled=True),
        "torch_ref": _torch_ref,
    },
    ABOUT,
    reads_configs=True,
    resolve=resolver(PROBLEMS, CONFIGS),
)

if __name__ == "__main__":
    main(BENCH)
