"""Two towers that map images and texts to the same space (CLIP: Radford et al., arXiv:2103.00020).

A row of a batch is an image and its text. The other rows of the micro-batch are the negatives, over all devices.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmem.config import networks
from jaxmem.models.decoder import Decoder
from jaxmem.models.image_networks import Vit
from jaxmem.models.layers import RowKeys, fetch, new_constant, split_keys
from jaxmem.models.linear import Linear
from jaxmem.models.network import Execution, Flow, NetworkPart, Part, run_parts, within

START_TEMPERATURE = 0.07  # as in CLIP (arXiv:2103.00020)


class ImageText(nnx.Module):
    """A vision transformer, whose `outputs` are the width of the common space, and a decoder with tied embeddings,
    whose last token is projected to this space. The temperature is trained."""

    def __init__(self, cfg: networks.ImageText, rngs: nnx.Rngs, execution: Execution = Execution()):
        text = cfg.text.replace(tie_embeddings=True)  # so that there is no output matrix, which nothing would use
        self.image = Vit(cfg, rngs, execution)
        self.text = Decoder(text, rngs, execution)
        self.projection = Linear(rngs, cfg.text.embed, cfg.outputs, ("embed", "classes"))
        self.log_scale = new_constant(-math.log(START_TEMPERATURE), (), ())

    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        tokens: Int[Array, "batch time"],
        lengths: Int[Array, "batch"],
        keys: RowKeys | None = None,
    ) -> tuple[Float[Array, "batch features"], Float[Array, "batch features"]]:
        """The images and the texts in the common space. `keys` enables dropout."""
        flow = run_parts(self, self.parts(images, tokens, lengths, keys))
        return flow.x, flow.kept

    def parts(
        self,
        images: Float[Array, "batch height width channels"],
        tokens: Int[Array, "batch time"],
        lengths: Int[Array, "batch"],
        keys: RowKeys | None = None,
    ) -> list[NetworkPart]:
        """The parts, of which the last one returns Flow(images, texts), in the common space."""
        image_keys, text_keys = (None, None) if keys is None else split_keys(keys, 2)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

        def project(network: ImageText, flow: Flow) -> Flow:
            last = jnp.take_along_axis(flow.x, (lengths - 1)[:, None, None], axis=1)[:, 0]
            return Flow(None, network.projection(last))

        return [
            *within("text", self.text.parts(tokens, positions, jnp.ones_like(tokens), text_keys)),
            Part(project),
            *within("image", self.image.parts(images, image_keys)),
            Part(lambda network, flow: flow._replace(x=network.image.logits(flow.x))),
        ]

    @property
    def scale(self) -> jax.Array:
        """The factor of the similarities: 1 / temperature."""
        return jnp.exp(fetch(self.log_scale, jnp.float32))
