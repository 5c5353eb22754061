"""The same plans for torch_xla, on the device that it has. Loads neither torch nor jax by itself.

torch_xla is legacy upstream: 2.9.0 is its last release. It traces on each call, so nothing here can
take tracing away; what is taken away is compiling, for every variant is in its cache before the
first request, and what is not is refused.
"""
