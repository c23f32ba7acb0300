"""One peer's part in a run.

`view` holds what is known of the others, `decide` decides, without network and clock; the files of this room act.
"""
