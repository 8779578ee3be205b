"""Long context: facts planted at a depth of a generated text, and whether the quantized model still finds them.

Two tasks. "needle": one sentence with a number among sentences about other things, asked for at the end (Kamradt 2023, "needle in a
haystack"). "pairs": a list of names and numbers of which one is asked for (Liu et al. 2023, "Lost in the Middle",
section 3). The answer is read teacher-forced: it is found if every one of its tokens is the most likely one, and the KL
of its tokens says how far the quantized model is from the original even where neither finds it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedModel

from autoq.errors import UserError
from autoq.measure.divergence import compare_logits
from autoq.model.head import Head, hidden_states
from autoq.model.quantized import Assignment, quantized
from autoq.model.text import own_bos
from autoq.model.unit import ModelUnits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["needle", "pairs"]
KINDS: tuple[Kind, ...] = ("needle", "pairs")
LEAST = 64  # tokens of a prompt
_NAMES = ("Avery", "Basil", "Clara", "Dorian", "Edith", "Felix", "Greta", "Hugo", "Iris", "Jonas", "Klara", "Leon", "Marta", "Nora",
          "Oscar", "Petra", "Quentin", "Rosa", "Simon", "Tilda", "Ulric", "Vera", "Walter", "Xenia", "Yann", "Zelda")  # fmt: skip
_THINGS = ("house", "garden", "boat", "library", "workshop", "orchard", "mill", "station", "bakery", "museum", "bridge", "theatre")
_VERBS = ("painted", "visited", "sold", "measured", "described", "opened", "repaired", "left", "found", "admired")
_TIMES = (
    "in spring",
    "last winter",
    "on a Monday",
    "after the rain",
    "before noon",
    "without a word",
    "with two friends",
    "for years",
)


@dataclass(frozen=True)
class Prompt:
    """A text with its question and answer.

    Attributes:
        depth: where the fact stands, 0 at the start and 1 at the end. ids: int64 [tokens], the answer last.
        answer: number of tokens of the answer.
    """

    kind: Kind
    length: int
    depth: float
    ids: torch.Tensor
    answer: int


@dataclass(frozen=True)
class RetrievalRow:
    """What was found at one length and depth.

    Attributes:
        prompts: how many. found, found_original: share of the prompts whose whole answer is the most likely. kl: nats per answer token.
    """

    kind: Kind
    length: int
    depth: float
    prompts: int
    found_original: float
    found: float
    kl: float


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], depths: Sequence[float], each: int, seed: int = 0
) -> list[Prompt]:
    """Return `each` prompts of every kind, length (tokens, answer included) and depth; the same seed gives the same texts.

    Raises UserError for a length below LEAST, or a depth outside 0 to 1.
    """
    for length in lengths:
        if length < LEAST:
            raise UserError(f"a prompt of {length} tokens holds no text to search: give {LEAST} or more")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise UserError(f"a depth of {100 * depth:g} % is outside the text: give 0 to 100")
    makers: dict[Kind, Callable[[random.Random], tuple[str, str, str, str, Callable[[random.Random], str]]]] = {
        "needle": _needle, "pairs": _pairs,
    }  # fmt: skip
    found = []
    for kind in KINDS:
        for length in lengths:
            for depth in depths:
                for i in range(each):
                    draw = random.Random(f"{seed}/{kind}/{length}/{depth}/{i}")
                    ids, answer = _write(tokenizer, draw, makers[kind](draw), length, depth)
                    found.append(Prompt(kind, length, depth, ids, answer))
    return found


def _needle(draw: random.Random) -> tuple[str, str, str, str, Callable[[random.Random], str]]:
    """Return (introduction, fact, question, answer, what else is written)."""
    name, thing, number = draw.choice(_NAMES), draw.choice(_THINGS), draw.randrange(10_000, 100_000)

    def other(draw: random.Random) -> str:
        return f"{draw.choice(_NAMES)} {draw.choice(_VERBS)} the {draw.choice(_THINGS)} {draw.choice(_TIMES)}. "

    return (
        "",
        f"The secret number of {name}'s {thing} is {number}. ",
        f"The secret number of {name}'s {thing} is",
        f" {number}",
        other,
    )


def _pairs(draw: random.Random) -> tuple[str, str, str, str, Callable[[random.Random], str]]:
    used: set[str] = set()

    def key(draw: random.Random) -> str:
        while True:
            found = f"{draw.choice(_NAMES)} {draw.choice(_THINGS)} {draw.randrange(100_000)}"
            if found not in used:
                used.add(found)
                return found

    asked, number = key(draw), draw.randrange(10_000, 100_000)

    def other(draw: random.Random) -> str:
        return f"{key(draw)}: {draw.randrange(10_000, 100_000)}\n"

    return "Numbers by name.\n", f"{asked}: {number}\n", f"{asked}:", f" {number}", other


def _write(
    tokenizer: PreTrainedTokenizerBase, draw: random.Random, task: tuple[str, str, str, str, Callable[[random.Random], str]],
    length: int, depth: float,
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """Fill up with other sentences, cut to the length in whole sentences; return (ids, tokens of the answer)."""
    introduction, fact, question, answer, other = task
    bos = own_bos(tokenizer)

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    ending, told = tokens("\n" + question), tokens(answer)
    room = length - (bos is not None) - len(ending) - len(told) - len(tokens(introduction)) - len(tokens(fact))
    fillers: list[list[int]] = []
    while True:
        sentence = tokens(other(draw))
        if len(sentence) > room:
            break
        room -= len(sentence)
        fillers.append(sentence)
    at = round(depth * len(fillers))
    body = [*tokens(introduction), *chain(*fillers[:at]), *tokens(fact), *chain(*fillers[at:])]
    return torch.tensor([*([] if bos is None else [bos]), *body, *ending, *told], dtype=torch.int64), len(told)


def retrieve(
    model: PreTrainedModel,
    units: ModelUnits,
    assignment: Assignment,
    prompts: Sequence[Prompt],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[RetrievalRow]:
    """Read every prompt with the original and with the assignment; one row a kind, length and depth, in their order.

    The model is as before afterwards.
    """
    head = Head(model)
    total = 2 * len(prompts)

    def logits(prompt: Prompt) -> torch.Tensor:
        hidden = hidden_states(model, prompt.ids.unsqueeze(0).to(model.device))[0, -prompt.answer - 1 : -1]
        return head(hidden).float().cpu()

    originals: list[torch.Tensor] = []
    rows: dict[tuple[Kind, int, float], list[tuple[bool, bool, float]]] = {}
    with torch.no_grad():
        for i, prompt in enumerate(prompts):
            originals.append(logits(prompt))
            progress(i + 1, total)
        with quantized(model, units, assignment):
            for i, (prompt, original) in enumerate(zip(prompts, originals, strict=True)):
                changed, answer = logits(prompt), prompt.ids[-prompt.answer :]
                kl, *_ = compare_logits(original, changed, answer)
                was, is_ = (bool((found.argmax(-1) == answer).all()) for found in (original, changed))
                rows.setdefault((prompt.kind, prompt.length, prompt.depth), []).append((was, is_, float(kl.mean())))
                progress(len(prompts) + i + 1, total)
    found = []
    for (kind, length, depth), cells in rows.items():
        was, is_, kls = (sum(column) / len(cells) for column in zip(*cells, strict=True))
        found.append(RetrievalRow(kind, length, depth, len(cells), was, is_, kls))
    return found
