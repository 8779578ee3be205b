"""The profile: grows, resumes, extends, is told apart, and predicts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from autoq.errors import UserError
from autoq.formats.catalog import kv_format, weight_format
from autoq.measure import damage
from autoq.measure import profiling as profiles
from autoq.measure.damage import Candidates
from autoq.measure.estimate import Predictor, correction_factors, damage_table, disagreeing_cells
from autoq.measure.profile import FILE, Fingerprint, Profile, UniformKL
from autoq.measure.profiling import make_profile
from autoq.model.units import find_units

WEIGHTS = tuple(weight_format(n) for n in ("nvfp4", "int4_g32_asym", "mxfp4"))
KV = (kv_format("nvfp4"), kv_format("int4_channel"))
CANDIDATES = Candidates(WEIGHTS, KV, KV)


def text() -> torch.Tensor:
    return torch.randint(0, 128, (6, 40), generator=torch.Generator().manual_seed(3))


def fingerprint(**changes: Any) -> Fingerprint:
    return Fingerprint(
        **{"model": "m", "text": "t", "seed": 0, "sequences": 6, "tokens": 40, "dtype": "float32", "include": (), **changes}
    )


def make(
    model: PreTrainedModel,
    run: Path,
    candidates: Candidates = CANDIDATES,
    said: list[str] | None = None,
    source: Fingerprint | None = None,
) -> Profile:
    say = (said if said is not None else []).append
    return make_profile(model, find_units(model), candidates, text(), source or fingerprint(), run, batch=2, say=say)


def same_statistics(one: Profile, other: Profile) -> None:
    assert one.statistics.keys() == other.statistics.keys()
    for unit, found in one.statistics.items():
        expected = other.statistics[unit]
        assert found.by_channel is not None
        assert found.tokens == expected.tokens
        assert found.rotated == pytest.approx(expected.rotated)
        torch.testing.assert_close(found.by_channel, expected.by_channel)


def same(a: Profile, b: Profile) -> None:
    for unit, by_format in a.samples.items():
        for name, u in by_format.items():
            torch.testing.assert_close(b.samples[unit][name], u, rtol=1e-4, atol=1e-5 * float(u.abs().max()))


def test_a_killed_run_resumes_at_the_last_batch(llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(llama, tmp_path / "whole")
    scored: list[int] = []
    score = damage.DamageScorer.score

    def dies(self: Any, ids: torch.Tensor, seeds: list[int]) -> Any:
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append(len(ids))
        return score(self, ids, seeds)

    monkeypatch.setattr(damage.DamageScorer, "score", dies)
    with pytest.raises(KeyboardInterrupt):
        make(llama, tmp_path / "killed")
    assert Profile.load(tmp_path / "killed").done == 4
    monkeypatch.setattr(damage.DamageScorer, "score", score)
    resumed = make(llama, tmp_path / "killed")
    assert resumed.complete
    same(whole, resumed)
    same_statistics(resumed, whole)
    assert not list((tmp_path / "killed").glob("*.part"))


def test_a_finished_profile_is_reused_and_a_new_format_joins_it(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(llama, tmp_path / "whole")
    few = Candidates(WEIGHTS[:2], KV[:1], KV)
    make(llama, tmp_path / "grown", few)
    said: list[str] = []
    grown = make(llama, tmp_path / "grown", said=said)
    same(whole, grown)
    same_statistics(grown, whole)
    assert any("mxfp4" in s and "kept" in s for s in said)
    monkeypatch.setattr(profiles, "DamageScorer", None)  # nothing may be scored any more
    said.clear()
    same(whole, make(llama, tmp_path / "grown", said=said))
    assert said == ["the profile is complete: nothing to score"]


def test_a_killed_addition_resumes_too(llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(llama, tmp_path / "whole")
    make(llama, tmp_path / "grown", Candidates(WEIGHTS[:2], KV[:1], KV))
    sizes: list[int] = []
    score = damage.DamageScorer.score

    def dies(self: Any, ids: torch.Tensor, seeds: list[int]) -> Any:
        sizes.append(len(ids))
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return score(self, ids, seeds)

    monkeypatch.setattr(damage.DamageScorer, "score", dies)
    with pytest.raises(KeyboardInterrupt):
        make(llama, tmp_path / "grown")
    assert Profile.load(tmp_path / "grown").complete
    grown = make(llama, tmp_path / "grown")
    same(whole, grown)
    assert sum(sizes) == sizes[1] + len(
        next(iter(next(iter(whole.samples.values())).values()))
    )  # only the batch that died is scored again
    assert not [p for p in (tmp_path / "grown").iterdir() if p.is_dir()]


@pytest.mark.parametrize("change", [{"model": "other"}, {"text": "other"}, {"seed": 1}, {"dtype": "bfloat16"}])
def test_a_profile_of_something_else_is_refused(llama: PreTrainedModel, tmp_path: Path, change: dict[str, Any]) -> None:
    make(llama, tmp_path)
    with pytest.raises(UserError, match=next(iter(change))):
        make(llama, tmp_path, source=fingerprint(**change))


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_profile_is_named(llama: PreTrainedModel, tmp_path: Path, damage: bytes | None) -> None:
    make(llama, tmp_path)
    stored = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(stored[: len(stored) // 2] if damage is None else damage)
    with pytest.raises(UserError, match="cannot be read"):
        Profile.load(tmp_path)


def synthetic(sequences: int, seed: int = 0) -> tuple[Profile, Any, dict[str, dict[str, float]]]:
    """Samples drawn from a known damage: sensitivity of the unit x factor of the format x error."""
    from autoq.model.unit import ModelUnits, Unit

    generator = torch.Generator().manual_seed(seed)
    units = ModelUnits(tuple(Unit(f"layers.{i}.down_proj", "weight", "down", i) for i in range(40)), (), 1)
    profile = Profile(fingerprint(sequences=sequences))
    truth: dict[str, dict[str, float]] = {}
    factors = {"a": 1.0, "b": 1.3, "c": 0.8, "d": 1.1}
    for i, unit in enumerate(units.units):
        truth[unit.name], profile.samples[unit.name], profile.relative_error[unit.name] = {}, {}, {}
        shared = torch.randn(sequences, generator=generator)
        for j, (name, factor) in enumerate(factors.items()):
            error = 0.01 / 4**j
            truth[unit.name][name] = math.exp(-3 + 0.1 * i) * factor * error
            own = 0.3 * shared + 0.954 * torch.randn(sequences, generator=generator)
            profile.samples[unit.name][name] = own * math.sqrt(2 * 40 * truth[unit.name][name])
            profile.relative_error[unit.name][name] = error
    profile.done = sequences
    return profile, units, truth


def test_pooling_finds_a_known_damage_better_than_the_raw_mean() -> None:
    profile, units, truth = synthetic(16)
    errors = {}
    for estimator in ("raw", "steady"):
        table = damage_table(profile, units, estimator)
        logs = torch.tensor([math.log(table[u][f] / truth[u][f]) for u in truth for f in truth[u]])
        errors[estimator] = float(logs.std())
        total = sum(table[u]["a"] for u in truth) / sum(truth[u]["a"] for u in truth)
        assert 0.8 < total < 1.25
    assert errors["steady"] < 0.7 * errors["raw"]


def test_the_standard_error_of_a_prediction_is_its_spread_over_draws() -> None:
    choice = {f"layers.{i}.down_proj": "a" for i in range(40)}
    predictions = [Predictor(*synthetic(24, seed)[:2])(choice) for seed in range(12)]
    spread = float(torch.tensor([p.kl for p in predictions]).std())
    said = sum(p.stderr for p in predictions) / len(predictions)
    assert 0.5 < said / spread < 2


def test_corrections_multiply_their_column() -> None:
    profile, units, _ = synthetic(16)
    plain = damage_table(profile, units)
    predicted = sum(damage_table(profile.first(8), units)[u.name]["b"] for u in units.units)
    profile.uniform_kl = {"weight/b": UniformKL(1.5 * predicted, 8, 40), "weight/c": UniformKL(9.9, 4, 40)}
    factors = correction_factors(profile, units, 8)
    assert factors == {"weight/b": pytest.approx(1.5)}  # c was measured on other sequences
    assert correction_factors(profile, units, 8, noise_floor=predicted) == {}
    table = damage_table(profile, units, factors=factors)
    assert table["layers.3.down_proj"]["b"] == pytest.approx(1.5 * plain["layers.3.down_proj"]["b"])
    assert table["layers.3.down_proj"]["a"] == plain["layers.3.down_proj"]["a"]


def test_an_outlier_cell_and_a_heavy_sequence_are_reported() -> None:
    profile, units, _ = synthetic(64)
    assert not profile.heavy_sequences()
    profile.samples["layers.7.down_proj"]["c"] *= 5
    assert ("layers.7.down_proj", "c") in [(u, f) for u, f, _ in disagreeing_cells(profile, units)]
    for by_format in profile.samples.values():
        for u in by_format.values():
            u[9] *= 10
    assert profile.heavy_sequences() == [9]
