"""A state: served to newcomers and fetched from donors (`wire`), saved in a folder and read from there (`disk`).

Both know a state as tensors and plain values, and compare it by one hash (`digest`).
"""
