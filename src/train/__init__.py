"""Training code. Read build.py first, because it builds a training run in order."""
