"""Programs written in PyTorch: through torchax as JAX, or with torch_xla on its own device.

Importing anything here loads no torch; what needs it checks the installed versions first.
"""
