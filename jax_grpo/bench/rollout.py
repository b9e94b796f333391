"""Generation beside `transformers` and `torch_ref`: the same weights and prompts, every completion of full length.

    python -m jax_grpo.bench.rollout --problem gpt2-small --json rollout.json
    python -m jax_grpo.bench.rollout --config configs/rookworld_4090.yaml --json rollout.json

Beside each time stands a floor of this machine: the matmuls of one decode step alone, without attention, norms, sampling or a
cache, run with the same library and weights (`floor_ms`: of all tokens). On a GPU the bytes of weights and caches over the
device's bandwidth (`assets/targets`) are the floor instead.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jax_grpo.bench import problems
from jax_grpo.bench.machine import best_ms
from jax_grpo.bench.problems import CONFIGS, FOLDER, Problem, arrays, sizes_of, torch_arrays
from jax_grpo.bench.runner import Bench, NotHere, Prepared, main, torch_device

PROBLEMS = CONFIGS | {
    "quickstart-mixed": FOLDER / "quickstart_mixed.yaml",
    "rook-small-8x8x64": Problem(4, 6, 192, 585, 8, 8, 72, 64),
    # The completions of every second prompt end before the others: tasks mixed in one batch. transformers decodes rows that have
    # ended along with the others, and so do our rows without compaction.
    "rook-small-8x8x64-mixed": Problem(4, 6, 192, 585, 8, 8, 72, 64, parts=((0.5, 64), (0.5, 4))),
    "gpt2-small": Problem(12, 12, 768, 50257, 8, 8, 46, 64),
    "gpt2-small-32": Problem(12, 12, 768, 50257, 8, 8, 46, 32),
    "gpt2-small-64x144-bf16": Problem(12, 12, 768, 50257, 8, 8, 46, 144, "bfloat16"),
    "tiny": Problem(2, 2, 32, 128, 2, 4, 16, 4),
}
FLOOR_REPEATS = 20  # of one step's matmuls, a millisecond for a small model


def caps(problem: Problem) -> np.ndarray:
    """Tokens of each prompt's completions, [P]: of a mixture, each task's by its share of the prompts, in turns."""
    if not problem.parts:
        return np.full(problem.prompts, problem.completion, np.int32)
    share_N, cap_N = map(np.array, zip(*problem.parts, strict=True))
    due_NP = (np.arange(problem.prompts) + 0.5) / share_N[:, None]  # of each task's prompts, as `tasks.interleaved`
    return cap_N.astype(np.int32)[np.argsort(due_NP, axis=None, kind="stable")[: problem.prompts] // problem.prompts]


def _prepared(problem: Problem, generate: Callable[[int], Any], check=lambda _: {}, after: Any = dict) -> Prepared:
    """A variant that generates so many tokens of each row at most."""

    def times() -> dict[str, Any]:
        return {"first_token_ms": best_ms(lambda: generate(1)), **after()}

    tokens = int(caps(problem).sum()) * problem.group
    return Prepared(lambda: generate(problem.completion), {"tokens": tokens}, check, times)


def decode_floor_ms(problem: Problem, params: Any) -> float | None:
    """Milliseconds that the matrix products of one decode step of all rows take alone, or that its bytes take on a GPU.

    None on a GPU whose bandwidth no file of `assets/targets` has.
    """
    import jax
    import jax.numpy as jnp

    from jax_grpo.arrays.products import contract, matmul
    from jax_grpo.system import devices

    device, dtype = jax.devices()[0], jnp.dtype(problem.dtype)
    named = {jax.tree_util.keystr(path): x.astype(dtype) for path, x in jax.tree_util.tree_leaves_with_path(params)}
    embedding = next(x for name, x in named.items() if "wte" in name)
    matrices = [x for name, x in named.items() if x.ndim == 2 and "wte" not in name and "wpe" not in name]
    if device.platform != "cpu":
        known = {target.device_kind: target.bandwidth for target in map(devices.read, devices.known())}
        if device.device_kind not in known:
            return None
        # Tokens that are read from the caches, on average.
        tokens = problem.prompts * problem.prompt + problem.rows * problem.completion / 2
        cache = 2 * problem.layers * problem.width * tokens * dtype.itemsize
        read = embedding.nbytes + sum(x.nbytes for x in matrices) + cache
        return 1e3 * read / known[device.device_kind]

    @jax.jit
    def products(embedding_VH: jax.Array, matrices: list[jax.Array], x_RH: jax.Array) -> list[jax.Array]:
        wide_RF = jnp.tile(x_RH, 4)
        results = [matmul(x_RH if len(w) == problem.width else wide_RF, w) for w in matrices]
        return [x.sum() for x in (*results, contract(x_RH, embedding_VH, (1, 1), jnp.float32))]

    x_RH = jnp.ones((problem.rows, problem.width), dtype)
    return best_ms(lambda: products(embedding, matrices, x_RH), FLOOR_REPEATS)


def floors(problem: Problem, params: Any) -> dict[str, Any]:
    """Of a decode step and of all tokens; where there is none, a note says why."""
    import jax

    floor = decode_floor_ms(problem, params)
    if floor is None:
        return {"notes": [f"no floor: assets/targets has no {jax.devices()[0].device_kind}"]}
    return {"decode_floor_ms": floor, "floor_ms": floor * float(caps(problem).mean())}


def _jax(problem: Problem, *, compacts: bool = True) -> Prepared:
    import jax.numpy as jnp

    from jax_grpo.rollout.decoding import DecodingSettings
    from jax_grpo.rollout.generate import make_generate
    from jax_grpo.rollout.sampling import Sampling

    graphdef, params = problems.model_of(problem, problems.config_of(problem))
    ids_PT = jnp.asarray(arrays(problem)["prompt"])
    never_SV = np.repeat(np.arange(2, dtype=np.int32)[:, None], problem.vocabulary, axis=1)
    settings = DecodingSettings(
        vocab_size=problem.vocabulary, pad_id=0, sampling=Sampling(), stop_table_SV=never_SV, accept_state=1, compacts=compacts
    )  # fmt: skip
    zeros_P = np.zeros(problem.prompts, np.int32)
    inputs = (params, ids_PT, jnp.ones_like(ids_PT), zeros_P, zeros_P, 0, jnp.int32(0))
    with_cap = partial(make_generate, graphdef, settings, group_size=problem.group)
    programs = {cap: with_cap(max_new_tokens=cap) for cap in (1, problem.completion)}

    def generate(cap: int) -> Any:
        return programs[cap](*inputs, np.minimum(caps(problem), cap))

    def check(rollout: Any) -> dict[str, Any]:
        lengths = np.asarray(rollout.completion_mask_PGC).sum(-1)
        assert (lengths == caps(problem)[:, None]).all(), "every completion is of full length"
        return {}

    return _prepared(problem, generate, check, partial(floors, problem, params))


def _transformers(problem: Problem, *, compiled: str | None = None) -> Prepared:
    """As it comes, or with a static cache and `torch.compile` in this mode, as transformers itself compiles its decode step."""
    import torch
    from transformers import CompileConfig

    model = problems.transformers_model(problem, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    model.to(torch_device(), getattr(torch, problem.dtype)).eval()
    ids = torch_arrays(problem)["prompt"][:: problem.group]
    cache = {}
    if compiled:
        how = CompileConfig(mode=compiled)
        how._compile_all_devices = True  # pyright: ignore[reportAttributeAccessIssue] (on a CPU too)
        cache = {"cache_implementation": "static", "compile_config": how}

    def generate(cap: int) -> Any:
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, num_return_sequences=problem.group,
                max_new_tokens=cap, min_new_tokens=cap, pad_token_id=0, **cache,
            )  # fmt: skip
        assert out.shape == (problem.rows, problem.prompt + cap)
        return out

    return _prepared(problem, generate)


def _vllm(problem: Problem) -> Prepared:
    """vLLM with its prefix cache and CUDA graphs, on token ids.

    Raises ModuleNotFoundError: it is not installed; its wheels pin a PyTorch of their own. NotHere: there is no GPU.
    """
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    if torch_device() == "cpu":
        raise NotHere("vLLM is compared on a GPU")
    with tempfile.TemporaryDirectory() as folder:
        problems.transformers_model(problem, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
        engine = LLM(
            folder, skip_tokenizer_init=True, dtype=problem.dtype, max_model_len=problem.prompt + problem.completion,
            max_num_seqs=problem.rows, enable_prefix_caching=True, gpu_memory_utilization=0.5,
        )  # fmt: skip
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in arrays(problem)["prompt"]]

    def generate(cap: int) -> Any:
        full = SamplingParams(n=problem.group, max_tokens=cap, min_tokens=cap, ignore_eos=True, detokenize=False)
        outputs = engine.generate(prompts, full, use_tqdm=False)
        assert all(len(sample.token_ids) == cap for prompt in outputs for sample in prompt.outputs)
        return outputs

    return _prepared(problem, generate)


def _torch_ref(problem: Problem) -> Prepared:
    import torch

    from torch_ref.generate import end_of_text, generate

    model = problems.torch_ref_model(problem).to(getattr(torch, problem.dtype))
    rows = torch_arrays(problem)["prompt"]
    stop = end_of_text(problem.vocabulary - 1, problem.vocabulary, len(rows))
    stop.next_SV.zero_()  # nothing stops
    options = {"stop": stop, "generator": torch.Generator(torch_device()).manual_seed(0)}
    return _prepared(problem, lambda cap: generate(model, rows, torch.ones_like(rows), max_new_tokens=cap, **options))


VARIANTS = {
    "jax_grpo": _jax,
    "jax_grpo-no-compaction": partial(_jax, compacts=False),
    "transformers": _transformers,
    "transformers-static-compiled": partial(_transformers, compiled="default"),
    "transformers-reduce-overhead": partial(_transformers, compiled="reduce-overhead"),
    "torch_ref": _torch_ref,
    "vllm": _vllm,
}
BENCH = Bench("jax_grpo.bench.rollout", __doc__, VARIANTS, PROBLEMS, sizes_of, Problem._make)

if __name__ == "__main__":
    main(BENCH)
