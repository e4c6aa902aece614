"""Searches over recipes: many runs, one question. Workers share a database; every trial is an ordinary run."""
