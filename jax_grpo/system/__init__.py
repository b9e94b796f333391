"""The machine under a run: this process and its memory, the programs that XLA compiles, how long phases take, facts of devices.

Knows nothing of models, tasks or training; nothing here changes what a run computes.
"""
