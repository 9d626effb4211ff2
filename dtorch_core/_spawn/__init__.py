"""Runs of ranks: started as threads or as processes, watched, and ended together."""
