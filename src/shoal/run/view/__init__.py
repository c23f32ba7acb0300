"""What a peer knows of the others of its run, without network and clock."""
