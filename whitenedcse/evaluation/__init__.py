"""Judging embeddings: tasks, geometry, maps fitted on frozen vectors. A model arrives as a function."""
