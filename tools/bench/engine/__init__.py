"""A small engine, whose copies `check_edits.py` edits."""
