"""Measures a trained denim-tiny: bits per byte, recall, what the state carries, MTP acceptance, chat.

Owns the measurements. Answers are scored with the right tokens in front of them; an answer counts when the
model's best token is right at every place, which is when greedy decoding gives exactly that answer. Where
an answer may have two forms (a whole sentence, or the value alone), either counts.
"Slot zeroed" sets convolution windows and states of all linear layers to zero between context and question;
"KV zeroed" does so with the keys and values of all full-attention layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F

from training import tokenizer as bpe
from training.chats import KINDS, render
from training.data import load as load_data
from training.model import Model, Window
from training.probes import Case, Tail, recall_case, registers_case, tail_of, walk_case
from training.release import CONFIG, load
from training.tasks import Kit, chat

SEED = 7
RECALL_LENGTHS = (500, 1000, 2000, 3000)
ROWS = 25  # at one time
TEXT_LENGTH = 4096
RESET_EVERY = (32, 128, 512)
ABLATIONS = ("whole", "slot zeroed", "KV zeroed")
TASK_LENGTHS = (64, 256, 1024)
ROW_LENGTH = 1024

MakeCase = Callable[[Generator, int, Kit], Case]


class Score(NamedTuple):
    """Share of scored tokens (of the first form) that are the model's best, and of cases answered right."""

    tokens: float
    cases: float


def _linear(index: int) -> bool:
    return CONFIG["layer_types"][index] == "linear_attention"


def ablated(windows: list[Window], how: str) -> list[Window]:
    """The windows with one kind of memory set to zero."""
    drop_linear = {"whole": None, "slot zeroed": True, "KV zeroed": False}[how]
    return [
        Window(torch.zeros_like(w.first), torch.zeros_like(w.second)) if _linear(i) == drop_linear else w
        for i, w in enumerate(windows)
    ]


@torch.no_grad()
def scores(model: Model, cases: list[Case], device: str) -> dict[str, Score]:
    """The score with each kind of memory zeroed between context and tail. All cases have as many tails."""
    right = dict.fromkeys(ABLATIONS, 0)
    answered = dict.fromkeys(ABLATIONS, 0)
    total = 0
    for start in range(0, len(cases), ROWS):
        part = cases[start : start + ROWS]
        _, windows = model.hidden(torch.tensor([case.context for case in part], device=device))
        total += sum(sum(case.tails[0].scored) for case in part)
        for how in ABLATIONS:
            hits = [
                _hits(model, tails, ablated(windows, how), device)
                for tails in zip(*(c.tails for c in part), strict=True)
            ]
            right[how] += int(hits[0].tokens.sum())
            answered[how] += int(torch.stack([h.answered for h in hits]).any(0).sum())
    return {how: Score(right[how] / total, answered[how] / len(cases)) for how in ABLATIONS}


class Hits(NamedTuple):
    """[B]: how many scored tokens of each row are right, and whether all are."""

    tokens: Tensor
    answered: Tensor


def _hits(model: Model, tails: tuple[Tail, ...], windows: list[Window], device: str) -> Hits:
    longest = max(len(tail.ids) for tail in tails)
    ids = torch.tensor([tail.ids + [0] * (longest - len(tail.ids)) for tail in tails], device=device)
    scored = torch.tensor(
        [tail.scored + [False] * (longest - len(tail.ids)) for tail in tails], device=device
    )
    best = model.logits(model.hidden(ids, windows)[0]).argmax(-1)[:, :-1]
    hits = (best == ids[:, 1:]) & scored[:, 1:]
    return Hits(hits.sum(1), hits.sum(1) == scored[:, 1:].sum(1))


