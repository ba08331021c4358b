"""Training code. Read run.py first, because it shows a training run from top to bottom."""
