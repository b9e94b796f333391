"""What recomputing blocks costs in time: the optimiser step with nothing, matmuls' results, or blocks' inputs alone kept."""

from jax_grpo.bench.harness import Bench, main
from jax_grpo.bench.update import CHUNKED, jax_step
from jax_grpo.bench.update_problem import ABOUT, RESOLVE

BENCH = Bench(
    "jax_grpo.bench.remat",
    (__doc__ or "").splitlines()[0],
    {
        "none": lambda name: jax_step(name, remat=False),
        "dots": lambda name: jax_step(name, remat="dots"),
        "full": lambda name: jax_step(name, remat="all"),
        "full-chunked-head": lambda name: jax_step(name, CHUNKED, remat="all"),
    },
    ABOUT,
    reads_configs=True,
    resolve=RESOLVE,
)

if __name__ == "__main__":
    main(BENCH)
