"""Prefixes that later requests begin from: the tree, its tiers, what is saved and what goes first."""
