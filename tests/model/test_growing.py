"""Memory taken ahead: what is appended, forgotten at either end and reordered is what a list of slots would hold."""

from __future__ import annotations

import random

import pytest
import torch

from autoq.model.growing import Growing, GrowingCodes


def fresh(kind: str, slots: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "values":
        return torch.randn(3, 2, slots, 5, generator=generator)
    return torch.randint(0, 1 << int(kind), (3, 2, slots, 3), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["values", "2", "4", "8"])
@pytest.mark.parametrize("reserve", [0, 1000])
def test_any_order_of_steps_holds_what_a_plain_tensor_does(kind: str, reserve: int) -> None:
    held = Growing(reserve) if kind == "values" else GrowingCodes(int(kind), reserve)
    plain = fresh(kind, 0, 0)
    draw = random.Random(1)
    for step in range(300):
        slots = draw.choice([1, 1, 1, 2, 7, 90])
        what = draw.choice(["append", "append", "append", "first", "last", "select"])
        if what == "append":
            new = fresh(kind, slots, step)
            held.append(new)
            plain = torch.cat([plain, new], dim=2)
        elif what == "first" and plain.shape[2] >= slots:
            held.drop_first(slots)
            plain = plain[:, :, slots:]
        elif what == "last" and plain.shape[2] >= slots:
            held.drop_last(slots)
            plain = plain[:, :, : plain.shape[2] - slots]
        elif what == "select" and held.memory is not None:
            order = torch.tensor(draw.choices(range(3), k=3))
            held.select(order)
            plain = plain[order]
        assert held.length == plain.shape[2]
        if held.memory is not None:
            assert torch.equal(held.used, plain)
        if isinstance(held, GrowingCodes) and held.memory is not None:
            assert held.nbytes == 6 * -(-plain.shape[2] * 3 * held.bits // 8)


def test_within_the_reserve_nothing_moves() -> None:
    for held, kind in ((Growing(500), "values"), (GrowingCodes(4, 500), "4")):
        held.append(fresh(kind, 100, 0))
        assert held.memory is not None
        where = held.memory.data_ptr()
        for i in range(400):
            held.append(fresh(kind, 1, i))
        assert held.memory.data_ptr() == where
        held.append(fresh(kind, 1, 9))
        assert held.length == 501


def test_a_window_that_moves_on_keeps_its_memory_small() -> None:
    held = Growing()
    held.append(fresh("values", 4000, 0))
    for i in range(300):
        held.drop_first(held.length - 20)
        held.append(fresh("values", 1, i))
        assert held.memory is not None
        assert held.memory.shape[2] < 400
