"""The synchronous face of shoal: the objects that users hold. This is the only code with threads.

`thread` is the loop thread and `pool` its helpers. `running` is the part of a peer that runs in the loop, `dht` the
`DHT` that owns it (and needs no torch), `averager` the `DecentralizedAverager`. Calls from any thread are handed to the
loop and waited for, always with a limit; with `wait=False` or `return_future=True` they return a future.
"""
