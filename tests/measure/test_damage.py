"""The one-pass scores against the slow truth: one sequence at a time, whole gradients, explicit differences."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GptOssConfig, MixtralConfig, Phi3Config, PreTrainedModel

from autoq import codec
from autoq.errors import AutoqError, UserError
from autoq.formats.calibration import Calibration
from autoq.formats.catalog import KV_FORMATS, kv_format, weight_format
from autoq.formats.format import KVFormat
from autoq.measure import damage, weight_scorer
from autoq.measure.cache_statistics import CacheStatistics
from autoq.measure.damage import Candidates, DamageScorer
from autoq.measure.kv_scorer import pair_gradients
from autoq.measure.labels import label_gradient
from autoq.model.attention import intercepted
from autoq.model.head import Head, hidden_states
from autoq.model.kv_visibility import attend_mixed, version_pairs
from autoq.model.quantized import Assignment, quantized
from autoq.model.unit import ModelUnits
from autoq.model.units import find_units
from tests.conftest import SMALL, build, llama_config

WEIGHTS = tuple(weight_format(n) for n in ("fp8", "nvfp4", "mxfp4", "int4_g32_asym", "int4_g64_full", "int3_g64_asym", "nvfp4_lsq"))
CACHES = tuple(
    kv_format(n)
    for n in (
        "fp8_cast",
        "nvfp4_cast",
        "mxfp4",
        "int4_token",
        "int4_channel",
        "int2_token+residual8",
        "int4_token+sink2",
        "int8_token+tier9>int4_token",
        "nvfp4+residual4+sink3+tier5>int2_token+tier8>int2_token",
        "int8_token+tier3>int4_channel",
        "nvfp4+refresh8",
        "fp8_affine+refresh5+sink3",
        "nvfp4_rotate",
        "nvfp4_affine",
        "fp8_affine+residual8",
    )
)

MODELS: dict[str, Any] = {
    "llama": llama_config(),
    "phi3": Phi3Config(num_key_value_heads=2, pad_token_id=0, **SMALL),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64),
    "mixtral": MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SMALL),
    "gpt_oss": GptOssConfig(num_key_value_heads=2, num_local_experts=4, head_dim=16, sliding_window=24, **SMALL),
}


def labels_by_quantile(model: PreTrainedModel, ids: torch.Tensor, seed: int) -> torch.Tensor:
    draws = torch.rand(ids.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        p = model(ids).logits[0].double().softmax(-1)
    return torch.searchsorted(p.cumsum(-1), draws.unsqueeze(1)).squeeze(1).clamp(max=p.shape[1] - 1)


def slow_scores(
    model: PreTrainedModel, ids: torch.Tensor, seeds: list[int], units: ModelUnits | None = None
) -> dict[str, torch.Tensor]:
    units = units or find_units(model)
    columns = []
    for row, seed in zip(ids, seeds, strict=True):
        one = row.unsqueeze(0)
        labels = labels_by_quantile(model, one, seed)
        scores: dict[str, torch.Tensor] = {}
        for unit in units.weights:
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(one).logits[0], labels, reduction="sum").backward()
            squares = torch.zeros(len(WEIGHTS))
            for tensor in unit.tensors:
                weight = model.get_parameter(tensor.parameter)
                for i, fmt in enumerate(WEIGHTS):
                    delta = (
                        codec.fake_quantize_weight(weight.data, fmt, tensor.layout in ("conv1d", "experts_transposed"))
                        - weight.data
                    )
                    assert weight.grad is not None
                    outputs = -1 if tensor.layout in ("conv1d", "experts_transposed") else -2
                    squares[i] += (weight.grad * delta).sum(outputs).square().sum()  # by input channel
            scores[unit.name] = squares.sqrt()
        columns.append(scores)
    return {name: torch.stack([c[name] for c in columns], dim=1) for name in columns[0]}


@pytest.mark.parametrize("name", MODELS)
def test_weights_equal_the_slow_truth(name: str, ids: torch.Tensor) -> None:
    model = build(MODELS[name])
    seeds = [11, 22, 33]
    scorer = DamageScorer(model, find_units(model), Candidates(WEIGHTS, CACHES, CACHES))
    fast = scorer.score(ids, seeds)
    for unit, expected in slow_scores(model, ids, seeds).items():
        allowed = [
            i
            for i, f in enumerate(WEIGHTS)
            if f in scorer.candidates.for_unit(next(u for u in scorer.units.units if u.name == unit))
        ]
        scale = expected.abs().amax()
        torch.testing.assert_close(fast[unit], expected[allowed], rtol=1e-3, atol=1e-4 * float(scale))


@pytest.mark.parametrize("name", MODELS)
def test_the_scoring_kernel_takes_over_where_kernels_run(name: str, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = DamageScorer(build(MODELS[name]), find_units(build(MODELS[name])), Candidates(WEIGHTS, (), ()))
    expected = scorer.score(ids, [11, 22, 33])
    monkeypatch.setattr(weight_scorer, "has_kernels", lambda device: True)
    monkeypatch.setattr(weight_scorer, "rounding_error", None)  # what torch would take
    found = scorer.score(ids, [11, 22, 33])
    for unit in (u.name for u in scorer.units.weights):
        values = expected[unit]
        torch.testing.assert_close(found[unit], values, rtol=1e-4, atol=1e-6 * float(values.abs().amax()))


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_and_a_tied_embedding_equal_the_slow_truth(ids: torch.Tensor, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoq.model import head as heads

    monkeypatch.setattr(heads, "LOGITS_BYTES", 4 * 128 * 7)  # chunks of seven tokens: no multiple of the batch
    model = build(llama_config(tie_word_embeddings=tied))
    units = find_units(model, ("lm_head",))
    fast = DamageScorer(model, units, Candidates(WEIGHTS, (), ())).score(ids, [11, 22, 33])
    slow = slow_scores(model, ids, [11, 22, 33], units)
    scale = float(slow["lm_head"].abs().amax())
    torch.testing.assert_close(fast["lm_head"], slow["lm_head"], rtol=1e-3, atol=1e-4 * scale)


def test_activation_formats_add_the_inputs_part(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    """u^2 of int8_w8a8 minus u^2 of int8 is that of the input's gradient with what its rounding changes, token by token."""
    units = find_units(llama)
    unit = next(u for u in units.weights if u.name.endswith("layers.0.mlp.down_proj"))
    both = Candidates((weight_format("int8"), weight_format("int8_w8a8")), (), ())
    found = DamageScorer(llama, units, both).score(ids[:1], [5])[unit.name][:, 0]
    kept: dict[str, torch.Tensor] = {}

    def live(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        kept["x"] = inputs[0].detach().requires_grad_()
        return (kept["x"],)

    handle = llama.get_submodule(unit.tensors[0].name).register_forward_pre_hook(live)
    labels = labels_by_quantile(llama, ids[:1], 5)
    torch.nn.functional.cross_entropy(llama(ids[:1]).logits[0], labels, reduction="sum").backward()
    handle.remove()
    assert kept["x"].grad is not None
    delta = codec.fake_quantize_activation(kept["x"].detach(), weight_format("int8")) - kept["x"].detach()
    expected = float((kept["x"].grad * delta).sum(-1).square().sum())
    assert float(found[1].square() - found[0].square()) == pytest.approx(expected, rel=1e-2)


def live_attention(model: PreTrainedModel, ids: torch.Tensor, seed: int, unit_module: str, fmt: KVFormat, kind: str) -> float:
    """Root of the sum over tokens and heads of <dL/dX', Q(X) - X>^2; X' enters only the pairs that the format reads quantized."""
    found: list[torch.Tensor] = []
    lives: list[torch.Tensor] = []

    def handle(module: Any, query: Any, key: Any, value: Any, mask: Any, attend: Any, **options: Any) -> Any:
        if module is not model.get_submodule(unit_module):
            return attend(module, query, key, value, mask, **options)
        x = key if kind == "key" else value
        found.append(x.detach())
        lives.extend(x.detach().clone().requires_grad_() for _ in fmt.chain)
        versions = list(zip(lives, version_pairs(fmt, x.shape[2], x.shape[2], x.device), strict=True))
        sides = (versions, []) if kind == "key" else ([], versions)
        sinks = options.get("s_aux")
        return attend_mixed(query, key, value, *sides, mask, options["scaling"], None, sinks), None

    labels = labels_by_quantile(model, ids, seed)
    with intercepted(model, handle):
        torch.nn.functional.cross_entropy(model(ids).logits[0], labels, reduction="sum").backward()
    x = found[0]
    total, version = torch.zeros_like(x), x
    for live, one in zip(lives, fmt.chain, strict=True):
        version = codec.fake_quantize_cache(version, one, CacheStatistics().with_values(x).calibration())
        assert live.grad is not None
        total += live.grad * (version - x)
    return float(total.sum(-1).square().sum().sqrt())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
def test_keys_and_values_equal_the_slow_truth(name: str, ids: torch.Tensor) -> None:
    model = build(MODELS[name])
    units = find_units(model)
    one = ids[:1]
    candidates = Candidates((), CACHES, CACHES)
    fast = DamageScorer(model, units, candidates).score(one, [5])
    for unit in units.caches:
        formats = [f for f in candidates.for_unit(unit) if isinstance(f, KVFormat)]
        expected = [live_attention(model, one, 5, unit.module, f, unit.kind) for f in formats]
        scale = max(map(abs, expected))
        torch.testing.assert_close(fast[unit.name][:, 0], torch.tensor(expected), rtol=2e-3, atol=2e-4 * scale)


def test_fast_diagonal_blocks_equal_the_general_way() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 70, 16, generator=generator)
    k, v = (torch.randn(2, 2, 70, 16, generator=generator) for _ in range(2))
    d_out = torch.randn(2, 70, 6, 16, generator=generator)
    out = attend_mixed(q, k, v, [], [], None, 0.25)
    fmt = kv_format("int4_channel")
    fast = pair_gradients(fmt, 0, q, k, v, out, d_out, None, {"scaling": 0.25})
    general = pair_gradients(fmt, 0, q, k, v, out, d_out, torch.ones(70, 70, dtype=torch.bool).tril(), {"scaling": 0.25})
    for a, b in zip(fast, general, strict=True):  # the incomplete group is never packed, its gradient is not used
        torch.testing.assert_close(a[:, :, :64], b[:, :, :64], rtol=1e-4, atol=1e-5)


