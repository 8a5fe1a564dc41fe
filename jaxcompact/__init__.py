"""Train neural networks in a fraction of the memory."""

from jaxcompact.codecs import Quantized as Quantized
from jaxcompact.limiter import limit_norm_growth as limit_norm_growth
from jaxcompact.linear import linear as linear
from jaxcompact.optimizers import in_subspace as in_subspace
from jaxcompact.optimizers import scale_by_subspace_adam as scale_by_subspace_adam
from jaxcompact.optimizers import subspace_adamw as subspace_adamw
from jaxcompact.optimizers import update_count as update_count
from jaxcompact.projection import Projection as Projection
from jaxcompact.subspace import Subspace as Subspace
from jaxcompact.subspace import value_and_grad as value_and_grad

__version__ = "0.1.0"
