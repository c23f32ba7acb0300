"""One round of averaging in a group that is already formed: the butterfly all-reduce, and when it counts.

Read in this order: `partition` (tensors to parts), `load_balancing` (how much each member reduces), `commit` (when a
round succeeds), `reducer` (the senders that an owner waits for), `vector` (the numbers), `round` (all of it on the
network).
"""
