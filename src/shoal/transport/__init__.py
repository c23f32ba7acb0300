"""Ways to reach a peer. `base` defines a transport; code above this package does not know which one it uses."""
