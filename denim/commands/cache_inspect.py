"""`denim cache inspect`: the prefix tree as it stands, of a running server, a dump, or a directory of files.

Owns where a snapshot is read and the drawing. Its form is `denim.cache.snapshot`'s; must not import torch.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from denim.cache.snapshot import FORM, children_by_node
from denim.cache.stored_snapshot import stored_snapshot
from denim.errors import ConfigError
from denim.ledger.units import plural, size_text

TIMEOUT = 10.0  # seconds for a server to answer: between two steps of its engine
ROUTE = "/prefix_cache"
LINE = 10_000  # columns: lines are never cut, a terminal folds them itself
WANTED = "the URL of `denim serve`, a disk_cache, or a file with llm.cache_snapshot() as JSON"


def show_cache(where: str, api_key: str | None, most: int, as_json: bool) -> None:
    """Print the snapshot at `where`, with at most `most` nodes. Raises ConfigError when there is none, and
    when `most` is below 0."""
    if most < 0:
        raise ConfigError(f"--most is {most}; it must be 0 or more")
    found = read_snapshot(where, api_key)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    try:
        tree = drawn(found, most)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} is no whole snapshot of a prefix cache ({error!r}); give {WANTED}"
        ) from None
    Console(highlight=False, width=LINE).print(tree, soft_wrap=True)


def read_snapshot(where: str, api_key: str | None = None) -> dict[str, Any]:
    """Of a server by its URL, of the directory of a disk tier, or of a JSON file: what
    `json.dump(llm.cache_snapshot(), file)` wrote. Raises ConfigError."""
    if where.startswith(("http://", "https://")):
        text = _ask(where.rstrip("/") + ROUTE, api_key)
    elif Path(where).is_dir():
        return stored_snapshot(Path(where))
    else:
        try:
            text = Path(where).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{where!r} is no URL, no directory and no file that can be read ({error}); give {WANTED}"
            ) from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}; give {WANTED}") from None
    if found is None:
        raise ConfigError(
            f"{where} has no prefix cache: its checkpoint_policy is none; serve with another one"
        )
    if not isinstance(found, dict) or "form" not in found or "nodes" not in found:
        raise ConfigError(f"{where} is JSON, but no snapshot of a prefix cache; give {WANTED}")
    if found["form"] != FORM:
        raise ConfigError(
            f"{where} is a snapshot in form {found['form']!r}, and this is a Denim that reads form {FORM}; "
            "take it again with the same version"
        )
    return found


def _ask(url: str, api_key: str | None) -> str:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        hint = "--api-key" if error.code in (401, 403) else WANTED
        raise ConfigError(f"{url} answered {error.code} {error.reason}; give {hint}") from None
    except (OSError, ValueError) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(f"{url} cannot be asked: {why}; is `denim serve` running there?") from None


def drawn(found: dict[str, Any], most: int) -> Tree:
    """A path that does not branch is one block of lines, what branches off is indented below it. Of `most`
    nodes the busiest branches come first."""
    nodes: list[dict[str, Any]] = found["nodes"]
    below = children_by_node(nodes)
    tree = Tree(heading(found))
    spaces = {
        number: tree.add(f"[bold]{_space_text(space)}[/]") if len(found["namespaces"]) > 1 else tree
        for number, space in enumerate(found["namespaces"])
    }
    waiting = [(number, spaces[nodes[number]["namespace"]]) for number in reversed(below.get(None, []))]
    shown = 0
    while waiting and shown < most:
        number, above = waiting.pop()
        path, children = [number], below.get(number, [])
        # Turn after turn of a conversation would move to the right for ever.
        while len(children) == 1 and shown + len(path) < most:
            path += children
            children = below.get(path[-1], [])
        block = above.add("\n".join(node_text(nodes[one]) for one in path))
        shown += len(path)
        waiting += [(child, block) for child in reversed(children)]
    left_out = found["left_out"] + len(nodes) - shown
    if left_out:
        tree.add(f"[dim]and {left_out:,} {plural('node', left_out)} more[/]")
    return tree


def heading(found: dict[str, Any]) -> str:
    account = found["account"]
    kept = sum(node["bytes"] for node in found["nodes"])
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(found["by_kind"].items(), key=lambda kv: -kv[1]))
    checkpoints = sum(found["by_kind"].values())
    parts = [
        f"[bold]prefix cache[/] ({found['policy']}): {checkpoints:,} {plural('checkpoint', checkpoints)}"
        + (f" ({kinds})" if kinds else ""),
        f"{size_text(kept)} with their pages",
    ]
    if account.get("query_tokens"):
        asked, hit = account["query_tokens"], account["hit_tokens"]
        flops = account["hit_flops"] / account["query_flops"]
        parts.append(f"reused {hit:,} of {asked:,} prompt tokens ({hit / asked:.0%}, {flops:.0%} of FLOPs)")
        lost = ", ".join(
            f"{tokens:,} {reason.replace('_', ' ')}" for reason, tokens in account["lost"].items() if tokens
        )
        parts += [f"lost {lost}"] if lost else []
    for name, tier in found.get("tiers", {}).items():
        used, total = size_text(tier["used_bytes"]), size_text(tier["total_bytes"])
        n = tier["checkpoints"]
        parts.append(f"{name}: {n:,} {plural('checkpoint', n)} in {used} of {total}")
    parts += [f"[red]passed over: {escape(name)}[/]" for name in found.get("passed", ())]
    return "; ".join(parts)


def node_text(node: dict[str, Any]) -> str:
    """A node in one line: tokens, checkpoint, hits, bytes, who runs."""
    checkpoint = node["checkpoint"]
    parts = [f"{node['start']:,} → {node['end']:,}"]
    if checkpoint is not None:
        hits = checkpoint["hits"]
        used = f", {hits:,} {plural('hit', hits)}" if hits else ""
        parts.append(f"[green]●[/] {checkpoint['kind']}{used}")
    elif node["lost"]:
        parts.append(f"[yellow]○[/] {node['lost'].replace('_', ' ')}")
    if node["bytes"]:
        parts.append(f"[dim]{size_text(node['bytes'])}[/]")
    if not node["below"]:
        parts.append("[dim]token ids only[/]")
    if node["running"]:
        parts.append(f"[cyan]{node['running']:,} running[/]")
    return "  ".join(parts)


def _space_text(space: dict[str, Any]) -> str:
    parts = ["with a salt"] if space["salted"] else []
    parts += [f"adapter {space['adapter']}"] if space["adapter"] is not None else []
    return "requests " + (", ".join(parts) or "without a salt")
