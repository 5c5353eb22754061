"""Trace, fingerprint, signature and lock."""
