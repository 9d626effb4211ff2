"""``python -m benchmarks`` is ``dtorch bench``."""
