"""The machine under a run: this process and its memory, what XLA compiles and keeps, how long phases take, facts of devices.

Knows nothing of models, tasks or training; nothing here changes what a run computes.
"""
