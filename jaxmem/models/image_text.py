"""Two towers that map images and texts to the same space (CLIP: Radford et al., arXiv:2103.00020).

    jaxmem.train(cfg, model=lambda rngs, execution: ImageText(rngs, execution, image, text), loss=image_text_loss,
                 data=jaxmem.data.ImageTexts("photos", rows=64, image_size=32))

A row of a batch is an image and its text. The other rows of the micro-batch are the negatives, over all devices.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmem.config import networks
from jaxmem.models import losses
from jaxmem.models.decoder import Decoder
from jaxmem.models.layers import RowKeys, fetch, new_constant, split_keys
from jaxmem.models.linear import Linear
from jaxmem.models.network import Execution
from jaxmem.models.vit import Vit

START_TEMPERATURE = 0.07


class ImageText(nnx.Module):
    """A vision transformer, whose `outputs` are the width of the common space, and a decoder with tied embeddings,
    whose last token is projected to this space. The temperature is trained."""

    def __init__(self, rngs: nnx.Rngs, execution: Execution, image: networks.Vit, text: networks.Decoder):
        self.image, self.text = Vit(image, rngs, execution), Decoder(text, rngs, execution)
        self.projection = Linear(rngs, text.embed, image.outputs, ("embed", "classes"))
        self.log_scale = new_constant(-math.log(START_TEMPERATURE), (), ())

    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        tokens: Int[Array, "batch time"],
        lengths: Int[Array, "batch"],
        keys: RowKeys | None = None,
    ) -> tuple[Float[Array, "batch features"], Float[Array, "batch features"]]:
        """The images and the texts in the common space. `keys` enables dropout."""
        first, second = (None, None) if keys is None else split_keys(keys, 2)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        x = self.text.features(tokens, positions, jnp.ones_like(tokens), second)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return self.image(images, first), self.projection(last)


def image_text_loss(
    model: ImageText, batch: dict[str, jax.Array], keys: RowKeys | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The symmetric InfoNCE loss, and the share of the texts whose image is found among all images of the batch."""
    images, texts = model(batch["image"], batch["text"], batch["length"], keys)
    rows = jnp.ones(len(images), jnp.float32)
    scores = losses.similarities(texts, images, rows, 1.0) * jnp.exp(fetch(model.log_scale, jnp.float32))
    found = jnp.argmax(scores, axis=-1) == jnp.arange(len(images))
    return jnp.mean(losses.contrastive(scores)), {"found": jnp.mean(found.astype(jnp.float32))}
