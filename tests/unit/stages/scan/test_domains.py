import pytest
import torch

from stages.scan.batch_sums import MOST_DOMAINS, OTHER, find_domains, sum_taylor_by_domain
from stages.scan.config import ScanConfig
from stages.text.sequences import TokenBatch


def batch(*samples):
    """Samples as (domain, tokens)."""
    longest = max(length for _, length in samples)
    mask_BT = torch.tensor([[1] * length + [0] * (longest - length) for _, length in samples])
    return TokenBatch(mask_BT, mask_BT, mask_BT, [""] * len(samples), [name for name, _ in samples])


ASKED = ScanConfig(domains=True)


def test_nothing_is_told_apart_unless_asked():
    assert find_domains([batch(("a", 3))], ScanConfig()) is None


def test_the_largest_domains_come_first():
    batches = [batch(("a", 3), ("b", 5)), batch(("a", 4), ("c", 1))]
    domains = find_domains(batches, ASKED)
    assert domains.names == ["a", "b", "c"]
    assert [domains.number(one).tolist() for one in batches] == [[0, 1], [0, 2]]


def test_the_smallest_of_many_share_one_place():
    batches = [batch((f"d{number}", 90 - number)) for number in range(MOST_DOMAINS + 5)]
    domains = find_domains(batches, ASKED)
    assert domains.names == [*(f"d{number}" for number in range(MOST_DOMAINS)), OTHER]
    assert [int(domains.number(one)) for one in batches[-6:]] == [MOST_DOMAINS - 1] + [MOST_DOMAINS] * 5


def test_another_naming_is_another_scan():
    first, second = [batch(("a", 3), ("b", 2))], [batch(("b", 3), ("a", 2))]
    assert find_domains(first, ASKED).digest(first) != find_domains(second, ASKED).digest(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_samples_of_one_domain_share_a_row(dtype):
    generator = torch.Generator().manual_seed(0)
    h_BTF, grad_BTF = (torch.randn(5, 7, 11, generator=generator).to(dtype) for _ in range(2))
    rows_B = torch.tensor([2, 0, 2, 1, 0])
    found_PF = sum_taylor_by_domain(h_BTF, grad_BTF, rows_B, 3)
    each_BF = (h_BTF.double() * grad_BTF.double()).abs().sum(1)
    expected_PF = torch.stack([each_BF[rows_B == row].sum(0) for row in range(3)])
    assert found_PF.dtype == torch.float64
    torch.testing.assert_close(found_PF, expected_PF, rtol=1e-6, atol=0)
