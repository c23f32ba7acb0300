"""One round of averaging in a group that is already formed: the butterfly all-reduce, and when it counts.

Read in this order: `shoal.layout` (tensors to tiles, and how much each member reduces), `schema` (what all members have
in common), `commit` (which averages a round may succeed with), `lateness` (who is slow), `coordinator` (who is left
out, or replaced), `member` (what a member holds, owes and asks), `vector` and `segments` (the numbers), `round_tiles`
(the work on them), `streams` and `round` (all of it on the network).
"""
