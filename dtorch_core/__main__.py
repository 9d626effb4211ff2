"""``python -m dtorch_core`` is the ``dtorch`` command."""

from dtorch_core.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
