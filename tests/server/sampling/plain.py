"""A sampler of one row in plain Python and float64, written from the order of steps in `sampling/sampler.py`, the rule
of the watermark in docs/differences.md and what `sampling/noise.py` says of its keys. It sorts, and shares no code with
the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tgi.shard_client.messages import Sampling

Scores = npt.NDArray[np.float64]
LOW = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox-4x32-10: four words of counter, two of key -> four words."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & LOW, (p0 >> 32) ^ c[3] ^ k[1], p0 & LOW]
        k = [(k[0] + 0x9E3779B9) & LOW, (k[1] + 0xBB67AE85) & LOW]
    return c


def is_green(token: int, before: int, gamma: float = 0.5) -> bool:
    key = 15485863 * before
    return philox((0, 0, token // 4, 1), (key & LOW, key >> 32))[token % 4] < gamma * 2**32


def processed(
    logits: npt.NDArray[np.float32],
    sampling: Sampling,
    prompt: list[int],
    generated: list[int],
    allowed: npt.NDArray[np.bool_] | None,
    banned: Sequence[int],
    gamma: float,
    delta: float,
) -> Scores:
    scores = logits.astype(np.float64)
    for token, value in dict(sampling.logit_bias).items():
        scores[token] += value
    if sampling.watermark:
        before = (generated or prompt)[-1]
        scores += [delta * is_green(token, before, gamma) for token in range(len(scores))]
    for token in {*prompt, *generated}:
        penalty = sampling.repetition_penalty
        scores[token] *= penalty if scores[token] < 0 else 1 / penalty
    for token in set(generated):
        scores[token] -= generated.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    if allowed is not None:
        scores[~allowed] = -np.inf
    endings = [word[-1] for word in sampling.bad_words if generated[len(generated) - len(word) + 1 :] == [*word[:-1]]]
    for forbidden in (endings, list(banned)):
        left = scores.copy()
        left[forbidden] = -np.inf
        if left.max() > -np.inf:
            scores = left
    return scores


def warped(scores: Scores, sampling: Sampling) -> Scores:
    scores = (scores - scores.max()) / sampling.temperature
    best_first = np.lexsort((np.arange(len(scores)), -scores))
    if 0 < sampling.top_k < len(scores):
        scores[scores < scores[best_first[sampling.top_k - 1]]] = -np.inf
    if sampling.top_p < 1:
        scores[best_first[_num_reaching(sampling.top_p, _shares(scores)[best_first]) :]] = -np.inf
    scores[np.exp(scores) < sampling.min_p] = -np.inf
    if sampling.typical_p < 1:
        information = -log_softmax(scores)
        shares = _shares(scores)
        entropy = (shares[shares > 0] * information[shares > 0]).sum()
        distances = np.abs(information - entropy)
        nearest_first = np.argsort(distances, kind="stable")
        last = nearest_first[_num_reaching(sampling.typical_p, shares[nearest_first]) - 1]
        scores[distances > distances[last] + 1e-6] = -np.inf
    return scores


def noisy(scores: Scores, seed: int, position: int) -> Scores:
    """The best of these is the choice."""
    quads = range(-(-len(scores) // 4))
    key = (seed & LOW, seed >> 32)
    words = [word for quad in quads for word in philox((position & LOW, position >> 32, quad, 0), key)]
    uniform = ((np.array(words[: len(scores)]) >> 8) + 0.5) / 2**24
    return scores - np.log(-np.log(uniform))


def log_softmax(scores: Scores) -> Scores:
    best = scores.max()
    return scores - best - np.log(np.exp(scores - best).sum())


def _shares(scores: Scores) -> Scores:
    return np.exp(log_softmax(scores))


def _num_reaching(share: float, shares: Scores) -> int:
    """How many of the first shares together reach `share`."""
    return min(int((shares.cumsum() < share).sum()) + 1, len(shares))
