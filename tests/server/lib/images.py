"""A tiny target with an image encoder, its draft, and prompts with images as SGLang and Transformers read them.

The vocabulary has 128 words: `w004` to `w123`, the tokens of an image, and those of a chat. A text has no spaces.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from tokenizers import Tokenizer, models
from torch import nn

from sglang_dflash.pairs.tiny.pairs import HYBRID_FLAGS, Pair
from sglang_dflash.reference.torch.target import states_of, target_features
from sglang_dflash.train.draft import Data, Settings, train_draft
from sglang_dflash.train.features import Reading
from sglang_dflash.train.loop import TrainRecipe
from sglang_dflash.train.text import padded
from sglang_dflash.train.tokens import Rows, Tokens
from tests.server.lib.families import (
    DENSE_MLP,
    END,
    FEATURE_LAYERS,
    GATED_DELTA_NET,
    IMAGES,
    MASK,
    MROPE,
    NO_WARMUP,
    VISION,
    VOCABULARY,
    Family,
    draft_config,
    make_target,
)  # fmt: skip
from tests.server.lib.rehearsals import FA3, GRAPHS
from tests.server.lib.variants import TRACK

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
NAMES = {
    0: "<pad>", 1: "<|im_start|>", END: "<|im_end|>", MASK: "<mask>", IMAGES["vision_end_token_id"]: "<|vision_end|>",
    IMAGES["vision_start_token_id"]: "<|vision_start|>", IMAGES["video_token_id"]: "<|video_pad|>",
    IMAGES["image_token_id"]: "<|image_pad|>",
}  # fmt: skip
WORDS = range(MASK + 1, VOCABULARY - len(IMAGES))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}" + IMAGE + "{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
# No features of the image encoder's inner layers: SGLang computes them by a kernel for GPUs.
ENCODER = VISION | {"deepstack_visual_indexes": []}
PATCH = ENCODER["patch_size"] * ENCODER["spatial_merge_size"]  # pixels of a token's side
SIZES = ((2 * PATCH, 2 * PATCH), (4 * PATCH, 2 * PATCH), (2 * PATCH, 3 * PATCH))  # width and height
FAMILY = Family(
    "Qwen3_5ForConditionalGeneration", "Qwen3_5Config", DENSE_MLP | GATED_DELTA_NET | MROPE, vision=True,
    outer={"vision_config": ENCODER, **IMAGES},
)  # fmt: skip
RECIPE = TrainRecipe(steps=100, learning_rate=4e-3, warmup_steps=20)
N_ANSWER = 40
FLAGS = (*NO_WARMUP, *HYBRID_FLAGS, *TRACK, "--mm-attention-backend", "sdpa")
CAPTURED = (*FLAGS, *FA3, *GRAPHS)


class Prompt(NamedTuple):
    """Text with `IMAGE` in the place of each image."""

    text: str
    images: tuple[Image.Image, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """Return the further fields of a `/generate` request."""
        return {"image_data": [as_url(image) for image in self.images]} if self.images else {}


def as_url(image: Image.Image) -> str:
    """Return the image as a PNG data URL."""
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def image(random: Random) -> Image.Image:
    """Return an image of coloured tiles, one per token."""
    width, height = random.choice(SIZES)
    tiles = Image.new("RGB", (width // PATCH, height // PATCH))
    tiles.putdata([tuple(random.choices(range(256), k=3)) for _ in range(tiles.width * tiles.height)])
    return tiles.resize((width, height), Image.Resampling.NEAREST)


def words(random: Random, n: int) -> str:
    return "".join(f"w{random.choice(WORDS):03}" for _ in range(n))


def prompts(seed: int, n_images: Sequence[int]) -> list[Prompt]:
    """Return a prompt for each number of images. Words lie before, between and after the images."""
    random = Random(seed)
    return [
        Prompt(
            IMAGE.join(words(random, random.randint(20, 40)) for _ in range(n + 1)),
            tuple(image(random) for _ in range(n)),
        )
        for n in n_images
    ]


def make_processor() -> transformers.ProcessorMixin:
    """Return a processor whose tokenizer knows one word per token of the vocabulary."""
    vocabulary = {NAMES.get(i, f"w{i:03}"): i for i in range(VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [])), pad_token="<pad>", eos_token=NAMES[END],
        additional_special_tokens=list(NAMES.values()),
    )  # fmt: skip
    # Transformers reads a Qwen3.5 tokenizer as byte-level BPE, and only added tokens stay as they are.
    tokenizer.add_tokens([name for name in vocabulary if name.startswith("w")])
    tokenizer.chat_template = CHAT_TEMPLATE
    sizes = {key: ENCODER[key] for key in ("patch_size", "temporal_patch_size")}
    images = transformers.Qwen2VLImageProcessor(merge_size=ENCODER["spatial_merge_size"], **sizes)
    videos = transformers.Qwen3VLVideoProcessor(merge_size=ENCODER["spatial_merge_size"], **sizes)
    return transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def write_seeing_pair(folder: Path, prompts: Sequence[Prompt]) -> Pair:
    """Write a Qwen3.5 target with an image encoder, its processor, and a draft trained on the answers to `prompts`."""
    pair = Pair(folder / "target", folder / "draft")
    target, processor = make_target(FAMILY), make_processor()
    target.save_pretrained(pair.target)
    processor.save_pretrained(pair.target)
    rows, reading = texts(target, processor, prompts)
    data = Data(rows_at=lambda step: rows, held_out=[rows], prompts=[], facts={})
    train_draft(
        target, draft_config(), data, RECIPE, out=pair.draft, settings=Settings(n_anchors=16), dtype=target.dtype,
        read=lambda rows: reading,
    )  # fmt: skip
    return pair


def texts(
    target: transformers.PreTrainedModel, processor: transformers.ProcessorMixin, prompts: Sequence[Prompt]
) -> tuple[Rows, Reading]:
    """Return the prompts with the target's greedy answers, and what the target reads in them."""
    documents, readings = [], []
    for prompt in prompts:
        ids_1S, further = read(processor, prompt)
        answered = continued(target, ids_1S, further, N_ANSWER)
        n_more = answered.shape[1] - ids_1S.shape[1]
        if further:
            further = further | {"mm_token_type_ids": F.pad(further["mm_token_type_ids"], (0, n_more))}
        with torch.no_grad():
            out, states = states_of(target, input_ids=answered, use_cache=False, **further)
        documents.append(Tokens(answered[0].tolist(), [False] * ids_1S.shape[1] + [True] * n_more))
        readings.append((out.logits[0].argmax(-1), target_features(states, FEATURE_LAYERS)[0]))
    choices, features = zip(*readings, strict=True)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return padded(documents, pad_id=0), (pad(choices), pad(features))


def continued(
    target: transformers.PreTrainedModel, ids_1S: torch.Tensor, further: Mapping[str, torch.Tensor], n_tokens: int
) -> torch.Tensor:
    """Return the prompt with `n_tokens` more of Transformers' greedy answer, int64 [1, S + n]. No token ends it."""
    target.generation_config.eos_token_id = None
    with torch.inference_mode():
        ids = target.generate(
            input_ids=ids_1S,
            attention_mask=torch.ones_like(ids_1S),
            do_sample=False,
            max_new_tokens=n_tokens,
            **further,
        )
    return ids.clone()  # a normal tensor, which training can use


def read(processor: transformers.ProcessorMixin, prompt: Prompt) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Return the prompt's tokens, int64 [1, S], and the other inputs of a model, such as pixels."""
    inputs = dict(processor(text=[prompt.text], images=list(prompt.images) or None, return_tensors="pt"))
    ids_1S, _ = inputs.pop("input_ids"), inputs.pop("attention_mask")
    return ids_1S, inputs if prompt.images else {}
