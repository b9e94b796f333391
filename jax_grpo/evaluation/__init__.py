"""The model judged as chess players and researchers would: one module a suite, each a function of (weights, data, seed)."""
