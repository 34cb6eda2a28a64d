"""The files of a checkpoint that say what kind of encoder it is, read without mlx and without a weight.

sentence-transformers writes a list of modules beside a transformer's files: how token vectors become one vector, what
becomes of that, the length at which texts are cut, and prompts that stand in front of them. A cross-encoder says the same in
``config.json``. What is unknown there is refused by name, because the usual thing in its place gives vectors that look right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from machd.engine.backend.model_files import read_object, shortened
from machd.engine.backend.own_code import OwnCode
from machd.engine.encoding.families import FAMILIES, EncoderFamily
from machd.engine.encoding.sentence_modules import (
    DenseModule,
    PoolingModule,
    SentenceModules,
    read_modules,
)
from machd.engine.loading.formats.checkpoint import Checkpoint, read_directory
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.encoder import Activation, EncoderDescription, EncoderTask
from machd.errors import ModelArchitectureError, ModelFormatError

_TRANSFORMER = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_HEAD = "ForSequenceClassification"
_MAX_LABELS = 1 << 16
_MAX_LABEL_CHARS = 1_000
_MAX_PROMPTS = 1_000
_MAX_PROMPT_CHARS = 1 << 16
_LARGEST_LENGTH = 1 << 24
"""More tokens than any encoder takes; larger numbers stand for "no limit" in tokenizer_config.json."""

_ACTIVATIONS = {
    "Sigmoid": Activation.SIGMOID,
    "Identity": Activation.NONE,
    "Softmax": Activation.SOFTMAX,
}


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """The files of an encoder, which agree with each other.

    Attributes:
        checkpoint: Configuration and headers of the weights.
        description: What comes of a text.
        family: Its family.
        modules: What becomes of the token vectors; of a classifier nothing.
        lowercases: Texts are put into lower case before the tokenizer.
        strips: White space around a text is taken away before.
        notes: What an operator should know.
    """

    checkpoint: Checkpoint
    description: EncoderDescription
    family: EncoderFamily
    modules: SentenceModules = field(default_factory=SentenceModules)
    lowercases: bool = False
    strips: bool = False
    notes: tuple[str, ...] = ()

    @property
    def is_classifier(self) -> bool:
        """True for a model with a classification head."""
        return self.description.task is EncoderTask.CLASSIFY


def find_encoder(source: ModelSource) -> EncoderFiles | None:
    """Read an encoder's files; None for a model that generates text.

    Raises:
        ModelError: One of its kinds: an encoder's files that contradict each other, or ask for what machd does not do.
    """
    if source.kind is not SourceKind.DIRECTORY:
        return None
    config = read_object(source.path / "config.json")
    if config is None:
        return None  # whoever opens it as a model says what is missing
    modules = read_modules(source.path)
    heads = [one for one in _texts(config.get("architectures")) if one.endswith(_HEAD)]
    family = FAMILIES.get(str(config.get("model_type")))
    has_pooling = modules is not None and modules.pooling is not None
    if not (has_pooling or heads or (family is not None and family.is_encoder_only)):
        return None
    if family is None:
        raise ModelArchitectureError(
            f"model_type {shortened(str(config.get('model_type')))}: machd has no such encoder; it has "
            f"{', '.join(sorted(FAMILIES))}"
        )
    family.refuse_other_values(config)
    read = _Reader(source.path, config, family)
    if has_pooling:
        assert modules is not None
        assert modules.pooling is not None
        description = read.embedder(modules, modules.pooling)
    elif heads:
        modules, description = SentenceModules(), read.classifier(heads[0])
    else:
        raise ModelFormatError(
            f"{source.path.name} holds a {family.model_type}, and no modules.json with a Pooling: which vector stands for a "
            "text is not said; take the checkpoint as sentence-transformers wrote it, with its folders"
        )
    # Code of its own would build the model in transformers, and is not looked at.
    checkpoint = read_directory(source.path, OwnCode.NEVER_RUN)
    return EncoderFiles(
        checkpoint,
        description,
        family,
        modules,
        lowercases=read.lowercases(),
        notes=read.notes(),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads what a description needs from the files of one checkpoint."""

    directory: Path
    config: Mapping[str, object]
    family: EncoderFamily

    def embedder(self, modules: SentenceModules, pooling: PoolingModule) -> EncoderDescription:
        """Describe a model with a pooling module."""
        hidden = _whole(self.config, "hidden_size", "config.json")
        if pooling.dimensions not in (None, hidden):
            raise ModelFormatError(
                f"{pooling.name} says vectors of {pooling.dimensions}, and config.json hidden_size = {hidden}"
            )
        dimensions = hidden * len(pooling.modes)
        for one in modules.after:
            if isinstance(one, DenseModule):
                if one.in_features != dimensions:
                    raise ModelFormatError(
                        f"{one.name} takes vectors of {one.in_features}, and those before it have {dimensions}"
                    )
                dimensions = one.out_features
        is_bidirectional = (
            self.config.get("use_bidirectional_attention") is True
            or self.config.get("is_causal") is False
        )
        said = self._sentence_transformers()
        prompts, default_prompt = _prompts(said)
        return EncoderDescription(
            task=EncoderTask.EMBED,
            pooling="+".join(pooling.modes),
            is_normalised=modules.is_normalised,
            dimensions=dimensions,
            max_input_tokens=self._max_input_tokens()[0],
            is_causal=self.family.is_causal and not is_bidirectional,
            prompts=prompts,
            default_prompt=default_prompt,
            has_shorter_vectors=_is_matryoshka(self.config) or _is_matryoshka(said),
        )

    def classifier(self, head: str) -> EncoderDescription:
        """Describe a model with a classification head."""
        if head not in self.family.classifiers:
            known = (name for one in FAMILIES.values() for name in one.classifiers)
            raise ModelArchitectureError(
                f"{shortened(head)}: machd has no such classifier; it has {', '.join(known)}"
            )
        labels, said = _labels(self.config), self._sentence_transformers()
        prompts, default_prompt = _prompts(said)
        return EncoderDescription(
            task=EncoderTask.CLASSIFY,
            pooling="",
            is_normalised=False,
            dimensions=len(labels),
            max_input_tokens=self._max_input_tokens()[0],
            labels=labels,
            activation=_activation(self.config, said, len(labels)),
            prompts=prompts,
            default_prompt=default_prompt,
        )

    def lowercases(self) -> bool:
        """Tell whether sentence-transformers puts texts into lower case, and the tokenizer does not."""
        wanted = self._transformer().get("do_lower_case") is True
        return wanted and not _has_lowercase(self.directory)

    def notes(self) -> tuple[str, ...]:
        """Say where the files ask for longer texts than the model takes."""
        most, said, name = self._max_input_tokens()
        if said is None or said <= most:
            return ()
        return (
            f"{name} says texts of {said} tokens, and the model has positions for {most}: texts are cut there",
        )

    def _max_input_tokens(self) -> tuple[int, int | None, str]:
        """Find the length at which texts are cut, what the files say, and the file that says it."""
        positions = _whole(self.config, "max_position_embeddings", "config.json")
        if self.family.has_padded_positions:
            tokens = _whole(self.config, "vocab_size", "config.json")
            padding = _whole(
                self.config, "pad_token_id", "config.json", least=0, most=tokens - 1, default=1
            )
            positions -= padding + 1
        if positions < 1:
            raise ModelFormatError("config.json leaves no position for a token")
        name = _TRANSFORMER
        said = _limit(self._transformer(), "max_seq_length", name)
        if said is None:
            name = "tokenizer_config.json"
            said = _limit(read_object(self.directory / name) or {}, "model_max_length", name)
        return positions if said is None else min(said, positions), said, name

    def _transformer(self) -> Mapping[str, object]:
        found = read_object(self.directory / _TRANSFORMER) or {}
        task = found.get("transformer_task", "feature-extraction")
        if task not in ("feature-extraction", "sequence-classification"):
            raise ModelFormatError(
                f"{_TRANSFORMER} says transformer_task = {shortened(str(task))}, which machd has not"
            )
        return found

    def _sentence_transformers(self) -> Mapping[str, object]:
        return read_object(self.directory / _PROMPTS) or {}


