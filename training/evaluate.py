"""Measures a trained denim-tiny: bits per byte, recall, what the state carries, MTP acceptance, chat.

Owns the measurements. Answers are scored with the right tokens in front of them; an answer counts when the
model's best token is right at every place, which is when greedy decoding gives exactly that answer.
"Slot zeroed" sets convolution windows and states of all linear layers to zero between context and question;
"KV zeroed" does so with the keys and values of all full-attention layers.
"""

from __future__ import annotations

import json
import math
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
from training.model import CONFIG, Model, Window, load
from training.tasks import REGISTER_NAMES, WALK_CELLS, Builder, Kit, chat, planted_facts, with_facts

SEED = 7
RECALL_LENGTHS = (500, 1000, 2000, 3000)
ROWS = 25  # at one time
TEXT_LENGTH = 4096
RESET_EVERY = (32, 128, 512)
ABLATIONS = ("whole", "slot zeroed", "KV zeroed")
TEXT_ROWS = 64
READS = 8  # of registers after the context; also steps of a walk


class Case(NamedTuple):
    """A context of a fixed length, what follows it, and which tokens of that are scored."""

    context: list[int]
    tail: list[int]
    scored: list[bool]


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
def accuracy(model: Model, cases: list[Case], how: str, device: str) -> tuple[float, float]:
    """Share of scored tokens that are the model's best, and share of cases with all of them right."""
    right = total = whole = 0
    for start in range(0, len(cases), ROWS):
        part = cases[start : start + ROWS]
        _, windows = model.hidden(torch.tensor([case.context for case in part], device=device))
        longest = max(len(case.tail) for case in part)
        tails = torch.tensor([case.tail + [0] * (longest - len(case.tail)) for case in part], device=device)
        scored = torch.tensor(
            [case.scored + [False] * (longest - len(case.scored)) for case in part], device=device
        )
        hidden, _ = model.hidden(tails, ablated(windows, how))
        best = model.logits(hidden).argmax(-1)[:, :-1]
        hits = (best == tails[:, 1:]) | ~scored[:, 1:]
        whole += int(hits.all(1).sum())
        total += int(scored[:, 1:].sum())
        right += int((hits & scored[:, 1:]).sum())
    return right / total, whole / len(cases)


