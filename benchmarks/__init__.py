"""Measures collectives and exchanges beside what a user would pick instead, and beside what the machine allows.

``python -m benchmarks --help`` says how to run it.
"""
