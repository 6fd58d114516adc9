"""The served families, and how their weights are read."""
