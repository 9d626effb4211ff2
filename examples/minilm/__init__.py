"""The parts of the MiniLM example: its sentences, its weights, the model, and the ranks that run it."""
