"""Terms of a loss that encode more than the batch's embeddings: masked language modelling, and a teacher.

v: views    p: encoder passes    n: sentences    t: tokens of all sentences    m: tokens that are predicted
d: width    s_ij: cosine of sentences i and j

[1] Devlin et al., BERT, arXiv:1810.04805, section 3.1
[2] RankCSE, arXiv:2305.16726    [3] Cao et al., Learning to Rank (ListNet), ICML 2007
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM

from whitenedcse import ragged
from whitenedcse.compute import autocast_type, cores, full_precision
from whitenedcse.data.datamodule import Batch
from whitenedcse.model import packed
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder
from whitenedcse.ragged import Ragged
from whitenedcse.training.loss import Step
from whitenedcse.training.parallel import Manner, cut, encoded, gathered

IGNORED = -100  # the label of a token that is not predicted


def refuse_call(loss: Any) -> None:
    """Raise ValueError for a loss of the user's own that cannot be called as training does."""
    try:
        inspect.signature(getattr(loss, "forward", loss)).bind("z", None)
    except TypeError as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(
            f"loss {name}: {error}; it is called with the views and, if there are any, hard negatives, as in "
            "def __call__(self, z, negatives=None)"
        ) from error


def refuse_masking(weight: float, probability: float) -> None:
    """Raise ValueError for a weight of `MaskedLanguageModel` or a share of masked tokens out of bounds."""
    if not 0 < probability < 1:
        raise ValueError(f"mlm.probability={probability} must be in (0, 1)")
    if not 0 < weight < math.inf:
        raise ValueError(f"mlm.weight={weight} must be finite and above 0, or 0 to leave it out")


