"""A checkpoint that knows what was read of it: what no layer asked for is a sign that the files are another model's.

Knows the names that files are known to bring along without need, and no architecture.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from tgi.errors import StartupError
from tgi.server.weights.checkpoint import Checkpoint
from tgi.server.weights.region import Region

# Constants that older files keep beside the weights, tables tied to another tensor, scales of a quantised cache.
_CONSTANTS = re.compile(
    r"(?:.*\.)?(?:rotary_emb\..*|inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids|rope_freqs\.weight"
    r"|lm_head\.weight|embed_out\.weight|(?:en|de)coder\.embed_tokens\.weight|[kv]_scale|kv_scale)"
)
# Parts of a model that text generation does not run: other senses, drafts, heads of training.
_OTHER_PARTS = frozenset(
    {
        *("visual", "vision_tower", "vision_model", "vision_embed_tokens", "embed_vision", "image_newline"),
        *("multi_modal_projector", "mm_projector", "audio_tower", "embed_audio", "talker", "token2wav"),
        *("mtp", "score", "classifier", "v_head", "value_head"),
    }
)
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
NAMED = 3  # of the tensors left over, in the message


class TrackedCheckpoint:
    """Passes everything on to `inner`."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self._read: set[str] = set()

    def names(self) -> Collection[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def read(self, name: str, shape: tuple[int, ...], region: Region = ()) -> torch.Tensor:
        self._read.add(name)
        return self._inner.read(name, shape, region)

    def close(self) -> None:
        self._inner.close()

    def check_all_read(self, draft_layers_from: int | None = None) -> None:
        """Raises StartupError naming tensors that no layer read, but for those known to be of no use.

        `draft_layers_from`: the number of the first layer that only drafts, of a model that has such.
        """
        left = sorted(
            name for name in self.names() if name not in self._read and not _is_of_no_use(name, draft_layers_from)
        )
        if left:
            more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
            raise StartupError(
                f"The checkpoint holds {', '.join(left[:NAMED])}{more}, for which the model's configuration has no "
                "place; weights and configuration do not belong together"
            )


def _is_of_no_use(name: str, draft_layers_from: int | None) -> bool:
    if _CONSTANTS.fullmatch(name) or not _OTHER_PARTS.isdisjoint(name.split(".")):
        return True
    layer = _LAYER.fullmatch(name)
    return layer is not None and draft_layers_from is not None and int(layer[1]) >= draft_layers_from
