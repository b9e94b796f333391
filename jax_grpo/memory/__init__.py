"""What a run needs in memory, known before it starts: `python -m jax_grpo.memory --config C.yaml --target rtx4090`.

Owns the programs of a run as shapes, their compilation for a device that need not be there, and what XLA says of it. Knows the
trainer's programs but not the trainer: never runs one, except to check itself (`measured`).
"""