class MaskedLanguageModel(nn.Module):
    """The language-model head of the checkpoint (a new one where it has none) on the shared encoder.

    n sentences as a `Ragged` -> scalar cross-entropy over the masked tokens. Of the share `probability` of
    tokens chosen, 80 % become the mask token, 10 % a random one and 10 % stay [1]. Special tokens are never
    chosen. BERT and RoBERTa are not padded; on a CPU words are predicted for chosen tokens alone.
    Raises ValueError for a tokenizer without a mask token.

    >>> from transformers import BertConfig, BertModel
    >>> from whitenedcse.model.scratch import wordpiece
    >>> words = wordpiece(["the cat sees a bird"], vocabulary=40)
    >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    >>> bert = BertModel(BertConfig(vocab_size=len(words), **sizes), add_pooling_layer=False)
    >>> mlm = MaskedLanguageModel(encoder=Encoder(bert, words), weight=0.1, probability=0.5)
    >>> loss = mlm(ragged.ragged([words("the cat sees a bird").input_ids] * 8))
    >>> abs(loss.item() - torch.tensor(len(words)).log().item()) < 0.1  # an untrained head guesses
    True
    """

    special: Tensor

    def __init__(self, *, encoder: Encoder, weight: float, probability: float) -> None:
        super().__init__()
        refuse_masking(weight, probability)
        if encoder.tokenizer.mask_token_id is None:
            raise ValueError(
                f"mlm.weight={weight}, but this encoder's tokenizer has no mask token, as that of a decoder;"
                " use mlm.weight=0"
            )
        self.weight, self.probability = weight, probability
        self.tokenizer = encoder.tokenizer
        special = torch.tensor(encoder.tokenizer.all_special_ids)
        self.register_buffer(
            "special", special, persistent=False
        )  # made on the device it would be waited for
        if encoder.source is None:
            model: Any = AutoModelForMaskedLM.from_config(encoder.backbone.config)
        else:
            model = AutoModelForMaskedLM.from_pretrained(encoder.source, trust_remote_code=False).float()
        setattr(model, model.base_model_prefix, encoder.backbone)
        model.tie_weights()
        self.model, self.depth, self.attention = model, encoder.depth, encoder.attention

    def forward(self, batch: Ragged, seed: int = 0) -> Tensor:
        """The mean cross-entropy over the masked tokens of n sentences: a scalar; 0 if none is masked.

        Which tokens are masked is drawn from PyTorch's generator. seed: of dropout, where sentences are not
        padded.
        """
        ids, labels = self.masked(batch.ids)
        count = (labels != IGNORED).sum().clamp_min(1)
        device, way = ids.device.type, self.attention(ids.device)
        if way == "padded" or not packed.fits(self.model.base_model):
            padded = ragged.pad(batch._replace(ids=ids), self.tokenizer.pad_token_id or 0)
            logits = self.model(input_ids=padded, attention_mask=ragged.mask(batch).long()).logits
            return cross_entropy(ragged.unpad(logits, batch), labels) / count
        parallel, kind = way == "tiles" and cores() > 1, autocast_type(device)
        where = "cpu" if kind is None else device  # autocast knows no other device by name
        wanted = [batch._replace(ids=ids), batch._replace(ids=labels)]
        pieces, answers = (cut(x, cores())[0] if parallel else [x] for x in wanted)

        def total(piece: Ragged, number: int) -> Tensor:
            with torch.autocast(where, enabled=kind is not None, dtype=kind, cache_enabled=False):
                return self.total(piece, answers[number].ids, seed + number)

        sums = encoded(pieces, Manner(total, parallel, keep=True), self.parameters())
        return sums.sum() / count

    def total(self, batch: Ragged, labels: Tensor, seed: int) -> Tensor:
        """The sum of the cross-entropies of a batch without padding: labels (t,) -> (1,)."""
        hidden = packed.hidden(self.model.base_model, batch, [self.depth], first=False, seed=seed)[0]
        if labels.device.type == "cpu":  # how many are chosen, another device would be waited for to learn
            chosen = labels != IGNORED
            hidden, labels = hidden[chosen], labels[chosen]
        model: Any = self.model
        logits = (model.cls if hasattr(model, "cls") else model.lm_head)(hidden)
        return cross_entropy(logits, labels).unsqueeze(0)

    def masked(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids (t,) -> ids with some replaced (t,), and labels (t,), -100 where no token was chosen."""
        special = torch.isin(ids, self.special)
        draw, how = torch.rand(2, len(ids), device=ids.device)
        chosen = (draw < self.probability) & ~special
        labels = ids.masked_fill(~chosen, IGNORED)
        words = torch.randint_like(ids, len(self.tokenizer))
        replaced = torch.where(chosen & (how < 0.9), words, ids)
        return replaced.masked_fill(chosen & (how < 0.8), self.tokenizer.mask_token_id), labels


@full_precision
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross-entropies of the labels that are not -100, in float32 or float64.

    logits: (t, words), labels: (t,) int64 -> scalar.

    >>> cross_entropy(torch.zeros(3, 10), torch.tensor([4, -100, 7]))  # equal logits of ten words: 2 log 10
    tensor(4.6052)
    """
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


class Teacher:
    """A term of the loss: of each sentence, the others are to be as similar as a teacher finds them.

    Let s be the cosines of the views z, t those of the teacher's embeddings, a = temperature, and b =
    teacher_temperature. For the anchor's sentences i and those of another view, j, the term is

        mean over i of -sum over j != i of softmax_j(t_ij / b) log softmax_j(s_ij / a)

    averaged over the other views: ListNet's cross-entropy of top-one probabilities [3], by which [2] distils
    rankings. The paper of [2] could not be read here, and so no equation of it is named: the form and the
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
                "the teacher's path is null: TEACHER=outputs/NAME whitenedcse train +system=teacher"
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
    return F.cross_entropy(lists.flatten(0, -2), targets.flatten(0, -2).softmax(dim=-1))


def cosines(x: Tensor) -> Tensor:
    """The cosines of the first view's sentences with those of each other view: (v, n, d) -> (v - 1, n, n)."""
    unit = F.normalize(x, dim=-1)
    return unit[0] @ unit[1:].mT


def others(square: Tensor) -> Tensor:
    """Square matrices without their diagonals: (..., n, n) -> (..., n, n - 1)."""
    n = square.shape[-1]
    return (
        square.flatten(-2)[..., 1:].unflatten(-1, (n - 1, n + 1))[..., :-1].reshape(*square.shape[:-1], n - 1)
    )
