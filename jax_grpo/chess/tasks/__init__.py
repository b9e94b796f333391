"""The tasks of chess: choosing moves, predicting the next state, playing games; the engines and players they ask."""
