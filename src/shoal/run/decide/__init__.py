"""What a peer of a run decides, without network and clock."""
