"""Engines behind HTTP: the OpenAI API, Anthropic's messages, and what an operator needs."""
