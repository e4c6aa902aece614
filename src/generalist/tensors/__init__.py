"""Flat parameter storage and module modes: what the other rooms borrow to be fast and to leave no trace."""
