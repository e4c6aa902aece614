"""Learners, the global learner, the engines that step them, the loop, and checkpoints."""
