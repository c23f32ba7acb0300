"""Ways to reach a peer. `base` says what a transport is; nothing above this package knows which one it is."""
