"""The parts that the training examples share: a small transformer, and the loop that trains it."""
