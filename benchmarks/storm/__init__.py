"""A storm of faults over a swarm that trains: see `__main__`."""
