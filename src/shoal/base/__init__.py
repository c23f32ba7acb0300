"""What every room uses and what uses none of them: addresses, clocks, tasks, locks, checks of arguments."""
