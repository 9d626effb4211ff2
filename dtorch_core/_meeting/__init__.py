"""How the ranks of one opening find each other, and agree on what to open."""
