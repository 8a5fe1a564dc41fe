"""How one tensor is stored between forward and backward."""

from jaxcompact.codecs.chain import Chain as Chain
from jaxcompact.codecs.codec import Codec as Codec
from jaxcompact.codecs.exact import BitMask as BitMask
from jaxcompact.codecs.exact import Narrow as Narrow
from jaxcompact.codecs.fitting import fitted as fitted
from jaxcompact.codecs.float8 import Float8 as Float8
from jaxcompact.codecs.hadamard import Hadamard as Hadamard
from jaxcompact.codecs.offload import Offload as Offload
from jaxcompact.codecs.outlier import OutlierQuantized as OutlierQuantized
from jaxcompact.codecs.quantized import Encoded as Encoded
from jaxcompact.codecs.quantized import Quantized as Quantized
