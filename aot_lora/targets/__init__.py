"""cpu, cuda, tpu: identity and devices. `identity` imports no jax, `devices` does."""
