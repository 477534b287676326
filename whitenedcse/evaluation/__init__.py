"""Evaluating embeddings: tasks, geometry, transforms fitted to frozen vectors. A model is a function here."""
