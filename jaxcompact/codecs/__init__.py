"""How one tensor is stored between forward and backward."""

from jaxcompact.codecs.quantized import Encoded as Encoded
from jaxcompact.codecs.quantized import Quantized as Quantized