def _limit(values: Mapping[str, object], key: str, name: str) -> int | None:
    """Read a length; None where there is none, or one that stands for no limit."""
    value = values.get(key)
    if value is None or (isinstance(value, int | float) and value >= _LARGEST_LENGTH):
        return None
    return _whole(values, key, name)


def _has_lowercase(directory: Path) -> bool:
    """Tell whether the tokenizer makes letters small."""
    waiting = [(read_object(directory / "tokenizer.json") or {}).get("normalizer")]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if one.get("type") == "Lowercase" or one.get("lowercase") is True:
                return True
            parts = one.get("normalizers")
            waiting += parts if isinstance(parts, list) else []
    return False


def _labels(config: Mapping[str, object]) -> tuple[str, ...]:
    names = config.get("id2label")
    if names is None:
        count = _whole(config, "num_labels", "config.json", default=2, most=_MAX_LABELS)
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(names, dict) or not 0 < len(names) <= _MAX_LABELS:
        raise ModelFormatError("config.json: id2label is no list of labels")
    try:
        labels = [names[str(index)] for index in range(len(names))]
    except KeyError as error:
        raise ModelFormatError(
            f"config.json: id2label has {len(names)} labels and none of number {error.args[0]}"
        ) from error
    # Old cross-encoders number them: {"0": 0}.
    texts = tuple(shortened(str(one), _MAX_LABEL_CHARS) for one in labels)
    if len(texts) > 1 and len(set(texts)) < len(texts):
        raise ModelFormatError("config.json: id2label has a label twice")
    return texts


