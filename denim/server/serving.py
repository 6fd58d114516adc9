"""What the endpoints of one server share.

Owns nothing itself: it is where an endpoint finds the engine, the options, the gate and the metrics.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Request

from denim.engine.front import EngineFront
from denim.server.errors import ApiError
from denim.server.form_trial import FormTrial
from denim.server.limits import Gate
from denim.server.metrics import Metrics
from denim.server.options import ServerOptions


@dataclass(frozen=True)
class Serving:
    """`models`: the names by which clients may ask for the model, the first of which answers name.
    `created`: seconds since 1970."""

    engine: EngineFront
    options: ServerOptions
    gate: Gate
    metrics: Metrics
    models: tuple[str, ...]
    trial: FormTrial
    created: int = field(default_factory=lambda: int(time.time()))

    def model_named(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError (404) for a model that is not served here."""
        if name is None:
            return self.models[0]
        if name not in self.models:
            raise ApiError(
                404,
                f"The model {name!r} is not served here; there is {', '.join(map(repr, self.models))}.",
                param="model",
                code="model_not_found",
            )
        return name


def serving_of(request: Request) -> Serving:
    serving = request.app.state.serving
    assert isinstance(serving, Serving)
    return serving
