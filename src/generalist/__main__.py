"""`python -m generalist` is the command line."""

from generalist.cli import main

main()
