"""What a rank that is a thread has of its own, where a process has one of it: ``torch.distributed``, random numbers,
the environment, signals.
"""
