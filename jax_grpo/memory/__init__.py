"""What a run needs in memory, known before it starts: `python -m jax_grpo.memory --config C.yaml --target rtx4090`.

`shapes` lists the run's programs, `compiled` compiles one for a device that need not be there, `buffers` reads what is alive at its
peak, `largest` looks for the batch that still fits, `micro_batches` for the fewest of them, `report` and `picture` say it,
`measured` checks it against a real run.
"""
