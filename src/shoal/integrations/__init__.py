"""shoal within other libraries: training loops, and what shows metrics. Each module names the libraries it needs."""
