"""The names of hivemind 1.1.12 besides `Optimizer`, `DHT` and `DecentralizedAverager`."""
