"""How a peer gets and gives the state of a run: named, downloaded, followed step by step."""
