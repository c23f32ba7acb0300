"""What each stage costs, and which one fits."""
