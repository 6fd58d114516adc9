"""Trains denim-tiny against the clock.

Owns the stages (context length and mix of tasks), the optimisers and the schedule. Everything that changes
during a run depends on the share of the time that has passed, so that whatever the machine, the run ends
with the learning rate at zero. Writes the model folder and `loss.csv`.
"""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple, TextIO

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training import tokenizer as bpe
from training.data import load as load_data
from training.model import Model
from training.release import CONFIG, save
from training.tasks import TASKS, Kit, batch

SEED = 20
MUON_RATE = 5e-3  # with updates scaled to AdamW's size (Moonlight, arXiv 2502.16982)
ADAM_RATE = 3e-3  # embedding, convolutions, norms, gates
WEIGHT_DECAY = 0.05
WARM_UP = 0.02  # share of the time
FLAT_UNTIL = 0.45  # share of the time; from here on the rate falls to zero in a straight line
LARGEST_GRADIENT = 1.0  # norm
MTP_WEIGHT = 0.2
LOG_EVERY = 10
SAVE_EVERY_SECONDS = 100.0


class Stage(NamedTuple):
    """Until this share of the time: rows of `length` tokens, tasks in these shares of the rows."""

    until: float
    length: int
    shares: dict[str, float]


# Copying comes first and in short rows: without it, recall stays at chance far longer.
STAGES = (
    Stage(
        0.22,
        512,
        {
            "text": 0.30,
            "copying": 0.25,
            "lookup": 0.10,
            "recall": 0.15,
            "registers": 0.05,
            "walk": 0.05,
            "chat": 0.10,
        },
    ),
    Stage(
        0.45,
        1024,
        {
            "text": 0.40,
            "copying": 0.10,
            "lookup": 0.05,
            "recall": 0.15,
            "registers": 0.05,
            "walk": 0.05,
            "chat": 0.20,
        },
    ),
    Stage(
        1.0,
        4096,
        {
            "text": 0.42,
            "copying": 0.04,
            "lookup": 0.03,
            "recall": 0.17,
            "registers": 0.05,
            "walk": 0.04,
            "chat": 0.25,
        },
    ),
)
EXTRA_TOKENS = 2  # a row holds the inputs, the next token and the one after it (for the MTP head)


class Batches(IterableDataset):
    """Endless batches of one stage; each worker has its own seed."""

    def __init__(self, kit: Kit, stage: int, rows: int) -> None:
        self.kit, self.stage, self.rows = kit, stage, rows

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        worker = get_worker_info()
        rng = np.random.default_rng((SEED, self.stage, worker.id if worker else 0))
        stage = STAGES[self.stage]
        while True:
            made = batch(rng, stage.shares, self.rows, stage.length + EXTRA_TOKENS, self.kit)
            yield (
                torch.from_numpy(made.ids.astype(np.int32)),
                torch.from_numpy(made.weights),
                torch.from_numpy(made.tasks),
            )


