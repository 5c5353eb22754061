"""What is compiled: kernels, bank writes and a user's own functions."""
