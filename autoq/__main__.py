"""`python -m autoq`."""

from autoq.cli import main

main()
