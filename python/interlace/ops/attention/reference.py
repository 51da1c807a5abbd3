"""float64 references of attention and its gradients, and how far correct results may be from them.

As ``reference.py``, which has the sources of bounds. Beside sums and roundings there is the
exponential: of a score that is off by e the weight is off by ``exp(e) - 1``, relative, once as such and
once in the sum that it is divided by, and an exponential errs by 2 units and by one per unit of its
argument. Weights are rounded to the dtype of the values before they are multiplied, and so are the
gradients of scores. Near zero a rounding errs by half of the smallest number of the dtype, whatever the
value: once for every key that a query sees, times what the weight is multiplied with. In the output weights
are rounded before the division by their sum, while the largest is 1; in the gradients behind it. Bounds are
per element, to first order, all terms added up.
"""

import math

import torch

from interlace.ops.matmul.reference import Bounded, gamma, half_denormal, rounded, unit_roundoff

Tensor = torch.Tensor
MERGES = 16  # roundings of an element where partial results are merged


def visible(
    tokens: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """``[tokens, tokens]``: whether a query sees a key, both by their place in the sequence."""
    query, key = torch.arange(tokens).unsqueeze(1), torch.arange(tokens)
    mask = torch.ones(tokens, tokens, dtype=torch.bool)
    if causal:
        mask &= key <= query
    before, after = window
    if before >= 0:
        mask &= key >= query - before
    if after >= 0:
        mask &= key <= query + after
    if cu_seqlens is not None:
        number = torch.bucketize(key, cu_seqlens.long(), right=True)
        mask &= (number == number.unsqueeze(1)) & (number < len(cu_seqlens))
    return mask


class AttentionReference:
    """Of ``[batch, heads, tokens, size]``; keys may have fewer heads. All that it gives is float64."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> None:
        self.dtype = query.dtype
        self._unit = unit_roundoff(torch.float64 if self.dtype == torch.float64 else torch.float32)
        self.groups = query.shape[1] // key.shape[1]
        self._query = query.double()
        self._key, self._value = (
            each.double().repeat_interleave(self.groups, 1) for each in (key, value)
        )
        self._scale, self._mask, factor = scale, mask, abs(scale)
        self._count, size = query.shape[2], query.shape[3]
        score = (self._query @ self._key.mT * scale).masked_fill(~mask, -math.inf)
        self.lse = score.logsumexp(-1)
        self.weight = torch.nan_to_num(score.softmax(-1))
        largest = score.amax(-1, keepdim=True)
        reach = torch.where(mask, largest - score, 0).nan_to_num(posinf=0, neginf=0)
        of_score = gamma(size + 6, self._unit) * (self._query.abs() @ self._key.abs().mT) * factor
        of_score = torch.where(mask, of_score + self._unit * (score.abs() + reach + 3), 0)
        self._score_error = of_score.nan_to_num(posinf=0).amax(-1, keepdim=True)
        # of the weight, and of the sum, relative; then what is rounded
        self._relative = 2 * torch.expm1(self._score_error) + gamma(
            self._count + MERGES, self._unit
        )
        self._rounded_weight = self._relative + unit_roundoff(self.dtype)
        self._near_zero = half_denormal(self.dtype) * mask.double()
        self._exact = self.weight @ self._value

    def output(self) -> Bounded:
        error = self._rounded_weight * (self.weight @ self._value.abs()) * 2
        largest = self.weight.amax(-1, keepdim=True)  # which is 1 when it is rounded
        error = error + largest * (self._near_zero @ self._value.abs())
        return self._exact, rounded(error, self._exact, self.dtype)

    def sums(self) -> Bounded:
        """The logarithms of the sums of exponentials."""
        error = self._score_error.squeeze(-1) + self._relative.squeeze(-1)
        unit = self._unit * (self.lse.abs().nan_to_num(posinf=0) + MERGES)
        return self.lse, error + unit

    def gradients(self, grad: Tensor) -> tuple[Bounded, Bounded, Bounded]:
        """Of query, key and value, for ``grad`` of the output."""
        grad = grad.double()
        size = grad.shape[-1]
        of_value = self.weight.mT @ grad
        value_error = (self._rounded_weight * self.weight).mT @ grad.abs() * 2
        value_error = value_error + self._near_zero.mT @ grad.abs()
        of_weight = grad @ self._value.mT
        output, output_error = self.output()
        delta = (grad * output).sum(-1, keepdim=True)
        unit = gamma(size + 4, self._unit)
        weight_error = unit * (grad.abs() @ self._value.abs().mT)
        delta_error = (grad.abs() * (output_error + unit * output.abs())).sum(-1, keepdim=True)
        of_score = self.weight * (of_weight - delta)
        spread = self.weight * (of_weight.abs() + delta.abs())
        score_error = 2 * self._rounded_weight * spread + self.weight * (weight_error + delta_error)
        score_error = score_error + unit_roundoff(self.dtype) * of_score.abs() + self._near_zero
        more = gamma(self._count + MERGES, self._unit)
        of_query, factor = of_score @ self._key * self._scale, abs(self._scale)
        query_error = (score_error + more * spread) @ self._key.abs() * factor
        of_key = of_score.mT @ self._query * self._scale
        key_error = (score_error + more * spread).mT @ self._query.abs() * factor
        value_error = value_error + more * (self.weight.mT @ grad.abs())
        return (
            (of_query, rounded(query_error, of_query, self.dtype)),
            self._of_keys(of_key, key_error),
            self._of_keys(of_value, value_error),
        )

    def _of_keys(self, value: Tensor, error: Tensor) -> Bounded:
        """Sums over the heads of queries that see a head of keys."""
        batch, heads, tokens, size = value.shape
        shape = batch, heads // self.groups, self.groups, tokens, size
        value, error = value.view(shape).sum(2), error.view(shape).sum(2)
        return value, rounded(error, value, self.dtype)
