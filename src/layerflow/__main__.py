"""`python -m layerflow` is the command line."""

from layerflow.cli import main

main()
