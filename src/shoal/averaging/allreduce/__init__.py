"""One round of averaging in a group that is already formed: the butterfly all-reduce, and when it counts.

Read in this order: `partition` (tensors to tiles), `load_balancing` (how much each member reduces), `commit` (which
averages a round may succeed with), `lateness` (who is slow), `coordinator` (who is left out, or replaced), `member`
(what a member holds, owes and asks), `vector` and `segments` (the numbers), `round_tiles` (the work on them), `streams`
and `round` (all of it on the network).
"""