def _activation(
    config: Mapping[str, object], said: Mapping[str, object], labels: int
) -> Activation:
    """Find what makes a score of a logit: as sentence-transformers has it, or by the kind of problem."""
    nested = config.get("sentence_transformers")
    place = nested if isinstance(nested, dict) else {}
    name = place.get("activation_fn", config.get("sbert_ce_default_activation_function"))
    name = said.get("activation_fn") if name is None else name
    if name is not None:
        kind = str(name).rpartition(".")[2]
        if kind not in _ACTIVATIONS or not str(name).startswith("torch."):
            raise ModelFormatError(
                f"the activation {shortened(str(name))} of the scores is unknown; known are {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[kind]
    problem = config.get("problem_type")
    if problem == "regression":
        return Activation.NONE
    is_each = labels == 1 or problem == "multi_label_classification"
    return Activation.SIGMOID if is_each else Activation.SOFTMAX


def _prompts(said: Mapping[str, object]) -> tuple[dict[str, str], str | None]:
    prompts = said.get("prompts") or {}
    if (
        not isinstance(prompts, dict)
        or len(prompts) > _MAX_PROMPTS
        or not all(
            isinstance(one, str) and len(one) <= _MAX_PROMPT_CHARS
            for one in (*prompts, *prompts.values())
        )
    ):
        raise ModelFormatError(f"{_PROMPTS}: prompts is no object of names and texts")
    default = said.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelFormatError(f"{_PROMPTS}: default_prompt_name is none of the prompts")
    return prompts, default if isinstance(default, str) else None


def _is_matryoshka(values: Mapping[str, object]) -> bool:
    return values.get("is_matryoshka") is True or bool(values.get("matryoshka_dimensions"))


def _whole(
    values: Mapping[str, object],
    key: str,
    name: str,
    *,
    least: int = 1,
    most: int = _LARGEST_LENGTH,
    default: int | None = None,
) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ModelFormatError(
            f"{name} says {key} = {shortened(str(value))}, and a whole number from {least} to {most} is needed"
        )
    return value


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
