"""Flat parameter storage and module modes: the tools by which other packages are fast and leave no trace."""
