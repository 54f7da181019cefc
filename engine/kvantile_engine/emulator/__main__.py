"""`python -m kvantile_engine.emulator`."""

from kvantile_engine.emulator.cli import main

main()
