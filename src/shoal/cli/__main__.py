"""`python -m shoal.cli` is `shoal`."""

from shoal.cli.app import main

main()
