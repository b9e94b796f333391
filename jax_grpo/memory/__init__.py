"""What a run needs in memory, known before it starts: `python -m jax_grpo.memory --config C.yaml --target rtx4090`.

Builds the programs of a run from shapes, compiles them for a device that need not be there, and reads XLA's figures. Knows the
trainer's programs but not the trainer, and runs a program only to check the report (`measured`).
"""
