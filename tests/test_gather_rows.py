"""Rows gathered with zeros for negative indices; gradients summed in fp32."""

import torch

from harts_hf.kernels.gather_rows import add_rows, gather_rows

INDEX = torch.tensor([2, -1, 0, 2, 3, 2, -5])


def test_gather_reads_rows_and_zeros():
    x = torch.randn(5, 2, 3)
    rows = gather_rows(x, INDEX)
    for row, index in zip(rows, INDEX.tolist(), strict=True):
        assert torch.equal(row, x[index] if index >= 0 else torch.zeros(2, 3))


def test_gradient_is_the_sum_over_reads():
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: gather_rows(t, INDEX), (x,))


def test_half_precision_gradients_are_summed_in_fp32():
    reads = 4096  # bf16 holds integers up to 256: summed in bf16, ones would stop there
    x = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(x, torch.ones(reads, dtype=torch.int64)).sum().backward()
    assert x.grad.tolist() == [[0.0], [reads]]


def test_add_rows_drops_negative_indices():
    values = torch.randn(len(INDEX), 4)
    total = add_rows(values, INDEX, 5)
    torch.testing.assert_close(total[2], values[0] + values[3] + values[5])
    assert not total[1].any() and not total[4].any()
    torch.testing.assert_close(total.sum(0), values[INDEX >= 0].sum(0))
    assert add_rows(values.bfloat16(), INDEX, 5).dtype == torch.float32
    assert not add_rows(values[:0], INDEX[:0], 5).any()
