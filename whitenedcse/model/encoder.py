"""The encoder: a Transformers backbone as one function of a ragged batch.

n: sentences    t: tokens of all sentences    l: longest sentence    d: width    k: layers asked for

A property that no setting of a backbone states is found by computing a few tokens, once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from itertools import chain, islice, pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from whitenedcse import ragged
from whitenedcse.data.remote import fetched, is_url
from whitenedcse.data.sources import SECONDS
from whitenedcse.files import DIGESTS, intact, metadata, parsing
from whitenedcse.inputs import expanded
from whitenedcse.model import packed
from whitenedcse.model.attention import way
from whitenedcse.model.lora import LoRA
from whitenedcse.ragged import Ragged

Batches = Literal["auto", "packed", "padded"]
WEIGHTS = r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)"  # of Transformers
SETTINGS = (".json", ".txt", ".model", ".jinja")  # the files of config and tokenizer
FEW = 8  # tokens of a sentence that is computed to find something out
# the Python code of an encoder never runs; without this, the user is asked whether it may
OWN: Any = {"trust_remote_code": False}
CHANGED = f"copy the checkpoint again or, if the change is yours, delete the {DIGESTS} beside it"
KNOWN = "take an encoder that Transformers knows"
BELONG = (
    "an encoder is a directory with config.json, model.safetensors and tokenizer.json that belong together: "
    "copy or download it again"
)


class Encoder(nn.Module):
    """A Transformers backbone as a function of a ragged batch, its tokenizer, and the directory of both.

    Padding happens here alone. The length limit is the tokenizer's, or else the config's, but never above the
    number of positions, and the tokenizer's limit is set to it.
    batches: "packed" computes on the tokens alone (BERT and RoBERTa), "padded" is Transformers' own way, and
        "auto" is packed for an architecture that allows it.
    lora: low-rank adapters, which then train in place of the backbone's weights.
    """

    compiled = False  # whether layers are computed by torch.compile while they train

    def __init__(
        self,
        backbone: nn.Module,
        tokenizer: Any,
        source: Path | None = None,
        batches: Batches = "auto",
        lora: LoRA | None = None,
    ) -> None:
        super().__init__()
        quiet()
        self.source = source
        self.batches = chosen(batches, backbone)
        if lora is not None:
            lora.adapt(backbone)
        self.backbone: Any = backbone
        self.tokenizer = padded_right(tokenizer)
        config: Any = backbone.config
        self.width: int = config.hidden_size
        self.depth: int = config.num_hidden_layers
        self.max_length = tokenizer.model_max_length = longest(self.backbone, tokenizer.model_max_length)
        check_tokenizer(tokenizer, self.backbone, source)

    def forward(
        self, batch: Ragged, layers: Sequence[int], *, first: bool = False, seed: int | None = None
    ) -> Tensor:
        """Hidden states (k, t, d) of the layers asked for, 0 being the embedding layer.

        first: those of first tokens only, (k, n, d). seed: of dropout, where `parallel`.
        """
        wanted = [self.layer(layer) for layer in layers]
        if self.attention(batch.ids.device) != "padded":
            compiled = self.compiled and self.training
            return packed.hidden(self.backbone, batch, wanted, first=first, seed=seed, compiled=compiled)
        mask, every = ragged.mask(batch).long(), wanted != [self.depth]
        padded = ragged.pad(batch, self.tokenizer.pad_token_id or 0)
        out = self.backbone(input_ids=padded, attention_mask=mask, output_hidden_states=every)
        hidden = [out.hidden_states[layer] if every else out.last_hidden_state for layer in wanted]
        return torch.stack([layer[:, 0] if first else ragged.unpad(layer, batch) for layer in hidden])

    def attention(self, device: torch.device) -> str:
        """How attention is computed on a device: "tiles", "unpadded" or "padded" (see `attention.way`)."""
        if self.batches == "padded":
            return "padded"
        width = self.width // self.backbone.config.num_attention_heads
        return way(device.type, width, next(self.backbone.parameters()).dtype)

    @property
    def parallel(self) -> bool:
        """Whether pieces of a batch may be encoded in parallel threads: true for packed batches on a CPU.

        Their dropout is a function of a seed; PyTorch's generator is shared by all threads.
        """
        return self.attention(self.backbone.device) == "tiles"

    @cached_property
    @torch.no_grad()
    def causal(self) -> bool:
        """Whether the first token attends to no later token, as in a decoder.

        Transformers has no common setting for that: two sentences of other tokens are encoded and compared.
        """
        if packed.fits(self.backbone):
            return False
        first, other = self.ordinary
        rows = ([first] * FEW, [first] + [other] * (FEW - 1))
        with still(self):
            one, two = (self(self.few(row), [-1], first=True) for row in rows)
        return torch.equal(one, two)

    @property
    def one_token(self) -> str:
        """The pooling that takes the token which has seen the whole sentence: "cls", or "last" if causal."""
        return "last" if self.causal else "cls"

    def unread(self, layers: Sequence[int]) -> list[nn.Parameter]:
        """The weights that `layers` do not depend on: of layers above, a final norm, or without use here.

        Found by following the gradient. A pooler is none, nor are experts that no tried token reaches.
        """
        batch = self.few(self.ordinary * (FEW // 2))
        with still(self), torch.enable_grad():
            read, every = behind(self(batch, layers)), behind(self(batch, [-1]))
        return [
            weight
            for name, weight in self.named_parameters()
            if weight not in read and (weight in every or not ("pooler" in name or "expert" in name))
        ]

    @property
    def ordinary(self) -> list[int]:
        """Two token ids of the vocabulary, not of special tokens if there are others."""
        special = self.tokenizer.all_special_ids
        every = range(len(self.backbone.get_input_embeddings().weight))
        return list(islice(chain((i for i in every if i not in special), special), 2))

    def few(self, row: Sequence[int]) -> Ragged:
        """A batch of one sentence, on the encoder's device and cut to its length limit."""
        return ragged.ragged([row[: self.max_length]]).to(next(self.parameters()).device)

    def layer(self, index: int) -> int:
        """The number of a layer counted from the embeddings: -1 -> depth; ValueError for no such layer."""
        if not -self.depth - 1 <= index <= self.depth:
            raise ValueError(f"layer {index} does not exist: this encoder has layers 0 to {self.depth}")
        return index % (self.depth + 1)

    @property
    def pooler_layer(self) -> nn.Linear | None:
        """The dense layer of the checkpoint's own pooler, which tanh follows; None without such a pooler."""
        return getattr(getattr(self.backbone, "pooler", None), "dense", None)

    def pooler(self, x: Tensor) -> Tensor:
        """The checkpoint's own pooler (dense, tanh) of first tokens: (n, d) -> (n, d)."""
        return self.backbone.pooler(x.unsqueeze(1))

    def provenance(self, path: str) -> dict[str, str | None]:
        """Where it comes from: path or hub id, the hub's commit, and its architecture, as "bert 12 x 768"."""
        places = () if self.source is None or Path(path).is_dir() else self.source.parts
        commit = next((after for at, after in pairwise(places) if at == "snapshots"), None)
        kind = self.backbone.config.model_type
        return {"path": path, "commit": commit, "architecture": f"{kind} {self.depth} x {self.width}"}


