"""What a ThreadGroup does with a c10d process group, its own or torch's."""