def _tail(kit: Kit, parts: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    scored: list[bool] = []
    for text, counts in parts:
        new = kit.encode(text).tolist()
        ids += new
        scored += [counts] * len(new)
    return ids, scored


def recall_case(rng: Generator, length: int, kit: Kit) -> Case:
    """A chat whose question asks for the one code or name planted in `length` tokens of held-out text."""
    (fact,) = planted_facts(rng, 1)
    builder = Builder(kit)
    builder.add("<|im_start|>user\n", 0.0)
    room = length - builder.size - len(kit.encode(f"\n{fact.told}\n"))
    filler = np.concatenate([kit.text(rng, room, "held_out") for _ in range(2)])[:room]
    while len(filler) < room:
        filler = np.concatenate((filler, kit.text(rng, room, "held_out")))[:room]
    with_facts(builder, filler, [fact], [int(rng.integers(room))])
    opener = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    tail, scored = _tail(kit, [(f"\n\n{fact.question}{opener}", False), (f"{fact.sentence}<|im_end|>", True)])
    return Case(builder.row(length).ids.tolist(), tail, scored)


def registers_case(rng: Generator, length: int, kit: Kit) -> Case:
    """`length` tokens of registers being set; then each is read once. A guess is right one time in ten."""
    ids = kit.encode("Registers\n").tolist()
    values: dict[str, int] = {}
    while len(ids) < length:
        name = REGISTER_NAMES[rng.integers(len(REGISTER_NAMES))]
        line = kit.encode(f"{name}={rng.integers(10)}\n").tolist()
        if len(ids) + len(line) > length:
            ids = ids[:1] * (length - len(ids)) + ids  # the first token again, to fill up
            break
        ids += line
        values[name] = int(kit.tokenizer.decode([line[2]]))
    names = [list(values)[i] for i in rng.permutation(len(values))]
    parts = [part for n in names for part in ((f"{n}?", False), (f"{values[n]}", True), ("\n", False))]
    return Case(ids, *_tail(kit, parts))


def walk_case(rng: Generator, length: int, kit: Kit) -> Case:
    """A walk of `length` tokens, and eight more steps with the place asked after each."""
    ids = kit.encode("Walk\n").tolist()
    place = 0
    parts: list[tuple[str, bool]] = []
    while len(parts) < 4 * READS:
        step = 1 if rng.random() < 0.5 else -1
        place = min(WALK_CELLS - 1, max(0, place + step))
        line = "up\n" if step > 0 else "down\n"
        if len(ids) < length:
            ids += kit.encode(line).tolist()
        else:
            parts += [(line, False), ("at", False), (f" {place}", True), ("\n", False)]
    return Case(ids[:length], *_tail(kit, parts))


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
def bits_per_byte(model: Model, kit: Kit, device: str) -> dict[str, float]:
    """On held-out text of each source, in rows of up to 4,096 tokens, and over all of it."""
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
                cases.append(Case([1], *_tail(kit, [(opening.text, False), (learned.text, True)])))
            # The one-token context is the opener's first token, so that it is not seen twice.
            cases = [Case(case.tail[:1], case.tail[1:], case.scored[1:]) for case in cases]
            key = kind.__name__.lstrip("_") + (", thinking" if thinking else "")
            result[key] = accuracy(model, cases, "whole", device)[1]
    return result


def evaluate(model: Model, kit: Kit, device: str, number: int) -> dict:
    """All measurements; `number` cases of each kind."""
    rng = np.random.default_rng(SEED)
    report: dict = {"bits per byte": bits_per_byte(model, kit, device)}
    report["recall"] = {}
    for length in RECALL_LENGTHS:
        cases = [recall_case(rng, length, kit) for _ in range(number)]
        report["recall"][length] = {how: accuracy(model, cases, how, device)[1] for how in ABLATIONS}
    for name, make in (("registers", registers_case), ("walk", walk_case)):
        report[name] = {}
        for length in (64, 256, 1024):
            cases = [make(rng, length, kit) for _ in range(number)]
            report[name][length] = {how: accuracy(model, cases, how, device)[0] for how in ABLATIONS}
    rows = np.stack([kit.text(rng, 1024, "held_out") for _ in range(TEXT_ROWS)])
    ids = torch.from_numpy(rows.astype(np.int64)).to(device)
    report["nats a token"] = {"whole": text_nats(model, ids, 0, "whole")}
    for how in ABLATIONS[1:]:
        for every in RESET_EVERY:
            report["nats a token"][f"{how} every {every}"] = text_nats(model, ids, every, how)
    chats = [chat(rng, 1024, kit) for _ in range(ROWS)]
    answers = torch.tensor(np.stack([r.weights for r in chats]) > 0, device=device)
    chat_ids = torch.tensor(np.stack([r.ids for r in chats]).astype(np.int64), device=device)
    report["MTP acceptance"] = {
        "text": mtp_acceptance(model, ids, torch.ones_like(ids, dtype=torch.bool)),
        "chat answers": mtp_acceptance(model, chat_ids, answers),
    }
    report["chat"] = chat_accuracy(model, kit, rng, device, number)
    return report


def main(
    data: Annotated[Path, typer.Argument(help="the data folder that training.data wrote")],
    folder: Annotated[Path, typer.Argument(help="the model folder")],
    out: Annotated[Path, typer.Argument(help="the JSON file to write")],
    number: Annotated[int, typer.Option(help="cases of each kind")] = 200,
    device: str = "cpu",
    dtype: str = "float32",
) -> None:
    kit = Kit.of(bpe.load(folder), load_data(data))
    model = load(folder, getattr(torch, dtype)).to(device).eval()
    report = evaluate(model, kit, device, number)
    text = json.dumps(report, indent=2)
    out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    typer.run(main)
