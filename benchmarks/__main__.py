"""``python -m benchmarks`` is ``dtorch bench``."""

from __future__ import annotations

import sys

from dtorch_core.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", *sys.argv[1:]]))
