"""What a program of tests/programs.py calls first, to divide a small corpus into several blocks."""

from whitenedcse.serving import fitting


def small_blocks():
    """Blocks of 13 rows for a fit."""
    fitting.BLOCK = 13
