"""What a model is made of, read from its config. Pure Python: never imports torch or transformers."""

from denim.spec.config_file import embedded_model
from denim.spec.generation import GenerationDefaults, read_generation_defaults
from denim.spec.model import ModelSpec
from denim.spec.reader import read_spec

__all__ = ["GenerationDefaults", "ModelSpec", "embedded_model", "read_generation_defaults", "read_spec"]
