"""A teacher: another encoder whose similarities within a batch the trained one is asked to have.

v: views    p: encoder passes    n: sentences    d: width    s_ij: cosine of sentences i and j

[1] RankCSE, arXiv:2305.16726    [2] Cao et al., Learning to Rank (ListNet), ICML 2007
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from whitenedcse.app.compute import autocast_type, full_precision
from whitenedcse.data.datamodule import Batch
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder
from whitenedcse.training.loss import Step
from whitenedcse.training.parallel import gathered


class Teacher:
    """A term of the loss: of each sentence, the others are to be as similar as a teacher finds them.

    Let s be the cosines of the views z, t those of the teacher's embeddings, a = temperature, and b =
    teacher_temperature. For the anchor's sentences i and those of another view, j, the term is

        mean over i of -sum over j != i of softmax_j(t_ij / b) log softmax_j(s_ij / a)

    averaged over the other views: ListNet's cross-entropy of top-one probabilities [2], by which [1] distils
    rankings. The paper of [1] could not be read here, and so no equation of it is named: the form and the
    temperatures are those of ListNet in github.com/perceptiveshawty/RankCSE, which is not its authors'. That
    code has a second teacher and a term of consistency between views besides.

    path: the teacher, whatever `Embedder.load` takes: a run, its `best/`, an encoder, a hub id. It embeds the
        tokens of the batch as its checkpoint defines, with a whitening at its end if it has one, in eval mode
        and without gradient. Its weights are no parameters of the training and are in no checkpoint.
    encoder: the one that is trained, whose token ids the teacher is given. Its prompt is part of them.
    Raises ValueError for no path, another tokenizer, or numbers that are not above 0.

    >>> cosines = torch.tensor([[1.0, 0.6, 0.0], [0.6, 1.0, 0.8], [0.0, 0.8, 1.0]])
    >>> others(cosines)  # of each sentence, its cosine with itself left out
    tensor([[0.6000, 0.0000],
            [0.6000, 0.8000],
            [0.0000, 0.8000]])
    """

    def __init__(
        self,
        *,
        path: str | None,
        encoder: Encoder,
        weight: float = 1.0,
        temperature: float = 0.05,
        teacher_temperature: float = 0.025,
    ) -> None:
        numbers = {"weight": weight, "temperature": temperature, "teacher_temperature": teacher_temperature}
        if path is None:
            raise ValueError(
                "the teacher's path is null: TEACHER=outputs/NAME python train.py +system=teacher"
            )
        for name, value in numbers.items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} of the teacher {path} must be finite and above 0")
        self.weight, self.temperature, self.teacher_temperature = weight, temperature, teacher_temperature
        self.path, self.embedder = path, Embedder.load(path).requires_grad_(False)
        refuse_other_tokens(path, self.embedder.encoder.tokenizer, encoder.tokenizer)

    def __call__(self, step: Step) -> Tensor:
        """The cross-entropy above for the sentences of all ranks, or of this one if vectors are not gathered.

        Raises ValueError for sentences longer than the teacher's limit.
        """
        t = self.vectors(step.batch)
        if step.z.shape[1] != step.batch.n:
            t = gathered(t)
        return listwise(step.z, t, (self.temperature, self.teacher_temperature))

    def vectors(self, batch: Batch) -> Tensor:
        """The teacher's embeddings of the passes of this rank's sentences: (p, n, d), without gradient."""
        tokens, limit, device = batch.positives, self.embedder.encoder.max_length, batch.positives.ids.device
        if tokens.longest > limit:
            raise ValueError(
                f"sentences of {tokens.longest} tokens, but the teacher {self.path} takes {limit}: "
                f"use data.max_length={limit} or less, or another teacher"
            )
        if device.type == "cpu":  # over all cores, and equal passes once
            rounded = autocast_type("cpu") == torch.bfloat16
            x = torch.from_numpy(self.embedder.encode_rows(tokens, bf16=rounded))
        else:
            with torch.no_grad():
                x = self.embedder.to(device).embed(tokens)
        return x.unflatten(0, (-1, batch.n))


def refuse_other_tokens(path: str, theirs: Any, ours: Any) -> None:
    """Raise ValueError unless two tokenizers give each token, special ones too, the same id."""
    if theirs.get_vocab() == ours.get_vocab() and theirs.special_tokens_map == ours.special_tokens_map:
        return
    sizes = f"{len(theirs)} entries, the trained encoder's {len(ours)}"
    raise ValueError(
        f"the teacher {path} has another tokenizer ({sizes}), so that token ids mean other words to it; "
        "use one with the tokenizer of the encoder that is trained, such as a run that began with it"
    )


@full_precision
def listwise(z: Tensor, t: Tensor, temperatures: tuple[float, float]) -> Tensor:
    """The cross-entropy of `Teacher`, views z: (v, n, d), the teacher's passes t: (p, n, d') -> scalar.

    temperatures: of z and of t. The passes serve the views in turn, as in `ProjectionHead.project`.
    """
    turned = torch.stack([t[view % len(t)] for view in range(len(z))])
    lists, targets = (others(cosines(x)) / tau for x, tau in zip((z, turned), temperatures, strict=True))
    return cross_entropy(lists.flatten(0, -2), targets.flatten(0, -2).softmax(dim=-1))


def cosines(x: Tensor) -> Tensor:
    """The cosines of the first view's sentences with those of each other view: (v, n, d) -> (v - 1, n, n)."""
    unit = normalize(x, dim=-1)
    return unit[0] @ unit[1:].mT


def others(square: Tensor) -> Tensor:
    """Square matrices without their diagonals: (..., n, n) -> (..., n, n - 1)."""
    n = square.shape[-1]
    return (
        square.flatten(-2)[..., 1:].unflatten(-1, (n - 1, n + 1))[..., :-1].reshape(*square.shape[:-1], n - 1)
    )
