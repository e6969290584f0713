"""`python -m tsukimi` is the console command `tsukimi`."""

from tsukimi.cli import main

main()
