"""`python -m paceline.cli`: the command, where the script is not on the path."""

from paceline.cli import main

main()
