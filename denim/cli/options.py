"""Options that several commands have.

Owns their names and texts; defaults are each command's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Typer's frames cut an option's name off where a terminal has 80 columns.
PLAIN_HELP = None

# readable=False: what may not be read is told in Denim's own one line, not in the parser's frame.
ModelFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL", readable=False, help="A model folder; without it the embedded denim-tiny."
    ),
]
ConfigOrModel = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG_OR_MODEL",
        readable=False,
        help="A config.json, a model folder, or a name such as Qwen3.5-0.8B; default: denim-tiny.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
Model = Annotated[
    Path | None,
    typer.Option("--model", "-m", readable=False, help="A model folder; default: denim-tiny."),
]
Dtype = Annotated[str, typer.Option(help="Of weights and activations; auto: the config's.")]
StateDtype = Annotated[str, typer.Option(help="Of recurrent states; auto: the config's, or float32.")]
KvDtype = Annotated[str, typer.Option(help="Of KV; auto: that of the weights.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
Memory = Annotated[
    str | None, typer.Option(help="For states and KV: 8GiB, 512MiB, or a fraction of the device: 0.5.")
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.")]
Temperature = Annotated[
    float | None, typer.Option(help="0: always the likeliest token. Default: the model's.")
]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens; 0: all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same answer.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No start-up line; warnings only.")]
Out = Annotated[Path, typer.Option(help="The folder that the PNG and the JSON go to.")]
