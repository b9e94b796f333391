"""What recomputing blocks costs in time: the optimiser step with nothing, matmuls' results, or blocks' inputs alone kept."""

from functools import partial
from typing import Any

from jax_grpo.bench.harness import main
from jax_grpo.bench.problems import bench_of
from jax_grpo.bench.update import CHUNKED, jax_step

FULL = {"remat": True, "remat_keeps": "nothing"}
VARIANTS: dict[str, Any] = {
    "none": {"model": {"remat": False, "remat_keeps": "nothing"}},
    "dots": {"model": {"remat": True, "remat_keeps": "matmuls"}},
    "full": {"model": FULL},
    "full-chunked-head": {"model": FULL, "lm_head": CHUNKED},
}
BENCH = bench_of(
    "jax_grpo.bench.remat", __doc__, {name: partial(jax_step, **settings) for name, settings in VARIANTS.items()}
)

if __name__ == "__main__":
    main(BENCH)
