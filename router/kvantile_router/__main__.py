"""`python -m kvantile_router` is `kvantile-router`."""

from kvantile_router.cli import main

if __name__ == "__main__":
    main()
