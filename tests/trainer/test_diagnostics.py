"""What a batch reports about its distance from the policy that sampled it, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from midflight.trainer.formulas import diagnostics
from midflight.trainer.formulas.diagnostics import TokenReadings

from .tensors import of


def observed(log_rho: Tensor, *, weight: Tensor | None = None, sequence: list[int] | None = None, **masked: list[bool]) -> TokenReadings:
    """Tokens of one rollout each unless said, the first clipped below and the last above."""
    count = len(log_rho)
    ends = torch.arange(count)
    return TokenReadings(
        log_rho,
        log_rho.exp() if weight is None else weight,
        torch.tensor(sequence or list(range(count))),
        below=ends == 0,
        above=ends == count - 1,
        masked={reason: torch.tensor(gone) for reason, gone in masked.items()},
    )


def test_effective_sample_size_of_equal_and_of_lonely_weights() -> None:
    assert float(diagnostics.effective_sample_size(of(1, 1, 1, 1))) == pytest.approx(1.0)
    assert float(diagnostics.effective_sample_size(of(4, 0, 0, 0))) == pytest.approx(0.25)
    assert float(diagnostics.effective_sample_size(of(0, 0))) == 0.0


def test_divergences_by_hand() -> None:
    log_rho = of(math.log(1.1))
    assert float(diagnostics.k3(log_rho)) == pytest.approx(0.00469, abs=5e-6)
    assert float(diagnostics.k1(log_rho)) == pytest.approx(-math.log(1.1))
    assert float(diagnostics.chi2(log_rho)) == pytest.approx(0.21)  # 1.1^2 - 1
    # Two tokens of one rollout: rho of the sequence is 1.1 * 1.1; the other rollout's is 1.1.
    sequences = diagnostics.sequence_log_ratios(log_rho.expand(3), torch.tensor([4, 2, 4]))
    assert sequences.exp().tolist() == pytest.approx([1.1, 1.21])


def test_a_batch_reports_its_ratios_its_clips_and_each_mask() -> None:
    # rho 1, 2, 3, 2: mean 2, variance (1 + 0 + 1 + 0) / 4. Weights capped at 2: 7^2 / (4 * 13).
    tokens = observed(
        of(1, 2, 3, 2).log(),
        weight=of(1, 2, 2, 2),
        sequence=[0, 0, 1, 1],
        veto=[True, True, False, False],
        m2po=[False, False, True, False],
    )
    found = diagnostics.batch_metrics(tokens)
    assert [found[f"rho/{name}"] for name in ("mean", "min", "max", "std")] == pytest.approx([2.0, 1.0, 3.0, math.sqrt(0.5)])
    assert found["rho/ess"] == pytest.approx(49 / 52)
    assert found["rho/chi2_token"] == pytest.approx(18 / 4 - 1) and found["rho/chi2_sequence"] == pytest.approx((4 + 36) / 2 - 1)
    assert found["rho/k1"] == pytest.approx(-math.log(12) / 4) and found["rho/k3"] == pytest.approx(1 - math.log(12) / 4)
    assert (found["clip/low_share"], found["clip/high_share"]) == (0.25, 0.25)
    assert (found["masked/veto"], found["masked/m2po"]) == (0.5, 0.25)


def test_ages_are_counted_with_everything_that_the_batch_reports() -> None:
    tokens = observed(of(0, 0, math.log(4), math.log(0.5)), veto=[True, False, False, True])
    found = diagnostics.age_metrics(torch.tensor([0, 0, 0, 3]), tokens)
    assert found["age/0/share"] == 0.75 and found["age/3/share"] == 0.25
    assert found["age/0/rho_mean"] == pytest.approx(2.0) and found["age/3/rho_mean"] == pytest.approx(0.5)
    assert found["age/3/k3"] == pytest.approx(0.5 - 1 + math.log(2)) and found["age/3/ess"] == 1.0
    assert found["age/0/masked_veto"] == pytest.approx(1 / 3) and found["age/3/clip_high_share"] == 1.0
    assert (found["age/max"], found["age/mean"]) == (3.0, 0.75)
    for age in (0, 3):
        assert len([name for name in found if name.startswith(f"age/{age}/")]) == len(diagnostics.batch_metrics(tokens)) + 1


def test_an_age_that_the_first_tokens_lack_is_reported_too() -> None:
    found = diagnostics.age_metrics(torch.tensor([1, 0, 2]), observed(of(0, 0, 0)))
    assert [found[f"age/{age}/share"] for age in (0, 1, 2)] == pytest.approx([1 / 3] * 3)


def test_engine_and_trainer_are_compared_on_tokens_of_the_trained_version_apart_by_their_keys() -> None:
    # Age 1 is left out, however far off. Of age 0: .1 and -.3 with keys of their own version, .2 with an older one.
    log_rho, age = of(0.1, -0.3, 0.2, 5.0), torch.tensor([0, 0, 0, 1])
    found = diagnostics.mismatch_metrics(log_rho, age, has_older_keys=torch.tensor([False, False, True, True]))
    assert (found["mismatch/mean"], found["mismatch/max"]) == pytest.approx((0.2, 0.3))
    assert (found["mismatch/same_keys/mean"], found["mismatch/older_keys/mean"]) == pytest.approx((0.2, 0.2))
    assert found["mismatch/older_keys/k3"] == pytest.approx(math.exp(0.2) - 1.2)
    assert (found["mismatch/share"], found["mismatch/same_keys/share"], found["mismatch/older_keys/share"]) == (0.75, 0.5, 0.25)


def test_a_batch_without_fresh_tokens_reports_no_mismatch() -> None:
    assert diagnostics.mismatch_metrics(of(0.1), torch.tensor([2]), has_older_keys=torch.tensor([False])) == {}


def test_entropy_is_estimated_from_the_sampled_tokens() -> None:
    assert diagnostics.entropy_metrics(of(math.log(0.5), math.log(0.25))) == {"entropy/estimate": pytest.approx(1.5 * math.log(2))}


def test_alarms_name_each_reading_out_of_bounds() -> None:
    quiet = {"rho/mean": 1.0, "rho/ess": 0.9, "rho/k1": 0.01, "rho/std": 0.1}
    loud = {"rho/mean": 2.5, "rho/ess": 0.2, "rho/k1": -0.2, "rho/std": 1.5}
    assert diagnostics.alarms(quiet) == ()
    assert len(diagnostics.alarms(loud)) == 4
