"""Searches over recipes: many runs for one question. Workers share a database; every trial is an ordinary run."""