def chosen(batches: Batches, backbone: nn.Module) -> str:
    """The kind of batches for this backbone: "packed" or "padded". Raises ValueError if it is impossible."""
    fits = packed.fits(backbone)
    if batches not in get_args(Batches) or (batches == "packed" and not fits):
        known = f"{', '.join(get_args(Batches))}; packed is for {', '.join(packed.KINDS)}"
        raise ValueError(f"encoder.batches={batches!r} for {type(backbone).__name__} is not one of {known}")
    return "packed" if batches != "padded" and fits else "padded"


def padded_right(tokenizer: Any) -> Any:
    """The tokenizer, changed in place to pad on the right, with its end token if it has no padding token."""
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"  # the latter is what it saves
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def behind(x: Tensor) -> set[Tensor]:
    """The weights that a gradient of x reaches."""
    ahead: list[Any] = [x.grad_fn]
    seen: set[Any] = {None}
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += [further for further, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}


@contextmanager
def still(whole: nn.Module) -> Iterator[None]:
    """A context in which a module is in eval mode; then each of its modules has its own mode again."""
    training = [module for module in whole.modules() if module.training]
    whole.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def pretrained(path: str, *, batches: Batches = "auto", lora: LoRA | None = None) -> Encoder:
    """The encoder in a local directory or with a hub id, in float32; a pooler without weights is removed.

    batches: "packed" without padding, "padded" as Transformers does, or "auto" for packed where possible.
    lora: adapters to train instead of the weights. Raises FileNotFoundError if there is no such encoder, and
    ValueError if weights are missing or a file differs from its digest in digests.json.
    """
    source = folder(path)
    intact(source, CHANGED)
    quiet()
    for file in sorted(source.glob("*.safetensors")):
        metadata(file)
    try:
        backbone, info = AutoModel.from_pretrained(source, output_loading_info=True, **OWN)
        tokenizer = AutoTokenizer.from_pretrained(source, **OWN)
    except Exception as error:  # the kinds that Transformers raises share no class
        if "trust_remote_code" in str(error):
            raise ValueError(f"{path} is Python code of its own, which is not run here; {KNOWN}") from error
        cure = f"; {BELONG}" * (not isinstance(error, ImportError))  # which names the package itself
        raise ValueError(f"{path}: {error!s:.400}{cure}") from error
    check_reads_text(backbone, source)
    prefix = f"{backbone.base_model_prefix}."  # on the names in older releases of Transformers
    missing = {name.removeprefix(prefix) for name in info["missing_keys"] if "position_ids" not in name}
    if any(name.startswith("pooler.") for name in missing):
        backbone.pooler = None
    if absent := sorted(name for name in missing if not name.startswith("pooler.")):
        kind, few = type(backbone).__name__, ", ".join(absent[:3])
        raise ValueError(f"{path} lacks {len(absent)} weights of {kind}: {few}")
    with parsing(source, BELONG, ValueError):
        return Encoder(backbone.float(), tokenizer, source, batches, lora)


