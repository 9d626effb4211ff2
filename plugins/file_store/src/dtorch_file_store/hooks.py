"""What this distribution offers. Imports no torch."""
