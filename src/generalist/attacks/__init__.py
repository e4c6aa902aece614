"""Threat models, and the attacks that look for misclassified images inside them."""