def token_losses(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats for every token; hidden [B, T, H], head [V, H], labels [B, T]. Returns [B, T]."""
    logits = F.linear(hidden, head.to(hidden.dtype))
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )


def optimisers(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        inner = (
            p.dim() == 2
            and "embed" not in name
            and not name.endswith(("in_proj_a.weight", "in_proj_b.weight"))
        )
        (matrices if inner else others).append(p)
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, foreach=True),
    ]


def rate(progress: float) -> float:
    """The learning rate as a share of its peak, at this share of the time."""
    return max(0.0, min(1.0, progress / WARM_UP, (1.0 - progress) / (1.0 - FLAT_UNTIL)))


class Place(NamedTuple):
    """Where in the run a line of the curve stands; `rate` is the learning rate's share of its peak."""

    seconds: float
    step: int
    tokens: int
    length: int
    rate: float


class LossCurve:
    """Writes loss.csv: the place, the mean loss of each task's rows in the batch, and the MTP head's."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.writer = file, csv.writer(file)
        self.writer.writerow([*Place._fields, *TASKS, "mtp"])

    def add(self, place: Place, rows: Tensor, tasks: Tensor, drafts: Tensor) -> None:
        """rows: [B], each row's loss; tasks: [B], its task. A task that the batch lacks is left empty."""
        rows = rows.cpu()
        losses = [rows[tasks == i].mean().item() if (tasks == i).any() else None for i in range(len(TASKS))]
        shown = ["" if loss is None else f"{loss:.3f}" for loss in (*losses, drafts.item())]
        self.writer.writerow([f"{place.seconds:.1f}", *place[1:4], f"{place.rate:.3f}", *shown])
        if place.step % (10 * LOG_EVERY) == 0:
            self.file.flush()
            named = " ".join(f"{name} {x}" for name, x in zip((*TASKS, "mtp"), shown, strict=True) if x)
            print(f"{place.seconds:6.1f} s, {place.tokens / 1e6:.1f}M tokens: {named}", flush=True)


class Trainer:
    """The state of one run."""

    def __init__(self, kit: Kit, device: str, tokens_per_step: int, workers: int) -> None:
        self.kit, self.device, self.tokens, self.workers = kit, device, tokens_per_step, workers
        self.cuda = device.startswith("cuda")
        self.model = Model(CONFIG, torch.bfloat16 if self.cuda else torch.float32)
        self.model.initialise(SEED)
        self.model.to(device)
        self.losses = token_losses
        if self.cuda:
            torch.set_float32_matmul_precision("high")
            self.model.compile()
            self.losses = torch.compile(token_losses, dynamic=True)
        self.optimisers = optimisers(self.model)
        self.peaks = [group["lr"] for o in self.optimisers for group in o.param_groups]

    def batches(self, stage: int) -> Iterator:
        rows = max(1, self.tokens // STAGES[stage].length)
        loader = DataLoader(
            Batches(self.kit, stage, rows), batch_size=None, num_workers=self.workers, pin_memory=self.cuda,
            prefetch_factor=4 if self.workers else None,
        )  # fmt: skip
        return iter(loader)

    def step(self, item: tuple[Tensor, Tensor, Tensor], progress: float) -> tuple[Tensor, Tensor]:
        """One update. Returns each row's loss (weighted mean, nats) and the MTP loss."""
        ids, weights, _ = (x.to(self.device, non_blocking=True) for x in item)
        ids = ids.long()
        head = self.model.model.embed_tokens.weight
        hidden, _ = self.model.hidden(ids[:, :-2])
        next_weights, later_weights = weights[:, 1:-1], weights[:, 2:]
        weighted = self.losses(hidden, head, ids[:, 1:-1]) * next_weights
        loss = weighted.sum() / next_weights.sum()
        drafted = self.losses(self.model.drafts(hidden, ids[:, 1:-1]), head, ids[:, 2:])
        draft_loss = (drafted * later_weights).sum() / later_weights.sum()
        (loss + MTP_WEIGHT * draft_loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        groups = [group for o in self.optimisers for group in o.param_groups]
        for group, peak in zip(groups, self.peaks, strict=True):
            group["lr"] = peak * rate(progress)
        for o in self.optimisers:
            o.step()
            o.zero_grad(set_to_none=True)
        return (weighted.sum(1) / next_weights.sum(1).clamp_min(1.0)).detach(), draft_loss.detach()

    def run(self, seconds: float, steps: int, out: Path) -> None:
        """Trains for `seconds`, or `steps` if that is not 0; writes the model and the curve into `out`."""
        start = saved = time.monotonic()
        seen = number = 0
        with (out / "loss.csv").open("w", newline="") as file:
            curve = LossCurve(file)
            for index, stage in enumerate(STAGES):
                batches = self.batches(index)
                while True:
                    elapsed = time.monotonic() - start
                    progress = number / steps if steps else elapsed / seconds
                    if progress >= stage.until:
                        break
                    item = next(batches)
                    rows, drafts = self.step(item, progress)
                    seen += item[0].shape[0] * stage.length
                    if number % LOG_EVERY == 0:
                        curve.add(
                            Place(elapsed, number, seen, stage.length, rate(progress)), rows, item[2], drafts
                        )
                    number += 1
                    if time.monotonic() - saved > SAVE_EVERY_SECONDS:
                        saved = time.monotonic()
                        save(self.model, out)
        save(self.model, out)
        print(f"{number} steps, {seen / 1e6:.1f}M tokens in {time.monotonic() - start:.0f} s", flush=True)


def main(
    data: Annotated[Path, typer.Argument(help="the data folder that training.data wrote")],
    tokenizer: Annotated[Path, typer.Argument(help="the folder that holds the tokenizer")],
    out: Annotated[Path, typer.Argument(help="the model folder to write")],
    seconds: Annotated[float, typer.Option(help="how long to train")] = 480.0,
    steps: Annotated[int, typer.Option(help="train so many steps instead")] = 0,
    tokens: Annotated[int, typer.Option(help="tokens in a step")] = 131072,
    device: str = "cuda",
    workers: int = 14,
) -> None:
    kit = Kit.of(bpe.load(tokenizer), load_data(data))
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, out / name)
    Trainer(kit, device, tokens, workers).run(seconds, steps, out)


if __name__ == "__main__":
    typer.run(main)
