"""``dtorch bench``: measures collectives and exchanges beside what a user would pick instead, and beside the limits.

Imported by that command alone. It imports no plugin: what is measured is what the core selects.
"""
