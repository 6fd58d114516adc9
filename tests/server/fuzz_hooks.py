"""What schemathesis is told about the server: the name of its model, without which few calls get far."""

from __future__ import annotations

from typing import Any

import schemathesis

MODEL = "denim-tiny"


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = MODEL
    return body


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    if isinstance(path_parameters, dict) and path_parameters.get("model"):
        path_parameters["model"] = MODEL
    return path_parameters
