"""The synchronous face of shoal: the objects that users hold. The only code with threads.

`thread` is the loop thread and `pool` its helpers, `running` the part of a peer that runs in there, `dht` the `DHT`
that owns it (and needs no torch), `averager` the `DecentralizedAverager`. Calls from any thread are handed to the loop
and waited for, always with a bound; with `wait=False` or `return_future=True` they give a future.
"""
