"""The whole weights of a sharded model, and what a program may do with them."""
