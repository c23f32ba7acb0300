"""What a run tells its user: warnings, and the status."""
