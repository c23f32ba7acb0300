"""A state on disk: one kind of folder for the checkpoints of a run and of `shoal.zero`.

`folder` has the format, and finds any range of any tensor in it; `tensor_file` has one file of it; `old` reads the
folders of earlier versions. The names, the number and the age of checkpoints are their owners' matter (`run.disk`,
`zero.checkpoint`).
"""
