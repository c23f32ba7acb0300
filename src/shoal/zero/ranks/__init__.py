"""How ranks talk to each other, and how they learn that one is gone."""