def check_reads_text(backbone: Any, source: Path) -> None:
    """Raise ValueError for a model that is no encoder of text."""
    decodes = "decoder_input_ids" in signature(backbone.forward).parameters
    reads = getattr(backbone, "main_input_name", "input_ids")
    if decodes or reads != "input_ids" or not hasattr(backbone.config, "hidden_size"):
        kind = f"{backbone.config.model_type} is no encoder of text alone"
        raise ValueError(f"{source}: {kind}; take one, as BERT")


def longest(backbone: Any, limit: float) -> int:
    """The most tokens that a backbone takes: the tokenizer's limit, or the positions if they are fewer."""
    positions = getattr(backbone.config, "max_position_embeddings", 512)
    positions = positions if positions > 0 else 512  # XLNet says -1, for no limit
    tables = (name for name, part in backbone.named_modules() if isinstance(part, nn.Embedding))
    if limit >= 1e6 or any("position" in name or name.endswith("wpe") for name in tables):
        limit = min(limit, positions)
    table = getattr(getattr(backbone, "embeddings", None), "position_embeddings", None)
    if table is None:
        return int(limit)
    return min(int(limit), len(table.weight) - (0 if table.padding_idx is None else table.padding_idx + 1))


def check_tokenizer(tokenizer: Any, backbone: Any, source: Path | None) -> None:
    """Raise ValueError for a tokenizer without words, or of ids without an embedding."""
    words, rows = tokenizer.get_vocab(), len(backbone.get_input_embeddings().weight)
    if set(words) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{source} has no tokenizer.json or vocab.txt with words; copy its files there")
    if (entries := max(words.values()) + 1) > rows:
        raise ValueError(f"{source}: {entries} entries of the tokenizer and {rows} embeddings; {BELONG}")


def quiet() -> None:
    """Switch off Transformers' reports and progress bars: what matters in them is raised here as an error."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def of_run(path: str, place: Path) -> Path:
    """The best checkpoint of a run, or another directory; FileNotFoundError for what can be no encoder."""
    if (place / "best").is_dir():
        return place / "best"
    if (place / "config.json").exists():
        return place
    if (place / "config.yaml").is_file():
        raise FileNotFoundError(f"{path} is a run without a checkpoint; its command, repeated, resumes it")
    if (place / "0" / "best").is_dir():
        raise FileNotFoundError(f"{path} is a sweep: name one of its runs, such as {path}/0")
    return place


def folder(path: str) -> Path:
    """The local directory of a checkpoint, of a run its best: the path, or a copy of a URL's or the hub's."""
    if (place := Path(path := expanded(path))).is_dir() or is_url(path):
        return of_run(path, fetched(path))
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) or path.startswith("."):
        what = "it is a file; name its directory" if place.is_file() else "there is no such directory"
        raise FileNotFoundError(f"no encoder in {path}: {what} (looked in {place.absolute()})")
    client = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        listed = [file.rfilename for file in client.model_info(path, timeout=SECONDS).siblings or []]
        reason = "its download was interrupted"
    except Exception as error:  # the hub client raises a dozen kinds
        reason, listed = type(error).__name__, None
    try:  # without an answer from the hub, whatever the cache holds beside these
        patterns = [f"*{suffix}" for suffix in SETTINGS] if listed is None else needed(listed)
        settings: Any = {"etag_timeout": SECONDS, "local_files_only": listed is None}
        return Path(client.snapshot_download(path, allow_patterns=patterns, **settings))
    except Exception:
        where = (
            f"no directory {place.absolute()}, not in the hub cache, and the hub did not give it ({reason})"
        )
        raise FileNotFoundError(f"encoder {path}: {where}; name a local directory instead") from None


def needed(names: Iterable[str]) -> list[str]:
    """The files of a repository to download: no other library's, and no pickles beside safetensors."""
    files = [PurePosixPath(name) for name in names]
    weights = [file for file in files if re.fullmatch(WEIGHTS, file.name)]
    safe = {file.parent for file in weights if file.suffix == ".safetensors"}
    kept = [file for file in weights if file.suffix == ".safetensors" or file.parent not in safe]
    return [
        str(file) for file in files if file in kept or file.suffix in (".json", ".txt", ".model", ".jinja")
    ]
