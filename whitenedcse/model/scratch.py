"""Encoders with random weights, and tokenizers made from a corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from whitenedcse.data.corpus import Corpus, read
from whitenedcse.data.sources import located
from whitenedcse.model.encoder import Batches, Encoder
from whitenedcse.model.lora import LoRA

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
SAMPLE = 100_000  # sentences that a BPE tokenizer is made from


def small_bert(  # noqa: PLR0913  the settings of one YAML group, by name
    *,
    corpus: str = "quickstart",
    columns: Sequence[str] = (),
    vocabulary: int = 4000,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
    pieces: Literal["words", "bpe"] = "words",
    batches: Batches = "auto",
    lora: LoRA | None = None,
) -> Encoder:
    """A BERT with random weights, and a tokenizer made from the corpus.

    pieces: "words" is `wordpiece`, whole words and letters, which suits a small corpus; "bpe" `byte_pairs`.
    """
    rows, _ = read(Corpus(str(located(corpus)), tuple(columns)))
    tokenizer = {"words": wordpiece, "bpe": byte_pairs}[pieces](chain.from_iterable(rows), vocabulary)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=tokenizer.model_max_length,
    )
    return Encoder(BertModel(config, add_pooling_layer=False), tokenizer, batches=batches, lora=lora)


def wordpiece(sentences: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A lower-casing WordPiece tokenizer of at most `vocabulary` entries: letters, the commonest words."""
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    counts = Counter(
        word for text in sentences for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
    )
    letters = sorted(set().union(*counts))
    tokens = [*SPECIAL.values(), *letters, *(f"##{letter}" for letter in letters)]
    words = sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))
    tokens += words[: max(0, vocabulary - len(tokens))]
    model = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    model.normalizer, model.pre_tokenizer = normalizer, splitter
    return fast(model)


def byte_pairs(sentences: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A lower-casing byte-level BPE tokenizer of about `vocabulary` entries, from the first sentences."""
    model = Tokenizer(models.BPE())
    model.normalizer = normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings: Any = {
        "initial_alphabet": letters,
        "special_tokens": [*SPECIAL.values()],
        "show_progress": False,
    }
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, **settings)
    model.train_from_iterator(islice(sentences, SAMPLE), trainer)
    return fast(model)


def fast(model: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of Transformers that puts [CLS] before each sentence and [SEP] after it."""
    model.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name}_token": token for name, token in SPECIAL.items()}
    return PreTrainedTokenizerFast(tokenizer_object=model, model_max_length=128, **names)
