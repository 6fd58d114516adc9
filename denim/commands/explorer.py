"""`denim plan --web`: the capacity plan as a page in the browser, served to this machine alone.

Owns how the command's options become the settings of a link, and the server's socket. Must not import torch.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import urlencode

from denim.commands.configs import find_config
from denim.commands.ledger import parse_lengths
from denim.commands.plan import refuse_two_kinds
from denim.errors import ConfigError
from denim.ledger.devices import find_device
from denim.ledger.lengths import Lengths

HOST = "127.0.0.1"
PACKAGES = ("fastapi", "uvicorn")


def show_explorer(
    model: Path | None,
    port: int,
    options: Mapping[str, str | int | None],
    trace: Path | None,
    beside: Sequence[str],
) -> None:
    """Serve the explorer until Ctrl-C, after a line with its link.

    `model`: a config or model folder, offered beside the published ones, or one of these; it is chosen.
    `options`: what the command was given, by the names of `denim.web.settings`, and `lognormal`. `beside`:
    options that only the printed plan has. Raises ConfigError for these, for missing packages, for settings
    that cannot be, and for a port in use.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--web needs {' and '.join(missing)}: pip install 'denim-llm[serve]'")
    if beside:
        raise ConfigError(
            f"{' and '.join(beside)} cannot be shown on the page; leave it out, or leave out --web"
        )
    import uvicorn

    from denim.web.explored import Offer, explored
    from denim.web.explorer import create_explorer
    from denim.web.settings import read_settings

    config = None if model is None else find_config(model)
    own = {} if config is None or config.published else {config.name: config.place}
    query = link_query(None if config is None else config.name, options, trace is not None)
    offer = Offer(own, None if trace is None else Lengths.trace(trace))
    explored(read_settings(query), offer)  # what cannot be shown is refused here, not on the page
    with closing(_listen(port)) as listening:
        link = f"http://{HOST}:{listening.getsockname()[1]}/" + (f"?{urlencode(query)}" if query else "")
        print(f"denim explorer: {link}\nCtrl-C ends it", flush=True)
        server = uvicorn.Server(uvicorn.Config(create_explorer(offer), log_level="warning"))
        server.run(sockets=[listening])


def link_query(model: str | None, options: Mapping[str, str | int | None], traced: bool) -> dict[str, str]:
    """The query of the first link: what differs from the page's own start.

    Raises ConfigError where two kinds of lengths are asked for, or several lengths.
    """
    from denim.web.settings import Settings

    given = {name: value for name, value in options.items() if value is not None}
    kinds = {f"--{name}": given.get(name) for name in ("lengths", "lognormal")}
    refuse_two_kinds(kinds | {"--trace": "given" if traced else None})
    values: dict[str, str | int] = {} if model is None else {"model": model}
    values |= {name: value for name, value in given.items() if name not in ("lengths", "lognormal")}
    values["device"] = find_device(str(given["device"])).name
    if "lengths" in given:
        lengths = parse_lengths(str(given["lengths"]))
        if len(lengths) > 1:
            raise ConfigError(
                f"--lengths is {given['lengths']!r}; the page shows one length at a time, give one"
            )
        values["tokens"] = lengths[0]
    if "lognormal" in given:
        mean, _, sigma = str(given["lognormal"]).partition(",")
        values |= {"lengths": "lognormal", "tokens": mean.strip(), "sigma": sigma.strip()}
    if traced:
        values["lengths"] = "trace"
    fields = Settings.model_fields
    return {name: str(value) for name, value in values.items() if str(value) != str(fields[name].default)}


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()  # before the link is shown, so that it can be followed at once
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(f"--port {port} cannot be used: {str(error).rstrip('.')}; give another") from error
    return listening
