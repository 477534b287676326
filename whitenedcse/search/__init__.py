"""The texts of a corpus nearest to a query."""