def test_recomputing_activations_changes_nothing(
    llama: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = find_units(llama)
    candidates = Candidates(WEIGHTS, CACHES, CACHES)
    again = DamageScorer(llama, units, candidates).score(ids, [1, 2, 3])
    monkeypatch.setattr(damage, "recomputed_layers", lambda model: nullcontext())
    kept = DamageScorer(llama, units, candidates).score(ids, [1, 2, 3])
    for name, u in kept.items():
        torch.testing.assert_close(again[name], u, rtol=1e-5, atol=1e-6)


def test_samples_do_not_depend_on_how_sequences_are_batched(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    units = find_units(llama)
    candidates = Candidates(WEIGHTS, (), ())
    together = DamageScorer(llama, units, candidates).score(ids, [1, 2, 3])
    alone = [DamageScorer(llama, units, candidates).score(ids[i : i + 1], [i + 1]) for i in range(3)]
    for unit in units.weights:
        joined = torch.cat([a[unit.name] for a in alone], dim=1)
        torch.testing.assert_close(together[unit.name], joined, rtol=1e-3, atol=1e-4 * float(joined.abs().amax()))


def test_the_model_is_as_before(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    def digest() -> str:
        parts = [
            n.encode() + p.detach().numpy().tobytes() + str((p.requires_grad, p.grad)).encode() for n, p in llama.named_parameters()
        ]
        parts += [repr((len(m._forward_hooks), "forward" in m.__dict__)).encode() for m in llama.modules()]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    before = digest()
    DamageScorer(llama, find_units(llama), Candidates(WEIGHTS, CACHES, CACHES)).score(ids, [1, 2, 3])
    assert digest() == before


def test_prediction_is_in_nats(ids: torch.Tensor) -> None:
    """Small damage: the mean of u^2 / 2T over many sequences is the measured KL, with no constant to fit."""
    model = build(llama_config(num_hidden_layers=1))
    units = find_units(model)
    many = torch.randint(0, 128, (256, 24), generator=torch.Generator().manual_seed(1))
    fmt = weight_format("int8")
    scorer = DamageScorer(model, units, Candidates((fmt,), (), ()))
    found = [scorer.score(part, list(range(i * 64, i * 64 + 64))) for i, part in enumerate(many.split(64))]
    u = torch.stack([torch.cat([f[unit.name][0] for f in found]) for unit in units.weights])
    predicted = float((u.double().square().mean(1) / (2 * 24)).sum())
    with torch.no_grad():
        p = model(many).logits.double().log_softmax(-1)
        with quantized(model, units, Assignment({unit.name: fmt for unit in units.weights})):
            q = model(many).logits.double().log_softmax(-1)
    measured = float((p.exp() * (p - q)).sum(-1).mean())
    assert abs(predicted / measured - 1) < 0.25  # 256 samples: relative error of the mean about sqrt(2/256), four units


def test_labels_follow_the_model(llama: PreTrainedModel) -> None:
    """Averaged over many seeds the gradient of the drawn labels vanishes, as the score function's expectation does."""
    head = Head(llama)
    with torch.no_grad():
        hidden = hidden_states(llama, torch.arange(4).unsqueeze(0))
    gradients = torch.stack([label_gradient(head, hidden, [seed])[0] for seed in range(600)])
    mean, spread = gradients.mean(0), gradients.std(0) / 600**0.5
    assert ((mean.abs() / spread) < 5).all()
    assert float((mean / spread).square().mean()) < 1.3


def test_case_14_nan_weights_are_named_before_scoring(llama: PreTrainedModel) -> None:
    with torch.no_grad():
        llama.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        DamageScorer(llama, find_units(llama), Candidates(WEIGHTS, (), ()))


def test_case_14_infinite_hidden_states_stop_the_run(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    scorer = DamageScorer(llama, find_units(llama), Candidates(WEIGHTS, (), ()))
    with torch.no_grad():
        llama.model.layers[0].mlp.up_proj.weight.mul_(1e30)
        llama.model.layers[0].mlp.gate_proj.weight.mul_(1e30)
    with pytest.raises(AutoqError, match="not finite"):
        scorer.score(ids, [1, 2, 3])


def test_case_15_all_zero_weights_cost_nothing(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    with torch.no_grad():
        llama.model.layers[0].mlp.down_proj.weight.zero_()
        llama.model.layers[1].self_attn.q_proj.weight[:, :32] = 0
    found = DamageScorer(llama, find_units(llama), Candidates(WEIGHTS, (), ())).score(ids, [1, 2, 3])
    assert torch.equal(found["model.layers.0.mlp.down_proj"], torch.zeros_like(found["model.layers.0.mlp.down_proj"]))
    assert all(torch.isfinite(u).all() for u in found.values())


@pytest.mark.parametrize(("head_dim", "fits"), [(80, 40), (96, 48), (100, 50), (64, 64), (256, 64)])
def test_case_11_kv_groups_are_the_largest_divisor(head_dim: int, fits: int) -> None:
    fmt = kv_format("int4_token").for_head_dim(head_dim)
    assert fmt.values.block == fits
    assert fmt.storage_bits(10, 2, head_dim) == 10 * 2 * (4 * head_dim + head_dim // fits * 20)
    x = torch.randn(1, 2, 5, head_dim)
    assert torch.isfinite(codec.fake_quantize_cache(x, kv_format("int4_token"), Calibration(3.0))).all()


def test_case_11_a_prime_head_dim_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="head_dim of 71"):
        kv_format("int4_token").for_head_dim(71)
    grouped = {n for n, f in KV_FORMATS.items() if f.axis == "token" and f.values.block and f.values.scale == "fp16"}
    assert {"int4_token", "q8_0"} < grouped
    assert all(f.for_head_dim(71) for n, f in KV_FORMATS.items() if n not in grouped and not f.rotate)
    with pytest.raises(UserError, match="head_dim of 71 is odd"):
        kv_format("nvfp4_rotate").for_head_dim(71)
