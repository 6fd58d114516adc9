"""The web application over one engine.

Owns which endpoints there are and in which layers they lie. Knows no API's fields.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI
from fastapi_offline import FastAPIOffline
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import denim
from denim.engine.front import EngineFront
from denim.server import chat, completions, dashboard, messages, models, operations, responses, tokens
from denim.server.access import AccessLayer
from denim.server.errors import install_error_handlers
from denim.server.form_trial import FormTrial
from denim.server.keys import check_key
from denim.server.limits import Gate
from denim.server.metrics import Metrics
from denim.server.options import ServerOptions
from denim.server.serving import Serving
from denim.web.pages import assets

DESCRIPTION = "An inference engine for hybrid linear-attention language models, behind the OpenAI API."
API = (chat, completions, responses, messages, models, tokens)


def create_app(engine: EngineFront, options: ServerOptions | None = None) -> FastAPI:
    """An app that serves `engine`, which stays the caller's to close."""
    options = options or ServerOptions()
    metrics = Metrics(engine.facts)
    layers = [Middleware(AccessLayer, metrics=metrics, log_requests=options.log_requests)]
    if options.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    app = FastAPIOffline(  # /docs loads its scripts from here, as every page of Denim's
        redoc_url=None,
        title="Denim",
        version=denim.__version__,
        description=DESCRIPTION,
        middleware=layers,
        favicon_url="/assets/icon.svg",
    )
    names = options.served_model_name or (engine.facts.model,)
    facts = engine.facts
    trial = FormTrial(engine.tokenizer, facts.vocab_size, facts.end_token_ids)
    app.state.serving = Serving(engine, options, Gate(options), metrics, names, trial)
    install_error_handlers(app)
    guarded = APIRouter(dependencies=[Depends(check_key)])
    for part in (*API, operations, dashboard):
        guarded.include_router(part.router)
    app.include_router(guarded)
    for part in (operations, dashboard):
        app.include_router(part.open_router)
    app.mount("/assets", assets())
    return app
