"""A consumer as a limit of the search: the formats it computes itself, and how it mixes cache formats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autoq.budget import Budgets
from autoq.cost.engines import ENGINES, Engine, engine_of, loads, stored
from autoq.exporters.consumer import Consumer
from autoq.exporters.consumers import consumer_of
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import Format
from autoq.recipe import BudgetEntry


def computed(consumer: Consumer, formats: Iterable[Format]) -> tuple[Format, ...]:
    """Return what becomes of candidate formats: each in the rounding that the consumer computes, or left out where it has none.

    A consumer that has none of the candidates gives all formats of its own.
    """
    if consumer.weights is None:
        return tuple(formats)
    wanted = [stored(fmt) for fmt in formats]
    own = tuple(fmt for fmt in consumer.formats() if stored(fmt) in wanted)
    return own or consumer.formats()


def serving(consumer: Consumer, engine: Engine) -> Engine:
    """Return an engine with the consumer's limits on caches, within those of `engine` if that is one."""
    own = ENGINES.get(consumer.name)
    if own is None:
        caches = None if consumer.caches is None else frozenset(consumer.caches)
        own = Engine(consumer.name, caches, consumer.mixing)
    if engine.name == "none":
        return replace(own, weights=None, option="--consumer")
    both = [e.kv_formats for e in (own, engine) if e.kv_formats is not None]
    mixing = engine.mixing if engine.mixing != "free" else own.mixing
    weights = None
    if engine.weights is not None:
        weights = frozenset(n for n, f in WEIGHT_FORMATS.items() if loads(engine, f, WEIGHT_FORMATS))
    return replace(engine, kv_formats=frozenset.intersection(*both) if both else None, mixing=mixing, weights=weights)


def priced_tokens(budget: BudgetEntry) -> int:
    """Return the tokens that a recipe's cache is priced at: its context, in whole pages of the engine that it was searched for."""
    engine = engine_of(budget.engine)
    if budget.consumer != "none":
        engine = serving(consumer_of(budget.consumer), engine)
    return Budgets(context=budget.context, page=engine.page).tokens
