"""Any corpus to vectors on disk, however large."""
