"""How processes of one machine share CUDA tensors and order their streams. Imports neither torch nor the driver."""
