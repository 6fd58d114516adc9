"""The rules of the linear layers, token by token and in chunks."""
