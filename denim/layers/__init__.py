"""The modules of which models are made."""