@torch.no_grad()
def text_nats(model: Model, ids: Tensor, reset_every: int, how: str) -> float:
    """Mean nats a token of ids [B, T] when one kind of memory is zeroed every so many tokens (0: never)."""
    size = reset_every or ids.shape[1]
    windows: list[Window] | None = None
    hidden = []
    for part in ids.split(size, 1):
        part_hidden, windows = model.hidden(part, ablated(windows, how) if windows else None)
        hidden.append(part_hidden)
    logits = model.logits(torch.cat(hidden, 1)[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


@torch.no_grad()
def bits_per_byte(model: Model, kit: Kit, rng: Generator, device: str, number: int) -> dict[str, float]:
    """On all held-out text in rows of up to 4,096 tokens: over everything, and by source."""
    nats, size, result = 0.0, 0, {}
    for name, stream in kit.data.held_out.items():
        part = 0.0
        for piece in torch.from_numpy(stream.astype(np.int64)).to(device).split(TEXT_LENGTH):
            if len(piece) > 1:
                logits = model.logits(model.hidden(piece[None, :-1])[0]).float()
                part += F.cross_entropy(logits[0], piece[1:], reduction="sum").item()
        result[name] = part / math.log(2) / kit.data.held_out_bytes[name]
        nats += part
        size += kit.data.held_out_bytes[name]
    return {"all": nats / math.log(2) / size, **result}


@torch.no_grad()
def mtp_acceptance(model: Model, ids: Tensor, counted: Tensor) -> float:
    """Share of places where the MTP head's best token is the trunk's, for the same place. ids: [B, T];
    counted: [B, T], the tokens that are predicted."""
    hidden, _ = model.hidden(ids)
    trunk = model.logits(hidden[:, 1:-1]).argmax(-1)  # of tokens 2 .. T - 1
    drafted = model.logits(model.drafts(hidden[:, :-2], ids[:, 1:-1])).argmax(-1)
    kept = counted[:, 2:]
    return ((trunk == drafted) & kept).sum().item() / kept.sum().item()


@torch.no_grad()
def chat_accuracy(model: Model, kit: Kit, rng: Generator, device: str, number: int) -> dict[str, float]:
    """Share of exactly right answers to single questions, by kind, without and with thinking."""
    result = {}
    for _, kind in KINDS:
        for thinking in (False, True):
            cases = []
            for _ in range(number):
                opening, learned, _ = render("", [kind(rng, kit.data.facts)], thinking)
                tail = tail_of(kit, [(opening.text, False), (learned.text, True)])
                cases.append(Case(tail.ids[:1], [Tail(tail.ids[1:], tail.scored[1:])]))
            key = kind.__name__.lstrip("_") + (", thinking" if thinking else "")
            result[key] = scores(model, cases, device)["whole"].cases
    return result


def recall(model: Model, kit: Kit, rng: Generator, device: str, number: int) -> dict:
    """Share of planted codes and names that are answered, by length of the context."""
    report = {}
    for length in RECALL_LENGTHS:
        cases = [recall_case(rng, length, kit) for _ in range(number)]
        report[length] = {how: score.cases for how, score in scores(model, cases, device).items()}
    return report


def registers(model: Model, kit: Kit, rng: Generator, device: str, number: int) -> dict:
    """Share of registers that are read right, by tokens of setting them; a guess is right in a tenth."""
    return _by_token(registers_case, model, kit, rng, device, number)


def walk(model: Model, kit: Kit, rng: Generator, device: str, number: int) -> dict:
    """Share of places that are right, by tokens of walking; a guess is right in an eighth."""
    return _by_token(walk_case, model, kit, rng, device, number)


def _by_token(make: MakeCase, model: Model, kit: Kit, rng: Generator, device: str, number: int) -> dict:
    report = {}
    for length in TASK_LENGTHS:
        cases = [make(rng, length, kit) for _ in range(number)]
        report[length] = {how: score.tokens for how, score in scores(model, cases, device).items()}
    return report


def states_share(model: Model, kit: Kit, rng: Generator, device: str, number: int) -> dict[str, float]:
    """Nats a held-out token, whole and with each kind of memory zeroed every so many tokens."""
    ids = _held_out_rows(kit, rng, device, number)
    report = {"whole": text_nats(model, ids, 0, "whole")}
    for how in ABLATIONS[1:]:
        for every in RESET_EVERY:
            report[f"{how} every {every}"] = text_nats(model, ids, every, how)
    return report


def acceptance(model: Model, kit: Kit, rng: Generator, device: str, number: int) -> dict[str, float]:
    """MTP acceptance on held-out text and on the answers of chats."""
    ids = _held_out_rows(kit, rng, device, number)
    chats = [chat(rng, ROW_LENGTH, kit) for _ in range(number)]
    answers = torch.tensor(np.stack([row.weights for row in chats]) > 0, device=device)
    chat_ids = torch.tensor(np.stack([row.ids for row in chats]).astype(np.int64), device=device)
    return {
        "text": mtp_acceptance(model, ids, torch.ones_like(ids, dtype=torch.bool)),
        "chat answers": mtp_acceptance(model, chat_ids, answers),
    }


def _held_out_rows(kit: Kit, rng: Generator, device: str, number: int) -> Tensor:
    rows = [kit.text(rng, ROW_LENGTH, "held_out") for _ in range(number)]
    return torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)


PARTS = {
    "recall": recall,
    "registers": registers,
    "walk": walk,
    "nats a token": states_share,
    "MTP acceptance": acceptance,
    "chat": chat_accuracy,
    "bits per byte": bits_per_byte,
}


def main(
    data: Annotated[Path, typer.Argument(help="the data folder that training.data wrote")],
    folder: Annotated[Path, typer.Argument(help="the model folder")],
    out: Annotated[Path, typer.Argument(help="the JSON file to write")],
    number: Annotated[int, typer.Option(help="cases of each kind")] = 100,
    part: Annotated[list[str], typer.Option(help=f"what to measure: {', '.join(PARTS)}")] = list(PARTS),  # noqa: B006
    device: str = "cpu",
    dtype: str = "float32",
) -> None:
    kit = Kit.of(bpe.load(folder), load_data(data))
    model = load(folder, getattr(torch, dtype)).to(device).eval()
    report = json.loads(out.read_text()) if out.exists() else {}
    for name in part:
        report[name] = PARTS[name](model, kit, np.random.default_rng(SEED), device, number)
        out.write_text(json.dumps(report, indent=2) + "\n")
        print(json.dumps({name: report[name]}, indent=2), flush=True)


if __name__ == "__main__":
    typer.run(main)
