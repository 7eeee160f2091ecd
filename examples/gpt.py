"""A small GPT, and the text that it learns: the help pages that Python ships. For transformer.py and fsdp.py."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn

WIDTH, HEADS, LAYERS, LENGTH = 128, 4, 3, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        y = self.before(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.after(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> Any:
        """tokens: (rows, length), with a length up to LENGTH -> the logits of the next bytes, (rows, length, 256)."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def text() -> Any:
    """Return the bytes of the text, (rows, LENGTH) int64; each row is a sample."""
    characters = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8)
    return characters[: len(characters) // LENGTH * LENGTH].view(-1, LENGTH).long()
